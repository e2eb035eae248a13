"""What replicas say of one step, joined: one line on the console and one point for the loggers, not one per replica.

In: the lines of replicas, as they come, and the time. Out: a `Joined` for each step, in order: when all that contributed have
reported it, or when some are late (a replica that died after the step never reports it). Replicas that do not report steps at
all (a program that logs on one replica only) are waited for in its first steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from helixrt.job.metrics import Logged, StepMetrics, ranks_of

LATE_S = 2.0  # a step is told so long after its first line at the latest
_SILENT = 3  # steps in succession without a replica's line, after which none is waited for
Line = StepMetrics | Logged


@dataclass(frozen=True)
class Joined:
    """The lines of a step, one per replica in their order, and the mean of them.

    `mean`: losses and gradient norms are means over replicas, weighted by their tokens where they say how many; tokens are
    their sum, seconds and stall those of the slowest. Logged values are means, of those replicas that logged the name.
    """

    step: int
    lines: tuple[Line, ...]
    mean: Line


class StepMeans:
    """Joins lines by step. The same step of the same replica again replaces its line, unless the step was told."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[float, dict[int, Line]]] = {}  # step -> when its first line came, by replica
        self._told = 0  # the newest step that was joined
        self._had: frozenset[int] = frozenset()  # the replicas that reported that step
        self._alike = 0  # how many steps in succession they alone have reported, of more that contributed

    def add(self, line: Line, now_s: float) -> Iterator[Joined]:
        """Take in a line; what is complete now. A step below one that was told is told no more."""
        if line.replica not in self._had:
            self._alike = 0
        if line.step > self._told:
            self._waiting.setdefault(line.step, (now_s, {}))[1][line.replica] = line
        yield from self.due(now_s)

    def due(self, now_s: float) -> Iterator[Joined]:
        """What is complete, or late; steps in order."""
        while self._waiting:
            step = min(self._waiting)
            first_s, lines = self._waiting[step]
            expected = max(line.participants for line in lines.values())
            whole = len(lines) >= expected or (self._alike >= _SILENT and lines.keys() >= self._had)
            if not whole and now_s - first_s < LATE_S:
                return
            yield self._joined(step)

    def rest(self) -> Iterator[Joined]:
        """All that is left, at the end."""
        while self._waiting:
            yield self._joined(min(self._waiting))

    def _joined(self, step: int) -> Joined:
        _, by_replica = self._waiting.pop(step)
        self._told, had = step, frozenset(by_replica)
        lacks = len(had) < max(line.participants for line in by_replica.values())
        self._alike = (self._alike + 1 if had == self._had else 1) if lacks else 0
        self._had = had
        lines = tuple(by_replica[replica] for replica in sorted(by_replica))
        return Joined(step, lines, mean_of(lines))


def mean_of(lines: Sequence[Line]) -> Line:
    """See `Joined`. Of one line it is the line itself."""
    first = lines[0]
    if len(lines) == 1:
        return first
    seconds, stall_s = max(line.seconds for line in lines), max(line.stall_s for line in lines)
    if isinstance(first, StepMetrics):
        mean = _mean_of_text([line for line in lines if isinstance(line, StepMetrics)])
        return replace(mean, seconds=seconds, stall_s=stall_s)
    names = dict.fromkeys(name for line in lines if isinstance(line, Logged) for name in line.values)
    values = {
        name: fmean(line.values[name] for line in lines if isinstance(line, Logged) and name in line.values) for name in names
    }
    return replace(first, rank=_ranks(lines), values=values, seconds=seconds, stall_s=stall_s)


def _mean_of_text(lines: Sequence[StepMetrics]) -> StepMetrics:
    """Those that contributed count by their tokens."""
    trained = [line for line in lines if line.loss_nats is not None]
    tokens = sum(line.tokens for line in trained)
    loss = None
    if tokens:
        loss = math.fsum(line.tokens * line.loss_nats for line in trained if line.loss_nats is not None) / tokens
    norm = fmean(line.grad_norm for line in lines)
    return replace(lines[0], rank=_ranks(lines), loss_nats=loss, tokens=tokens, grad_norm=norm)


def _ranks(lines: Sequence[Line]) -> str:
    return ranks_of([line.replica for line in lines])
