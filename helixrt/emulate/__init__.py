"""Simulated worlds: the pure protocols of `protocol/` driven by a virtual clock and a seeded order.

The same state machines that run in production run here with crashes, pauses and partitions, thousands
of times in a second; a failing seed prints itself and replays. Only `bench`, `cli` and tests import it.
"""
