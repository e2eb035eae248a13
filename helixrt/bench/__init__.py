"""Benchmarks a user can run on their own machines: `helixrt bench NAME`.

Each public module is one benchmark, with `add_arguments(parser)` and `run(args) -> int`. It measures
helixrt and the alternative a user would take, interleaved in one run, and prints ratios with
p20/p50/p80 and writes a JSON file with device and versions.
"""
