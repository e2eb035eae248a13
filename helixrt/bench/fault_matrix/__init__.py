"""FTAR's fault matrix on real processes: every fault in every phase of an exchange (`helixrt bench faults`)."""
