"""No running peer is reported as lost: ranks that reduce and pause for minutes, beside processes that use every core.

In: how long, and how many busy processes. Out: what each rank observed. If any rank reports another one as lost, all end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from helixrt.bench.fault_matrix import messages
from helixrt.bench.fault_matrix.cells import Outcome
from helixrt.bench.fault_matrix.processes import ALL, NoAnswer, RankProcess, RankProcesses
from helixrt.errors import Fatal

_OVERTIME_S = 120.0

# Ends when its parent has changed, so that it does not outlive its owner.
_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000):\n        pass\n"


@dataclass(frozen=True)
class Endurance:
    seconds: float
    burners: int
    sums: int  # exact all-reduces
    longest_s: float  # of one, of any rank
    problems: tuple[str, ...]


def endure(owner: RankProcesses, transports: Sequence[str], seconds: float, burners: int) -> dict[str, Endurance]:
    """By transport; all at the same time, each with ranks of its own."""
    groups = {transport: owner.start(ALL, transport, None) for transport in transports}
    everyone = [process for processes in groups.values() for process in processes]
    try:
        for processes in groups.values():
            for process in processes:
                process.send(messages.Configure(1, ALL, processes[0].ready.store))
        for answer in [process.receive() for process in everyone]:
            if answer.outcome is not Outcome.FINE:
                raise Fatal(f"rank {answer.rank} did not even connect: {answer.said}")
        with _burning(burners):
            for process in everyone:
                process.send(messages.Endure(seconds, ALL, seed=int(seconds)))
            seen = {transport: _results(processes, seconds, burners) for transport, processes in groups.items()}
        for process in everyone:
            process.send(messages.Command.END)
        return seen
    finally:
        owner.end(everyone)


def _results(processes: Sequence[RankProcess], seconds: float, burners: int) -> Endurance:
    ends: list[messages.Endured] = []
    problems = []
    for process in processes:
        try:
            ends.append(process.receive(seconds + _OVERTIME_S))
        except NoAnswer as missing:
            problems.append(str(missing))
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
