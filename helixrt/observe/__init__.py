"""Makes sense of the flight record: what a lost replica cost, a step as lanes of bars.

It reads `helixrt.record` events and gives findings; it never takes part in a step. Room for profiles,
stragglers and root causes too.
"""
