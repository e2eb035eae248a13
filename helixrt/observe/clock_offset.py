"""The offset between two hosts' clocks, from messages both ways, and how far off the answer can be.

In: differences of stamps (receiver's clock less sender's) of messages each way, the smallest of each step. Out: `Offset`.
No message arrives before it is sent, so a message from a to b shows that clock b less clock a is at most its difference, and
one from b to a that it is at least the negative of its. Each bound holds at its time; in between the offset drifts, at a rate
that is constant but for `WANDER`, and at most `MOST_DRIFT`. The offset now is somewhere in what all bounds of the past and one
rate allow (a linear program of two unknowns; of the bounds only those on a convex hull count: Moon, Skelly and Towsley, 1999).
Steps with a quiet link make it narrow, and stay known when the link is slow later. If nothing fits all bounds, a clock was set:
only the newest bounds are kept. If clock a was set back, all are forgotten: they are of times that come again. Where a link was
slow from the beginning and one way only, no method can tell half of that delay from an offset: the uncertainty says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_DRIFT = 500e-6  # the most by which NTP slews a clock; oscillators stay below
WANDER = 1e-6  # by which a clock's rate changes, with temperature
_MOST_BOUNDS = 24  # of each side that are kept
_ROUNDS, _ROUNDS_AGAIN = 30, 12  # of narrowing an interval of drifts by a third: all of them, those that were possible before
_ALL = (-MOST_DRIFT, MOST_DRIFT)
_GRAIN_S = 5e-6  # resolution of stamps
# For so long what was worked out goes on by its drifts: at most, and of the time for which messages have come, for the first
# ones show much of the drift. Half of that if a message has shown more since, and no longer if one has shown otherwise.
_HOLDS_S, _HOLDS_SHARE = 5.0, 0.1
_TIGHTER = 0.1  # of the uncertainty, by which a bound shows more


@dataclass(frozen=True, slots=True)
class Offset:
    """Clock b less clock a; the truth is within `uncertainty_s` of it."""

    offset_s: float
    uncertainty_s: float
    drift: float = 0.0  # seconds a second


SAME_CLOCK = Offset(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Known:
    """At `now_s`: the offset's bounds, and those of its drift."""

    now_s: float
    most_s: float
    least_s: float
    slowest: float
    fastest: float
    drift: float

    @property
    def little_s(self) -> float:
        """Less than this makes no difference."""
        return _GRAIN_S + _TIGHTER * (self.most_s - self.least_s)

    def at_most(self, at_s: float) -> float:
        """The offset at another time."""
        later_s = at_s - self.now_s
        return self.most_s + (self.fastest if later_s > 0 else self.slowest) * later_s

    def at_least(self, at_s: float) -> float:
        """The offset at another time."""
        later_s = at_s - self.now_s
        return self.least_s + (self.slowest if later_s > 0 else self.fastest) * later_s


class _Hull:
    """Bounds on one side (`sign` 1: the offset is at most, -1: at least), those that count: the convex hull towards it."""

    def __init__(self, sign: float) -> None:
        self._sign = sign
        self.bounds: list[tuple[float, float]] = []  # (time, bound), by time

    @property
    def newest_s(self) -> float:
        """The time of the newest bound."""
        return self.bounds[-1][0] if self.bounds else -math.inf

    def add(self, at_s: float, bound_s: float) -> None:
        """Of a later time than all before."""
        bounds = self.bounds
        while len(bounds) > 1 and self._above(bounds[-2], bounds[-1], (at_s, bound_s)) >= 0:
            bounds.pop()
        bounds.append((at_s, bound_s))
        if len(bounds) > _MOST_BOUNDS:  # the one without which the hull changes least
            inner = range(1, len(bounds) - 1)
            bounds.pop(min(inner, key=lambda i: abs(self._above(bounds[i - 1], bounds[i], bounds[i + 1]))))

    def _above(self, before: tuple[float, float], bound: tuple[float, float], after: tuple[float, float]) -> float:
        """By how much a bound is looser than the line between its neighbours."""
        share = (bound[0] - before[0]) / (after[0] - before[0])
        return self._sign * (bound[1] - before[1] - share * (after[1] - before[1]))

    def seen_from(self, now_s: float) -> list[tuple[float, float]]:
        """(time less now, bound), looser by what rates wander in that time."""
        sign = self._sign
        return [(at_s - now_s, b + sign * (_GRAIN_S + WANDER * abs(now_s - at_s))) for at_s, b in self.bounds]

    def only_newest(self) -> float:
        """Forget all others; this one."""
        del self.bounds[:-1]
        return self.bounds[0][1]


class OffsetTracker:
    """Of the hosts a and b. Times are of clock a, in s; those of messages one way grow from call to call, unless it is set
    back."""

    def __init__(self) -> None:
        self._upper = _Hull(1.0)
        self._lower = _Hull(-1.0)
        self._known: _Known | None = None
        self._tighter = False  # a message has shown more than that
        self._since_s = math.inf  # the first message
        self._drifts = _ALL  # those that were possible, and a few more

    def to_b(self, at_s: float, difference_s: float) -> None:
        """A message from a to b, sent at `at_s`: arrival by clock b less sending by clock a."""
        if not self._is_later(at_s, self._upper):
            return
        self._upper.add(at_s, difference_s)
        self._since_s = min(self._since_s, at_s)
        known = self._known
        if known is not None and difference_s < known.at_most(at_s) - known.little_s:
            self._shown(difference_s + _GRAIN_S < known.at_least(at_s))

    def to_a(self, at_s: float, difference_s: float) -> None:
        """A message from b to a that arrived at `at_s`: arrival by clock a less sending by clock b."""
        if not self._is_later(at_s, self._lower):
            return
        self._lower.add(at_s, -difference_s)
        self._since_s = min(self._since_s, at_s)
        known = self._known
        if known is not None and -difference_s > known.at_least(at_s) + known.little_s:
            self._shown(-difference_s - _GRAIN_S > known.at_most(at_s))

    def _is_later(self, at_s: float, hull: _Hull) -> bool:
        """Whether it is, than the messages before; if it is earlier the clock was set back, and those are forgotten."""
        if at_s < hull.newest_s:
            self._upper, self._lower = _Hull(1.0), _Hull(-1.0)
            self._known, self._tighter, self._since_s = None, False, math.inf
        return at_s != hull.newest_s

    def _shown(self, otherwise: bool) -> None:
        self._tighter = True
        if otherwise:
            self._known = None

    def at(self, now_s: float) -> Offset | None:
        """None until there was a message each way."""
        if not self._upper.bounds or not self._lower.bounds:
            return None
        known = self._known
        holds_s = min(_HOLDS_S, _HOLDS_SHARE * (now_s - self._since_s)) * (0.5 if self._tighter else 1.0)
        if known is None or abs(now_s - known.now_s) > holds_s:
            known, self._tighter = self._solved(now_s), False
            self._known = known
        if known is None:  # a clock was set; what was known is wrong, and one of these may be, too
            one, other = self._upper.only_newest(), self._lower.only_newest()
            return Offset((one + other) / 2, abs(one - other) / 2)
        at_most, at_least = known.at_most(now_s), known.at_least(now_s)
        return Offset((at_most + at_least) / 2, (at_most - at_least) / 2, known.drift)

    def _solved(self, now_s: float) -> _Known | None:
        """None if nothing fits all bounds."""
        upper, lower = self._upper.seen_from(now_s), self._lower.seen_from(now_s)

        def most(drift: float) -> float:
            return min([bound_s - drift * age_s for age_s, bound_s in upper])

        def least(drift: float) -> float:
            return max([bound_s - drift * age_s for age_s, bound_s in lower])

        def room(drift: float) -> float:
            return most(drift) - least(drift)

        (low, high), rounds = self._drifts, _ROUNDS_AGAIN
        widest = _highest(room, low, high, rounds)
        if room(widest) < 0:
            (low, high), rounds = _ALL, _ROUNDS
            widest = _highest(room, low, high, rounds)
        if room(widest) < 0:
            self._drifts = _ALL
            return None
        slowest, fastest = _edge(room, widest, low, rounds), _edge(room, widest, high, rounds)
        spare = WANDER + 0.1 * (fastest - slowest)
        self._drifts = (max(-MOST_DRIFT, slowest - spare), min(MOST_DRIFT, fastest + spare))
        at_most = most(_highest(most, slowest, fastest, rounds))
        at_least = least(_highest(lambda drift: -least(drift), slowest, fastest, rounds))
        return _Known(now_s, at_most, at_least, slowest, fastest, widest)


def _highest(concave: Callable[[float], float], low: float, high: float, rounds: int) -> float:
    """Where a concave function is highest."""
    for _ in range(rounds):
        third = (high - low) / 3
        if concave(low + third) < concave(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _edge(room: Callable[[float], float], inside: float, outside: float, rounds: int) -> float:
    """The last drift from `inside` towards `outside` that all bounds allow."""
    if room(outside) >= 0:
        return outside
    for _ in range(rounds):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if room(middle) >= 0 else (inside, middle)
    return outside
