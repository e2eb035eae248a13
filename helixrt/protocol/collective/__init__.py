"""Collectives: plans of who sends, receives and reduces what, and the machine that carries one out (FT-HSDP section 4.2)."""
