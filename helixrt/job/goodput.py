"""Two figures of a whole run: goodput, and model FLOPs utilisation.

In: what replicas report of their steps, and the time since the run began. Out: shares between 0 and 1.

- **Goodput** is the share of the time of all replicas that went into steps that were committed: each contribution of a replica
  counts with the time between its two updates less what it stalled, but at most with what is usual for it, over replicas x time
  since the driver began. What is missing to 1 went into starting, capturing graphs, waiting for a lost replica, fetching state,
  and steps that were computed again.
- **Model FLOPs utilisation** (Chowdhery et al., PaLM, 2022, section 4.1) is the floating-point operations of the model's
  forward and backward over what the hardware could have done meanwhile; recomputation does not count.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from helixrt.job.means import Line

_USUAL = 101  # steps of all replicas whose median is what is usual
_FIRST = 5  # before so many are known, none counts: the first step of a process takes the longest


class Goodput:
    """Of one run with so many replicas. A step that is reported twice by a replica counts once."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._useful_s = 0.0
        self._times: deque[float] = deque(maxlen=_USUAL)
        self._newest: dict[int, int] = {}  # replica -> its newest step

    def add(self, line: Line) -> None:
        """Take in what a replica reports of a step that it contributed to."""
        if line.step <= self._newest.get(line.replica, 0):
            return
        self._newest[line.replica] = line.step
        self._times.append(max(0.0, line.seconds - line.stall_s))
        count = len(self._times)
        if count >= _FIRST:
            usual_s = median(self._times)
            new = self._times if count == _FIRST and not self._useful_s else [self._times[-1]]
            self._useful_s += sum(min(own_s, usual_s) for own_s in new)

    def share(self, elapsed_s: float) -> float:
        """Up to now, so long after the driver began; 0 before the first steps."""
        return min(1.0, self._useful_s / (self._replicas * elapsed_s)) if elapsed_s > 0 else 0.0


def flops_utilisation(flops: float, seconds: float, peak_flops: float) -> float | None:
    """Of one replica: `flops` in a step of `seconds`, on ranks that can do `peak_flops` a second together; None where one of
    these is not known."""
    return flops / (seconds * peak_flops) if flops > 0 and seconds > 0 and peak_flops > 0 else None
