"""Schedules as data: who computes what, in which order. No torch here.

`ir` holds the types and the validity check, `generators` the functions that build schedules by name.
Everything that runs, simulates, plans or draws a schedule starts from `ir.Schedule`.
"""
