"""The newest steps' measurements of one thing, cut where it changed.

In: one `Sample` per step. Out: an `Estimate` over the steps since the last change, and the changes. A step that differs by
itself (a garbage collection, a checkpoint, a warm-up) is no change; two in a row that differ alike are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.observe.estimates import Estimate, interval_of_median
from helixrt.observe.samples import Sample, summary

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
        self._floor_ms, self._most = floor_ms, steps
        self._steps: list[tuple[int, Sample]] = []
        self._estimate: Estimate | None = None  # of `_steps`; None: not made yet
        self.since = 0  # the first step of the present value; 0: that of the beginning

    def add(self, step: int, sample: Sample) -> Change | None:
        """Take in a step's measurement. The change that it confirms, if it does."""
        self._steps.append((step, sample))
        self._estimate = None
        if len(self._steps) > self._most:
            del self._steps[0]
        if len(self._steps) < _BEFORE + CONFIRMED:
            return None
        before, after = self._steps[:-CONFIRMED], self._steps[-CONFIRMED:]
        usual = summary([each.median for _, each in before])
        least_ms = max(self._floor_ms, _SHARE * abs(usual.median))
        differences = [each.median - usual.median for _, each in after]
        if not (all(d > least_ms for d in differences) or all(d < -least_ms for d in differences)):
            return None
        if min(abs(d) for d in differences) <= _DEVIATIONS * max(usual.spread, _within([each for _, each in before])):
            return None
        self._steps, self.since = after, after[0][0]
        return Change(self.since, usual.median, summary([each.median for _, each in after]).median)

    def estimate(self) -> Estimate | None:
        """None before the first step."""
        if self._estimate is None and self._steps:
            samples = [each for _, each in self._steps]
            steps = summary([each.median for each in samples])
            within = summary([each.spread for each in samples]).median
            self._estimate = Estimate(
                value_ms=steps.median,
                spread_ms=math.hypot(within, steps.spread),
                samples=sum([each.count for each in samples]),
                systematic_ms=interval_of_median(steps.spread, len(samples)),
            )
        return self._estimate


def _within(samples: Sequence[Sample]) -> float:
    """The deviation of a step's median that the spread of its samples makes."""
    return summary([each.spread / math.sqrt(each.count or 1) for each in samples]).median
