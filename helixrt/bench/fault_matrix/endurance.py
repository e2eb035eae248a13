"""No living peer is declared dead: ranks that reduce and pause for minutes, beside processes that take every core.

In: how long, and how many processes burn. Out: what each rank saw. A rank that was declared dead, by whomever, ends all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from helixrt.bench.fault_matrix import cues
from helixrt.bench.fault_matrix.cells import Outcome
from helixrt.bench.fault_matrix.troupe import ALL, Actor, Stuck, Troupe
from helixrt.errors import Fatal

_OVERTIME_S = 120.0

# Ends when its parent is another: nothing outlives its owner.
_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000):\n        pass\n"


@dataclass(frozen=True)
class Endurance:
    seconds: float
    burners: int
    sums: int  # exact all-reduces
    longest_s: float  # of one, of any rank
    problems: tuple[str, ...]


def endure(troupe: Troupe, transports: Sequence[str], seconds: float, burners: int) -> dict[str, Endurance]:
    """By transport; all at the same time, each with ranks of its own."""
    casts = {transport: troupe.cast(ALL, transport, None) for transport in transports}
    everyone = [actor for actors in casts.values() for actor in actors]
    try:
        for actors in casts.values():
            for actor in actors:
                actor.tell(cues.Configure(1, ALL, actors[0].ready.store))
        for answer in [actor.hear() for actor in everyone]:
            if answer.outcome is not Outcome.FINE:
                raise Fatal(f"rank {answer.rank} did not even connect: {answer.said}")
        with _burning(burners):
            for actor in everyone:
                actor.tell(cues.Endure(seconds, ALL, seed=int(seconds)))
            seen = {transport: _hear(actors, seconds, burners) for transport, actors in casts.items()}
        for actor in everyone:
            actor.tell(cues.Word.END)
        return seen
    finally:
        troupe.dismiss(everyone)


def _hear(actors: Sequence[Actor], seconds: float, burners: int) -> Endurance:
    ends: list[cues.Endured] = []
    problems = []
    for actor in actors:
        try:
            ends.append(actor.hear(seconds + _OVERTIME_S))
        except Stuck as stuck:
            problems.append(str(stuck))
    problems += [f"rank {end.rank}: {end.problem}" for end in ends if end.problem]
    sums, longest_s = min((end.sums for end in ends), default=0), max((end.longest_s for end in ends), default=0.0)
    return Endurance(seconds, burners, sums, longest_s, tuple(problems))


@contextmanager
def _burning(count: int) -> Iterator[None]:
    burners: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            burners.append(subprocess.Popen([sys.executable, "-c", _BURN]))
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
