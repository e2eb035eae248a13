"""Rules of a link through shared memory, without memory."""
