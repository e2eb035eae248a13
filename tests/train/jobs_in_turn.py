"""`python jobs_in_turn.py NAME OVERRIDE … -- NAME OVERRIDE …`: the main job several times, one after another, in one process.

So the imports of the driver and of its ranks are paid once. After each it prints `run NAME ended with exit code CODE`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from helixrt.train.__main__ import main


def runs(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each one's name and overrides."""
    while arguments:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        yield arguments[0], arguments[1:end]
        arguments = arguments[end + 1 :]


if __name__ == "__main__":
    for name, overrides in runs(sys.argv[1:]):
        print(f"run {name} ended with exit code {main(overrides)}", flush=True)
