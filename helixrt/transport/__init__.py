"""What carries bytes between ranks, behind one contract (`contract.Endpoint`): TCP, shared memory, and a choice of them.

The rules of links (exactly-once delivery, failover, liveness) are pure state machines in `protocol/`; the drivers here do
the input and output. `auto` picks for every peer the best way that reaches it.
"""
