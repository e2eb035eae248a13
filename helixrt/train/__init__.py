"""The main job: `python -m helixrt.train +experiment=tiny`.

Settings, text, models, and the engine of a rank. What runs a job of any model is in `helixrt.job`.
"""
