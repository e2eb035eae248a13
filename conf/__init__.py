"""Hydra settings in YAML, found as `pkg://helixrt.conf`: experiments and model sizes.

The schema and every default are the dataclasses of `helixrt.train.config`; a file here only says
what differs.
"""
