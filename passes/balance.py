"""Balance: where to cut, so that the slowest stage is as fast as can be.

In: what each unit costs (`unit_costs`), which stage has each chunk, how much memory a stage has, and how long a step takes with
a cut, where a schedule tells it. Out: the first units of later chunks. The time of a stage is the sum over its chunks; the
largest of these times is minimal, and among all such cuts the sum of the chunks' squares, so that they are as even as they
can be. From there boundaries move, one by one unit at a time, as long as a step takes less: a stage that comes late in a
pipeline may be better off with less work than one that comes early.

Dynamic programming over chunks: after each chunk a state is how far the cut has come and the loads of the stages that have
chunks to come. States that cannot beat a cut which is known are dropped. With one chunk for each stage no loads are left
over, and this is the textbook's partition of a line; folded and interleaved placements keep several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from helixrt.errors import ConfigError

MOST_STATES = 3_000  # after a chunk; above it the best are kept
MOST_STEPS = 1_000  # cuts that `makespan` is asked for


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What a unit takes on its stage: `time` of F, B and W together, in any unit; `lasting_bytes` for parameters, their
    gradients and the optimizer's state; `saved_bytes` for what each micro-batch in flight saves."""

    time: float
    lasting_bytes: float = 0.0
    saved_bytes: float = 0.0


@dataclass(frozen=True)
class Balanced:
    """`starts` are the first units of the later chunks. `times` and `bytes` are of the stages."""

    starts: tuple[int, ...]
    times: tuple[float, ...]
    bytes: tuple[float, ...]


def balance(
    costs: Sequence[UnitCost],
    placement: Sequence[int],
    *,
    limit_bytes: float = float("inf"),
    in_flight: Sequence[int] | None = None,
    makespan: Callable[[tuple[int, ...]], float] | None = None,
) -> Balanced:
    """The best cut of the units into `len(placement)` chunks; `placement[chunk]` is its stage.

    `in_flight` is how many micro-batches each chunk has saved at most (one by default), `makespan` how long a step takes with
    the cut of these starts: no neighbour of the result takes less (unless `MOST_STEPS` cuts were compared). Raises ConfigError
    for more chunks than units, and where no cut keeps each stage within `limit_bytes`.
    """
    return _Search(costs, placement, limit_bytes, in_flight or [1] * len(placement)).best(makespan)


Loads = tuple[tuple[float, float], ...]  # time and bytes of each stage that has chunks to come, else (0, 0)
Key = tuple[int, Loads]


class _Search:
    def __init__(self, costs: Sequence[UnitCost], placement: Sequence[int], limit: float, in_flight: Sequence[int]) -> None:
        self.costs, self.placement, self.limit = list(costs), tuple(placement), limit
        self.chunks, self.units, self.stages = len(placement), len(costs), max(placement, default=-1) + 1
        if set(placement) != set(range(self.stages)) or not placement:
            raise ConfigError("placement", tuple(placement), "must give every stage from 0 on at least one chunk")
        if len(in_flight) != self.chunks:
            raise ConfigError("in_flight", tuple(in_flight), f"must have one number for each of {self.chunks} chunks")
        if self.chunks > self.units:
            rule = f"must be at most {self.units}: the layers, what is before and what is after them"
            raise ConfigError("chunks", self.chunks, rule)
        self.last = {stage: chunk for chunk, stage in enumerate(placement)}
        self.time = list(itertools.accumulate((cost.time for cost in costs), initial=0.0))
        self.bytes = [
            list(itertools.accumulate((cost.lasting_bytes + flying * cost.saved_bytes for cost in costs), initial=0.0))
            for flying in in_flight
        ]

    def best(self, makespan: Callable[[tuple[int, ...]], float] | None) -> Balanced:
        """Raises ConfigError where nothing fits."""
        known = self.known()
        bound = max(self.loads(known, self.time_of)) if known else float("inf")
        starts = self.search(bound, squares=False) or known
        if starts is None:
            rule = f"is too little for any cut of this model into {self.chunks} chunks on {self.stages} stages"
            raise ConfigError("limit_bytes", self.limit, rule)
        starts = self.search(max(self.loads(starts, self.time_of)), squares=True) or starts
        if makespan is not None:
            starts = self.moved(starts, makespan)
        return Balanced(starts, self.loads(starts, self.time_of), self.loads(starts, self.bytes_of))

    def time_of(self, chunk: int, begin: int, end: int) -> float:
        return self.time[end] - self.time[begin]

    def bytes_of(self, chunk: int, begin: int, end: int) -> float:
        return self.bytes[chunk][end] - self.bytes[chunk][begin]

    def loads(self, starts: Sequence[int], of: object) -> tuple[float, ...]:
        found = [0.0] * self.stages
        limits = (0, *starts, self.units)
        for chunk, (begin, end) in enumerate(itertools.pairwise(limits)):
            found[self.placement[chunk]] += of(chunk, begin, end)  # type: ignore[operator]
        return tuple(found)

    def fits(self, starts: Sequence[int]) -> bool:
        return max(self.loads(starts, self.bytes_of)) <= self.limit

    def known(self) -> tuple[int, ...] | None:
        """A good cut, found by moving one boundary at a time from an even one; None if that does not fit in memory."""
        even = [round(self.units * chunk / self.chunks) for chunk in range(1, self.chunks)]
        starts = tuple(max(at + 1, min(start, self.units - self.chunks + at + 1)) for at, start in enumerate(even))
        if not self.fits(starts):
            return None
        better = True
        while better:
            better = False
            slowest = max(self.loads(starts, self.time_of))
            for other in self.neighbours(starts):
                if self.fits(other) and max(self.loads(other, self.time_of)) < slowest:
                    starts, better = other, True
                    break
        return starts

    def moved(self, starts: tuple[int, ...], makespan: Callable[[tuple[int, ...]], float]) -> tuple[int, ...]:
        """To the best neighbour, as long as it is better."""
        least, known, better = makespan(starts), {starts}, True
        while better:
            better = False
            for other in self.neighbours(starts):
                if other not in known and len(known) < MOST_STEPS and self.fits(other):
                    known.add(other)
                    if (made := makespan(other)) < least * (1 - 1e-9):
                        least, best, better = made, other, True
            if better:
                starts = best
        return starts

    def neighbours(self, starts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        limits = (0, *starts, self.units)
        for at, step in itertools.product(range(len(starts)), (-1, 1)):
            moved = starts[at] + step
            if limits[at] < moved < limits[at + 2]:
                yield (*starts[:at], moved, *starts[at + 1 :])

    def search(self, bound: float, squares: bool) -> tuple[int, ...] | None:
        """The starts with the smallest slowest stage, or sum of the chunks' squares, with no stage above `bound`."""
        slack = bound * (1 + 1e-12)
        empty: Loads = ((0.0, 0.0),) * self.stages
        states: dict[Key, tuple[float, tuple[int, ...]]] = {(0, empty): (0.0, ())}
        for chunk in range(self.chunks):
            following: dict[Key, tuple[float, tuple[int, ...]]] = {}
            for (begin, loads), (value, starts) in states.items():
                for end in self.ends(chunk, begin):
                    time, size = loads[self.placement[chunk]]
                    time, size = time + self.time_of(chunk, begin, end), size + self.bytes_of(chunk, begin, end)
                    if time > slack or size > self.limit:
                        break
                    key, total = self.after(chunk, end, loads, (time, size)), max(value, time)
                    if squares:
                        total = value + self.time_of(chunk, begin, end) ** 2
                    if key not in following or total < following[key][0]:
                        following[key] = total, (*starts, end)
            states = self.kept({key: state for key, state in following.items() if self.hopeful(chunk, key, slack)})
        found = [starts for (end, _), (_, starts) in sorted(states.items(), key=lambda item: item[1]) if end == self.units]
        return found[0][:-1] if found else None

    def ends(self, chunk: int, begin: int) -> range:
        if chunk == self.chunks - 1:
            return range(self.units, self.units + 1)
        return range(begin + 1, self.units - (self.chunks - chunk - 1) + 1)

    def after(self, chunk: int, end: int, loads: Loads, own: tuple[float, float]) -> Key:
        stage = self.placement[chunk]
        own = own if self.last[stage] > chunk else (0.0, 0.0)
        return end, (*loads[:stage], own, *loads[stage + 1 :])

    def hopeful(self, chunk: int, key: Key, slack: float) -> bool:
        """The stages that have chunks to come can take what is left."""
        end, loads = key
        coming = sum(last > chunk for last in self.last.values())
        if not coming:
            return end == self.units
        return sum(time for time, _ in loads) + self.time[-1] - self.time[end] <= slack * coming * (1 + 1e-12)

    def kept(self, states: dict[Key, tuple[float, tuple[int, ...]]]) -> dict[Key, tuple[float, tuple[int, ...]]]:
        """All states, or the most even ones where there are too many."""
        if len(states) <= MOST_STATES:
            return states

        def unevenness(item: tuple[Key, tuple[float, tuple[int, ...]]]) -> tuple[float, float]:
            (end, loads), (value, _) = item
            left = (self.time[-1] - self.time[end]) / self.stages
            return max(time + left for time, _ in loads), value

        return dict(sorted(states.items(), key=unevenness)[:MOST_STATES])
