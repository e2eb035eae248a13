"""Room for making sense of the flight record: profiles, stragglers, root causes. Empty so far.

It reads `helixrt.record` events and gives findings; it never takes part in a step.
"""
