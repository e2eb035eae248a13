"""Validations joined: one figure for each agreed state, over all parts of the replicas or with the word over which.

In: parts as they come, the driver's copy of the log, the time. Out: `Logged` lines, each record's once. A part that comes again
(of a replica that was started again, or evaluated by another one) counts once. A figure without all parts is told when a later
step was committed `LATE_S` ago, or at the run's end; one of a record that was superseded meanwhile is not told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from helixrt.job.metrics import Logged, ValidationPart, ranks_of
from helixrt.protocol.step.lineage import Log

LATE_S = 30.0
_TOLD = 64  # records of which later parts are known to be late


@dataclass
class _Waiting:
    parts: dict[int, ValidationPart] = field(default_factory=dict)  # by the replica whose part it is
    late_by_s: float = math.inf  # when the figure is told without the rest


class SharedValidations:
    """Of the driver; from one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}  # by the record's hash
        self._told: dict[str, None] = {}  # the newest, in order

    def add(self, part: ValidationPart) -> None:
        """Take in a part; the first of each counts."""
        if part.lineage not in self._told:
            self._waiting.setdefault(part.lineage, _Waiting()).parts.setdefault(part.of, part)

    def due(self, log: Log, now_s: float) -> Iterator[Logged]:
        """What is complete, or late."""
        for lineage, waiting in list(self._waiting.items()):
            some = next(iter(waiting.parts.values()))
            if len(waiting.parts) == len(some.among):
                yield self._joined(lineage)
            elif log.head.step > some.step or (log.get(lineage) is not None and not log.on_chain(lineage)):
                waiting.late_by_s = min(waiting.late_by_s, now_s + LATE_S)
                if now_s >= waiting.late_by_s:
                    yield from self._late(lineage, log)

    def rest(self, log: Log) -> Iterator[Logged]:
        """All that is left, at the end."""
        for lineage in list(self._waiting):
            yield from self._late(lineage, log)

    def _late(self, lineage: str, log: Log) -> Iterator[Logged]:
        joined = self._joined(lineage)
        if log.may_be_on_chain(lineage):
            yield joined

    def _joined(self, lineage: str) -> Logged:
        self._told[lineage] = None
        if len(self._told) > _TOLD:
            del self._told[next(iter(self._told))]
        return joined(list(self._waiting.pop(lineage).parts.values()))


def joined(parts: list[ValidationPart]) -> Logged:
    """The weighted mean over these parts of one validation, each name over the parts that have it."""
    first = parts[0]
    if first.weight is None:
        return Logged(Logged.VALIDATION, first.replica, first.rank, first.step, first.sums, 0.0, 0, 0.0)
    weights = {part.of: part.weight or 0.0 for part in parts}
    weight = math.fsum(weights.values())
    values = {}
    for name in dict.fromkeys(name for part in parts for name in part.sums):
        having = [part for part in parts if name in part.sums]
        items = math.fsum(weights[part.of] for part in having)
        values[name] = math.fsum(part.sums[name] for part in having) / items if items else math.nan
    missing = [replica for replica in first.among if replica not in {part.of for part in parts}]
    partial = ""
    if missing:
        whose = ", ".join(f"r{replica}" for replica in missing)
        partial = f"over {len(parts)} of {len(first.among)} parts, without that of {whose}"
    replicas = sorted({part.replica for part in parts})
    return Logged(
        Logged.VALIDATION,
        replicas[0],
        ranks_of(replicas),
        first.step,
        values,
        0.0,
        0,
        0.0,
        weight=weight,
        parts=len(first.among),
        partial=partial,
    )
