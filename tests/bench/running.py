"""How tests run a benchmark: by its module and the command line that a user gives."""

from __future__ import annotations

import argparse
from types import ModuleType


def run_bench(bench: ModuleType, *given: str) -> int:
    """The exit code of `helixrt bench` with these arguments, in this process."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return int(bench.run(parser.parse_args(given)))
