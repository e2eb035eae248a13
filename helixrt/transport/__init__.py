"""Room for what carries bytes between hosts: TCP, shared memory and verbs behind one link contract. Empty so far.

The rules of links (exactly-once delivery, failover, path hopping) belong in `protocol/` as pure state
machines; this room is for the drivers that do the input and output.
"""
