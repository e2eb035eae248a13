"""Algorithms of collectives: pure functions that build the `Plan` of one rank.

In: rank, number of ranks, lengths in bytes, element size, `Tuning`. Out: a plan (`protocol/collective/plan.py`).
`choice` picks among `ring`, `direct` and `chain` by size; all ranks pick the same without talking, because
they decide from the same numbers. No region of a plan crosses the border of a rank's block.
"""
