"""What simulated worlds share: promises that are checked, violations with the line that replays them, the command line.

In: a world that follows from a seed. Out: `Violation`, whose message ends with the command that runs the same world again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from helixrt.errors import HelixError


class Wrong(AssertionError):
    """A promise of what is tested, or of its world, was broken."""


class Violation(AssertionError):
    """An invariant was broken; the message ends with the line that replays it."""


def check(rule: bool, what: str) -> None:
    if not rule:
        raise Wrong(what)


def content(end: int, name: tuple[int, int], length: int) -> bytes:
    """What `end` sends as message `name` (op, index)."""
    text = b"%d of %d in %d; " % (name[1], end, name[0])
    return (text * (length // len(text) + 1))[:length]


@contextmanager
def replayable(module: str, seed: int, state: Callable[[], str] = str, options: str = "") -> Iterator[None]:
    """Raise what a run raises as a Violation: broken promises, and errors of the code under test.

    `state` describes the world at that moment, for the message. `options` are further arguments of the replay command.
    """
    try:
        yield
    except (AssertionError, LookupError, ValueError, HelixError, OSError) as error:
        name = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        replay = f"python -m {module} --seed {seed}{options}"
        raise Violation(f"{name}{error}{state()}; replay: {replay}") from error


def main(run: Callable[[int], object], arguments: Sequence[str] | None = None) -> None:
    """`--seed N [--count M]`: run one seed, or M seeds from N on, and print what happened."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.count):
        print(run(seed))
