"""The main job: `python -m helixrt.train +experiment=tiny`.

Settings, text, models, the loop of a rank, checkpoints, metrics and the report. It puts the rooms
below together, in local processes or on a Ray cluster, and holds no protocol rule of its own.
"""
