"""Two figures of a whole run: goodput, and model FLOPs utilisation.

In: the run's commit records, as they come, and the time since the run began. Out: shares between 0 and 1.

- **Goodput** is the share of the time of all replicas that went into steps that were committed: each contribution of a replica
  counts with the time between two updates, but at most with what is usual in the run, over replicas x time since the driver
  began. What is missing to 1 went into starting, capturing graphs, waiting for a lost replica, fetching state, and steps that
  were computed again.
- **Model FLOPs utilisation** (Chowdhery et al., PaLM, 2022, section 4.1) is the floating-point operations of the model's
  forward and backward over what the hardware could have done meanwhile; recomputation does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from helixrt.protocol.step.lineage import CommitRecord

_USUAL = 101  # looks whose median time of a step is what is usual
_FIRST = 5  # before so many are known, goodput is not: the first step of a process takes the longest


class Goodput:
    """Of one run with so many replicas. A step that is computed again counts once."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._useful_s: float | None = None
        self._times: deque[float] = deque(maxlen=_USUAL)
        self._waiting: list[tuple[int, float]] = []  # contributions, seconds of each: until it is known what is usual
        self._newest = 0  # step

    def add(self, records: Sequence[CommitRecord], seconds: float) -> None:
        """Take in records, at least one, that came in so many seconds."""
        contributions = 0
        for record in records:
            if record.step > self._newest:
                self._newest = record.step
                contributions += len(record.summed)
        each_s = seconds / len(records)
        self._times.append(each_s)
        self._waiting.append((contributions, each_s))
        if len(self._times) >= _FIRST:
            usual_s = median(self._times)
            new_s = sum(count * min(own_s, usual_s) for count, own_s in self._waiting)
            self._useful_s = (self._useful_s or 0.0) + new_s
            self._waiting.clear()

    def share(self, elapsed_s: float) -> float | None:
        """Up to now, so long after the driver began; None while it is not known what is usual."""
        if self._useful_s is None or elapsed_s <= 0:
            return None
        return min(1.0, self._useful_s / (self._replicas * elapsed_s))


def flops_utilisation(flops: float, seconds: float, peak_flops: float) -> float | None:
    """Of one replica: `flops` in a step of `seconds`, on ranks that can do `peak_flops` a second together; None where one of
    these is not known."""
    return flops / (seconds * peak_flops) if flops > 0 and seconds > 0 and peak_flops > 0 else None
