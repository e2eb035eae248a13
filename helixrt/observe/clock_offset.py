"""The offset between two hosts' clocks, from messages both ways, and how far off the answer can be.

In: differences of stamps (receiver's clock less sender's) of messages each way, the smallest of each step. Out: `Offset`.
No message arrives before it is sent, so a message from a to b shows that clock b less clock a is at most its difference, and
one from b to a that it is at least the negative of its. Each bound holds at its time; in between the offset drifts, by at most
`MOST_DRIFT`.
The offset now is somewhere in what all bounds of the past and one drift allow (a linear program of two unknowns, as in Moon,
Skelly and Towsley, 1999); steps with a quiet link make it narrow, and what a later slow link does not show then stays known. If
nothing fits all bounds, a clock was set: only the newest bounds are kept. Where a link was slow from the beginning and one way
only, no method can tell half of that delay from an offset: the uncertainty says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_DRIFT = 500e-6  # the most by which NTP slews a clock; oscillators stay below
_MOST_BOUNDS = 24  # of each side that are kept
_ROUNDS = 40  # of halving: a drift is found to 1e-12
_GRAIN_S = 5e-6  # resolution of stamps


@dataclass(frozen=True, slots=True)
class Offset:
    """Clock b less clock a; the truth is within `uncertainty_s` of it."""

    offset_s: float
    uncertainty_s: float
    drift: float = 0.0  # seconds a second


SAME_CLOCK = Offset(0.0, 0.0)


class OffsetTracker:
    """Of the hosts a and b. Times are of clock a, in s."""

    def __init__(self) -> None:
        self._upper: list[tuple[float, float]] = []  # (time, the offset is at most)
        self._lower: list[tuple[float, float]] = []
        self._answer: Offset | None = None
        self._answered_s = -math.inf

    def to_b(self, at_s: float, difference_s: float) -> None:
        """A message from a to b, sent at `at_s`: arrival by clock b less sending by clock a."""
        self._add(self._upper, at_s, difference_s, min)

    def to_a(self, at_s: float, difference_s: float) -> None:
        """A message from b to a that arrived at `at_s`: arrival by clock a less sending by clock b."""
        self._add(self._lower, at_s, -difference_s, max)

    def _add(
        self, bounds: list[tuple[float, float]], at_s: float, bound_s: float, tighter: Callable[[float, float], float]
    ) -> None:
        self._answer = None
        bounds.append((at_s, bound_s))
        if len(bounds) > _MOST_BOUNDS:  # of two neighbours the tighter one stays, in the older half
            half = bounds[: _MOST_BOUNDS // 2]
            pairs = zip(half[::2], half[1::2], strict=True)
            bounds[: len(half)] = [a if tighter(a[1], b[1]) == a[1] else b for a, b in pairs]

    def at(self, now_s: float) -> Offset | None:
        """None until there was a message each way."""
        if not self._upper or not self._lower:
            return None
        if self._answer is None or abs(now_s - self._answered_s) > 1e-3:
            self._answer, self._answered_s = self._solved(now_s), now_s
        return self._answer

    def _solved(self, now_s: float) -> Offset:
        upper = [(at_s - now_s, bound_s + _GRAIN_S) for at_s, bound_s in self._upper]
        lower = [(at_s - now_s, bound_s - _GRAIN_S) for at_s, bound_s in self._lower]

        def most(drift: float) -> float:
            return min([bound_s - drift * age_s for age_s, bound_s in upper])

        def least(drift: float) -> float:
            return max([bound_s - drift * age_s for age_s, bound_s in lower])

        def room(drift: float) -> float:
            return most(drift) - least(drift)

        widest = _highest(room, -MOST_DRIFT, MOST_DRIFT)
        if room(widest) < 0:
            self._upper, self._lower = self._upper[-1:], self._lower[-1:]
            at_most, at_least = self._upper[0][1], self._lower[0][1]
            return Offset((at_most + at_least) / 2, abs(at_most - at_least) / 2)
        slowest, fastest = _edge(room, widest, -MOST_DRIFT), _edge(room, widest, MOST_DRIFT)
        at_most = most(_highest(most, slowest, fastest))
        at_least = least(_highest(lambda drift: -least(drift), slowest, fastest))
        return Offset((at_most + at_least) / 2, (at_most - at_least) / 2, widest)


def _highest(concave: Callable[[float], float], low: float, high: float) -> float:
    """Where a concave function is highest."""
    for _ in range(_ROUNDS):
        third = (high - low) / 3
        if concave(low + third) < concave(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _edge(room: Callable[[float], float], inside: float, outside: float) -> float:
    """The last drift from `inside` towards `outside` that all bounds allow."""
    if room(outside) >= 0:
        return outside
    for _ in range(_ROUNDS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if room(middle) >= 0 else (inside, middle)
    return inside
