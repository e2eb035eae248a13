"""The commands of `helixrt` that need more than a few lines: their arguments, and what they print. One file each."""
