"""Path hopping: which of a link's paths new messages take (Hopper section 3)."""
