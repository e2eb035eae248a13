"""Schedules as data: who computes what, in which order. No torch here.

Everything starts from `ir.Schedule`: `check` proves that it can run, `simulate` times it under `costs`, `exchange` writes
and draws it. `generators` holds the published schedules, `planner` our own and its bounds, `adaptation` what is done
when links slow down, `explore` the notebooks' sliders.
"""
