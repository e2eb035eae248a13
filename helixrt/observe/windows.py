"""The newest steps' measurements of one thing, cut where it changed.

In: one `Sample` per step. Out: an `Estimate` over the steps since the last change, and the changes. A step that differs by
itself (a garbage collection, a checkpoint, a warm-up) is no change; two in a row that differ alike are.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from helixrt.observe.estimates import Estimate, interval_of_median
from helixrt.observe.samples import Sample, spread_of

STEPS = 16  # of a window
CONFIRMED = 2  # steps in a row that differ, for a change
_BEFORE = 2  # steps that a change is measured against, at least
_DEVIATIONS = 5.0  # standard deviations of a step's median
_SHARE = 0.15  # of the value; less is no change


@dataclass(frozen=True, slots=True)
class Change:
    """A value that became another one with `step`, in ms."""

    step: int
    before_ms: float
    after_ms: float


class Window:
    """`floor_ms`: smaller differences are no change."""

    def __init__(self, floor_ms: float, steps: int = STEPS) -> None:
        self._floor_ms = floor_ms
        self._steps: deque[tuple[int, Sample]] = deque(maxlen=steps)
        self.since = 0  # the first step of the present value; 0: that of the beginning

    def add(self, step: int, sample: Sample) -> Change | None:
        """Take in a step's measurement. The change that it confirms, if it does."""
        self._steps.append((step, sample))
        if len(self._steps) < _BEFORE + CONFIRMED:
            return None
        entries = list(self._steps)
        before, after = entries[:-CONFIRMED], entries[-CONFIRMED:]
        medians = [each.median for _, each in before]
        usual_ms = statistics.median(medians)
        limit_ms = max(self._floor_ms, _SHARE * abs(usual_ms), _DEVIATIONS * self._deviation_ms(before))
        differences = [each.median - usual_ms for _, each in after]
        if not (all(d > limit_ms for d in differences) or all(d < -limit_ms for d in differences)):
            return None
        self._steps = deque(after, maxlen=self._steps.maxlen)
        self.since = after[0][0]
        return Change(self.since, usual_ms, statistics.median(each.median for _, each in after))

    @staticmethod
    def _deviation_ms(entries: list[tuple[int, Sample]]) -> float:
        """Of a step's median: what was seen from step to step, and what its samples make of it."""
        within = statistics.median(each.spread / math.sqrt(max(1, each.count)) for _, each in entries)
        return max(within, spread_of([each.median for _, each in entries]))

    def estimate(self) -> Estimate | None:
        """None before the first step."""
        if not self._steps:
            return None
        samples = [each for _, each in self._steps]
        medians = [each.median for each in samples]
        from_step_to_step = spread_of(medians)
        within = statistics.median(each.spread for each in samples)
        return Estimate(
            value_ms=statistics.median(medians),
            spread_ms=math.hypot(within, from_step_to_step),
            samples=sum(each.count for each in samples),
            systematic_ms=interval_of_median(from_step_to_step, len(samples)),
        )
