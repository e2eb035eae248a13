"""Shadow prices: how much shorter a step gets for each millisecond taken off a link, a stage or one of its operations.

In: an order and its costs. Out: a `Price` per place: what is saved, as a function of what is taken off. With the order as it
is, every time is a maximum of sums of costs (see `simulate`), so the step's time is a convex, piecewise linear function
of each cost, and of all costs of a stage reduced in proportion. The function is found exactly by simulation: where the
middle of an interval lies on its chord the function is linear there; tangents of two intervals meet at a breakpoint, or
show where another piece lies between them (Eisner and Severance, 1976). `Replanned` says what is saved when the order
may change as well, and by changes that an order cannot follow by itself, such as more memory: an order that was found,
and a proven limit of what any order saves. Where both are equal, that price is exact too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, Link
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.simulate import DELEGATED, Comm, makespan_ms

_SLIP = 1e-11  # of the step's time: rounding of sums; less than that is no difference
_NEAR = 1e-6  # of a whole number: prices of links and, without pairs, of operations are whole
_SLIVER = 1e-9  # relative rounding of caps


class Kind(StrEnum):
    """What a price is of."""

    LINK = "link"
    STAGE = "stage"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class Piece:
    """From the piece before (or 0) up to `upto_ms` taken off, each further millisecond saves `per_ms` of the step."""

    upto_ms: float
    per_ms: float


@dataclass(frozen=True)
class Price:
    """What is saved by a place that takes less time; `now_ms` is what it takes, so the most that can be taken off.

    `place` is `link 1>2` (a message's delay), `wire 1>2` (the time it occupies the link), `stage 2` (F, B and W of one
    micro-batch together, reduced in proportion), or an operation, `F of chunk 2`. `pieces` have falling prices.
    """

    kind: Kind
    place: str
    now_ms: float
    pieces: tuple[Piece, ...]

    @property
    def per_ms(self) -> float:
        """Saved per ms, for the first that is taken off."""
        return self.pieces[0].per_ms

    @property
    def holds_ms(self) -> float:
        """Up to here `per_ms` is the price of each ms."""
        return self.pieces[0].upto_ms

    def saved_ms(self, off_ms: float) -> float:
        """What the step saves if so much is taken off. Raises ConfigError for less than 0 or more than `now_ms`."""
        if not 0 <= off_ms <= self.now_ms * (1 + _SLIVER):
            raise ConfigError(f"{self.place} off_ms", off_ms, f"must be 0 to what it takes, {self.now_ms:g} ms")
        saved = before = 0.0
        for piece in self.pieces:
            saved += max(0.0, min(off_ms, piece.upto_ms) - before) * piece.per_ms
            before = piece.upto_ms
        return saved


@dataclass(frozen=True, slots=True)
class Replanned:
    """What a change of costs saves when the order may change with it; times in ms per step.

    The order `schedule` saves `saved_ms`; no order saves more than `most_ms`, which is proven.
    """

    before_ms: float
    saved_ms: float
    most_ms: float
    schedule: Schedule

    @property
    def proven(self) -> bool:
        """Whether no order saves more than the one found."""
        return self.most_ms <= self.saved_ms + _SLIVER * self.before_ms


def prices(schedule: Schedule, costs: Costs, comm: Comm = DELEGATED) -> tuple[Price, ...]:
    """Of every link and stage and of each operation that takes time, with the order as it is: links by their stages, then
    stages, then operations by chunk; each exact up to rounding.

    Raises ConfigError and ScheduleError as `makespan_ms` does.
    """
    step_ms = makespan_ms(schedule, costs, comm)
    found = []
    for kind, place, now_ms, less in _places(costs):

        def time_ms(off_ms: float, less: Callable[[float], Costs] = less) -> float:
            return makespan_ms(schedule, less(off_ms), comm)

        found.append(Price(kind, place, now_ms, _Curve(time_ms, step_ms).pieces(now_ms)))
    return tuple(found)


def replanned(schedule: Schedule, before: Costs, after: Costs, *, effort: float = 1.0) -> Replanned:
    """What `after` saves against the order `schedule` under `before`, by the better one of that order and a planned one.

    `saved_ms` is negative where `after` costs more. `effort` is the planner's. Raises ConfigError as `plan` does.
    """
    before_ms = makespan_ms(schedule, before)
    found = plan(after, schedule.microbatches, effort=effort)
    best, best_ms = found.schedule, found.makespan_ms
    peaks = zip(peak_memory(schedule, after), after.memory, strict=True)
    if all(peak <= cap * (1 + _SLIVER) for peak, cap in peaks) and (kept_ms := makespan_ms(schedule, after)) <= best_ms:
        best, best_ms = schedule, kept_ms
    return Replanned(before_ms, before_ms - best_ms, before_ms - lower_bound(after, schedule.microbatches), best)


def more_memory(
    schedule: Schedule, costs: Costs, more: float, stages: Sequence[int] | None = None, *, effort: float = 1.0
) -> Replanned:
    """What `more` memory, in the costs' unit, saves on each of these stages (all of them by default).

    Divided by `more` it is the price of a unit, such as ms per GiB. Raises ConfigError for stages without a cap, whose
    memory has no price, and as `replanned` does.
    """
    chosen = range(costs.stages) if stages is None else stages
    for stage in chosen:
        if not 0 <= stage < costs.stages or math.isinf(costs.memory[stage]):
            raise ConfigError("stages", stage, f"must be stages below {costs.stages} with a memory cap in the costs")
    caps = tuple(cap + more if stage in chosen else cap for stage, cap in enumerate(costs.memory))
    return replanned(schedule, costs, replace(costs, memory=caps), effort=effort)


Less = Callable[[float], Costs]
_Place = tuple[Kind, str, float, Less]


def _places(costs: Costs) -> list[_Place]:
    """All that takes time: kind, name, how long it takes, and the costs with so many ms less of it."""
    links = [
        place
        for (a, b), link in sorted(costs.links.items())
        for place in (
            (Kind.LINK, f"link {a}>{b}", link.delay_ms, _less_of_link(costs, (a, b), Link(1.0, 0.0))),
            (Kind.LINK, f"wire {a}>{b}", link.wire_ms, _less_of_link(costs, (a, b), Link(0.0, 1.0))),
        )
    ]
    stages = [
        (Kind.STAGE, f"stage {stage}", sum(sum(_times(costs, c)) for c in _held(costs, stage)), _less_of_stage(costs, stage))
        for stage in range(costs.stages)
    ]
    operations = [
        (Kind.OPERATION, f"{op.value} of chunk {chunk}", getattr(costs, name)[chunk], _less_of_operation(costs, name, chunk))
        for chunk in range(costs.chunks)
        for op, name in ((Op.F, "forward"), (Op.B, "backward"), (Op.W, "weight"))
    ]
    return [place for place in (*links, *stages, *operations) if place[2] > 0]


def _times(costs: Costs, chunk: int) -> tuple[float, float, float]:
    return costs.forward[chunk], costs.backward[chunk], costs.weight[chunk]


def _held(costs: Costs, stage: int) -> list[int]:
    return [chunk for chunk, home in enumerate(costs.placement) if home == stage]


def _less_of_link(costs: Costs, way: tuple[int, int], share: Link) -> Less:
    now = costs.link(*way)

    def less(off_ms: float) -> Costs:
        faster = Link(max(0.0, now.delay_ms - off_ms * share.delay_ms), max(0.0, now.wire_ms - off_ms * share.wire_ms))
        return replace(costs, links={**costs.links, way: faster})

    return less


def _less_of_stage(costs: Costs, stage: int) -> Less:
    """The stage's operations, and its measured pairs, all by the same factor."""
    held = set(_held(costs, stage))
    now_ms = sum(sum(_times(costs, chunk)) for chunk in held)

    def less(off_ms: float) -> Costs:
        factor = max(0.0, 1.0 - off_ms / now_ms)

        def scaled(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(value * factor if chunk in held else value for chunk, value in enumerate(values))

        # A pair takes more than nothing by the rule of Costs.
        least_ms = now_ms * _SLIP
        pairs = {key: max(least_ms, ms * factor) if key[0] in held else ms for key, ms in costs.pair_ms.items()}
        return replace(
            costs,
            forward=scaled(costs.forward),
            backward=scaled(costs.backward),
            weight=scaled(costs.weight),
            pair_ms=pairs,
        )

    return less


def _less_of_operation(costs: Costs, name: str, chunk: int) -> Less:
    """One operation; measured pairs stay as they are."""
    times = {"forward": costs.forward, "backward": costs.backward, "weight": costs.weight}
    values = times[name]

    def less(off_ms: float) -> Costs:
        left = max(0.0, values[chunk] - off_ms)
        now = {**times, name: (*values[:chunk], left, *values[chunk + 1 :])}
        return replace(costs, forward=now["forward"], backward=now["backward"], weight=now["weight"])

    return less


class _Curve:
    """A convex, piecewise linear, falling function, by its values: `time_ms(off_ms)`; `step_ms` is its value at 0."""

    def __init__(self, time_ms: Callable[[float], float], step_ms: float) -> None:
        self._time_ms, self._slip_ms = time_ms, _SLIP * step_ms
        self._known = {0.0: step_ms}

    def at(self, off_ms: float) -> float:
        if off_ms not in self._known:
            self._known[off_ms] = self._time_ms(off_ms)
        return self._known[off_ms]

    def pieces(self, limit_ms: float) -> tuple[Piece, ...]:
        """From 0 to `limit_ms`; neighbours of equal price are one."""
        found: list[Piece] = []
        for upto_ms, slope in self._between(0.0, self._slope(0.0, limit_ms), limit_ms, self._slope(limit_ms, 0.0)):
            whole = round(-slope)
            price = float(whole) if abs(whole + slope) < _NEAR else -slope
            if found and abs(found[-1].per_ms - price) < _NEAR:
                found.pop()
            found.append(Piece(upto_ms, price))
        return tuple(found)

    def _slope(self, of_ms: float, to_ms: float) -> float:
        """At a point, to the side of `to_ms`: the interval is halved until its middle lies on its chord."""
        there = to_ms
        while True:
            middle = (of_ms + there) / 2
            chord = (self.at(of_ms) + self.at(there)) / 2
            if chord - self.at(middle) <= self._slip_ms:
                return (self.at(there) - self.at(of_ms)) / (there - of_ms)
            there = middle

    def _between(self, a: float, slope_a: float, b: float, slope_b: float) -> list[tuple[float, float]]:
        """The pieces from a, which begins with `slope_a`, to b, which ends with `slope_b`: (end, slope)."""
        if (slope_b - slope_a) * (b - a) <= self._slip_ms:
            return [(b, (self.at(b) - self.at(a)) / (b - a))]
        meet = (self.at(b) - self.at(a) + slope_a * a - slope_b * b) / (slope_a - slope_b)
        if not a < meet < b:
            return [(b, (self.at(b) - self.at(a)) / (b - a))]
        if self.at(meet) <= self.at(a) + slope_a * (meet - a) + self._slip_ms:
            return [(meet, slope_a), (b, slope_b)]
        left = self._between(a, slope_a, meet, self._slope(meet, a))
        return [*left, *self._between(meet, self._slope(meet, b), b, slope_b)]
