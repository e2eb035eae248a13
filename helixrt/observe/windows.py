"""The newest steps' measurements of one thing, cut where it changed.

In: one `Sample` per step. Out: an `Estimate` over the steps since the last change, and the changes. A step that differs by
itself (a garbage collection, a checkpoint, a warm-up) is no change; two in a row that differ in the same way are. Steps whose
error is far larger than that of the newest one, such as those around a clock that was set, count no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helixrt.observe.estimates import Estimate, interval_of_median
from helixrt.observe.samples import Sample, median, summary

STEPS = 16  # of a window
CONFIRMED = 2  # steps in a row that differ, for a change
_BEFORE = 2  # steps that a change is measured against, at least
_DEVIATIONS = 5.0  # standard deviations of a step's median
_SHARE = 0.15  # of the value; less is no change
_FAR_LARGER = 2.0  # times the error
_RENEWED = 4  # steps for which a spread is taken to be what it was


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
        self._steps: list[tuple[int, Sample, float]] = []  # step, measurement, error that its samples share
        self._medians: list[float] = []  # of `_steps`
        self._usual_ms: float | None = None  # as it was last figured out; None: not yet
        self._spreads: tuple[float, float] = (0.0, 0.0)  # of a step's samples, and from step to step
        self._spreads_left = 0  # steps for which these hold
        self.since = 0  # the first step of the present value; 0: that of the beginning

    def add(self, step: int, sample: Sample, error_ms: float = 0.0) -> Change | None:
        """Take in a step's measurement; `error_ms` bounds an error of all its samples. The change that it confirms, if any."""
        self._steps.append((step, sample, error_ms))
        self._medians.append(sample.median)
        self._spreads_left -= 1
        if len(self._steps) > self._most:
            del self._steps[0], self._medians[0]
        if len(self._steps) < _BEFORE + CONFIRMED:
            return None
        usual_ms = self._usual_ms
        if usual_ms is not None and abs(sample.median - usual_ms) <= 0.5 * max(self._floor_ms, _SHARE * abs(usual_ms)):
            return None  # as most are: nothing is worked out
        return self._changed()

    def _changed(self) -> Change | None:
        before, after = self._steps[:-CONFIRMED], self._medians[-CONFIRMED:]
        usual = summary(self._medians[:-CONFIRMED])
        self._usual_ms = usual.median
        errors_ms = median([error for _, _, error in before]) + max(error for _, _, error in self._steps[-CONFIRMED:])
        least_ms = max(self._floor_ms, errors_ms, _SHARE * abs(usual.median))
        differences = [each - usual.median for each in after]
        if not (all(d > least_ms for d in differences) or all(d < -least_ms for d in differences)):
            return None
        within = median([each.spread / math.sqrt(each.size or 1) for _, each, _ in before])
        if min(abs(d) for d in differences) <= _DEVIATIONS * max(usual.spread, within):
            return None
        self._steps, self._medians, self._usual_ms, self._spreads_left = self._steps[-CONFIRMED:], after, None, 0
        self.since = self._steps[0][0]
        return Change(self.since, usual.median, median(after))

    def estimate(self) -> Estimate | None:
        """None before the first step."""
        if not self._steps:
            return None
        most_ms = max(self._floor_ms, _FAR_LARGER * self._steps[-1][2])
        steps, medians = self._steps, self._medians
        if any([error > most_ms for _, _, error in steps]):
            steps = [each for each in steps if each[2] <= most_ms]
            medians = [each.median for _, each, _ in steps]
            self._spreads_left = 0
        if self._spreads_left <= 0:
            between = summary(medians).spread
            self._spreads = (median([each.spread for _, each, _ in steps]), between)
            self._spreads_left = _RENEWED if len(steps) > _RENEWED else 1
        within, between = self._spreads
        self._usual_ms = value_ms = median(medians)
        count = len(steps) * steps[-1][1].size
        systematic_ms = interval_of_median(between, len(steps))
        return Estimate(value_ms, math.hypot(within, between), count, systematic_ms, self._steps[-1][0])
