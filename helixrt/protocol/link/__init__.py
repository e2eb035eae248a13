"""Links: several rails to one peer, one of which may fail at any time (SHIFT section 4.3)."""
