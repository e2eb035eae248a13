"""From the summaries of a replica's ranks to what its operations and links cost: live at the leader, or from a run's files.

In: `RankTimes`, in any order of the ranks. Out: `MeasuredCosts`, and the `Shift`s: values that became others during the run.
Ranks that share a stage (tensor parallelism and the like) wait for each other, so the slowest of them counts, and of parallel
links the slowest. Pure: all times come in with the summaries.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from helixrt.observe.clock_offset import SAME_CLOCK, Offset, OffsetTracker
from helixrt.observe.estimates import Estimate, LinkEstimate, MeasuredCosts, OperationKey, PairKey, Way
from helixrt.observe.samples import FlowSample, Sample, Stamped, flow_sample
from helixrt.observe.stamps import Pass, RankTimes
from helixrt.observe.windows import STEPS, Change, Window
from helixrt.schedule.ir import Op

WARM_UP = 1  # steps of a rank's life that are not counted
_FLOOR_MS = 0.05  # of an operation; a smaller difference is no change
_LINK_FLOOR_MS = 0.5  # of a delay
_PASSES = 4  # of a flow that wait to be matched
_FRESH = 3  # steps for which a measured delay holds although newer messages only bound it
_MOST_SHIFTS = 1000

Key = OperationKey | PairKey | Way


@dataclass(frozen=True, slots=True)
class Shift:
    """`what` ("op", "pair" or "link") and its key, and how its value changed."""

    what: str
    key: Key
    change: Change


@dataclass(frozen=True, slots=True)
class _Flow:
    """What comes in at a chunk over a lane of ranks: activations (F) or gradients (B)."""

    lane: str
    name: str  # F or B and the chunk that takes it in


class _Delay:
    """Of a flow: estimates from arrivals, and separately bounds from messages that were not waited for."""

    def __init__(self, steps: int) -> None:
        self._windows = {bound: Window(_LINK_FLOOR_MS, steps) for bound in (False, True)}
        self._steps = {False: -_FRESH, True: -_FRESH}  # the newest one of each
        self._samples: dict[bool, tuple[FlowSample, Offset]] = {}
        self._wire = Window(_LINK_FLOOR_MS, steps)

    def add(self, step: int, sample: FlowSample, offset: Offset) -> Change | None:
        bound = sample.upper_bound
        self._samples[bound], self._steps[bound] = (sample, offset), step
        if sample.wire.size:
            self._wire.add(step, sample.wire)
        delay = sample.delay._replace(median=sample.delay.median - offset.offset_s * 1e3)
        change = self._windows[bound].add(step, delay, offset.uncertainty_s * 1e3)
        return None if bound else change

    def estimate(self) -> tuple[LinkEstimate, int]:
        """And the step since which it is so; after the first `add`."""
        measured, most = self._windows[False].estimate(), self._windows[True].estimate()
        stale = self._steps[True] - self._steps[False] > _FRESH
        bound = measured is None or (most is not None and stale and most.value_ms < measured.value_ms)
        delay = most if bound else measured
        assert delay is not None
        sample, offset = self._samples[bound]
        wire = self._wire.estimate() if not bound and sample.wire.size else None
        value_ms = max(0.0, delay.value_ms)
        systematic_ms = delay.systematic_ms + offset.uncertainty_s * 1e3 + bound * value_ms
        estimate = Estimate(value_ms, delay.spread_ms, delay.samples, systematic_ms, delay.step)
        found = LinkEstimate(estimate, wire or Estimate(0.0), sample.nbytes, bound, offset.offset_s * 1e3)
        return found, self._windows[bound].since


class Estimator:
    """Of one replica of so many `stages` (0: those that report). `steps`: of the window; `warm_up`: steps of each rank that
    are left out first."""

    def __init__(self, stages: int = 0, steps: int = STEPS, warm_up: int = WARM_UP) -> None:
        self._stages, self._steps, self._warm_up = stages, steps, warm_up
        self._begun: dict[str, int] = {}  # rank -> summaries so far
        self._operations: dict[tuple[str, Key], Window] = {}  # by rank
        self._delays: dict[_Flow, _Delay] = {}
        self._offsets: defaultdict[tuple[str, Way], OffsetTracker] = defaultdict(OffsetTracker)  # of a lane, lower stage first
        self._clocks: dict[tuple[str, int], str] = {}  # of a lane's stage
        self._unmatched = _Unmatched()
        self._homes: dict[int, int] = {}  # chunk -> stage
        self._microbatches = self._step = 0
        self.shifts: deque[Shift] = deque(maxlen=_MOST_SHIFTS)  # the newest ones, oldest first
        self.shifted = 0  # how many there were in all

    def add(self, times: RankTimes) -> None:
        """Take in a rank's newest step or steps."""
        lane, stage = place_of(times.rank)
        self._clocks[lane, stage] = times.clock
        for name in times.operations:
            for _, chunk in _operations(name):
                self._homes[chunk] = stage
        self._step, self._microbatches = max(self._step, times.step), max(self._microbatches, times.microbatches)
        self._begun[times.rank] = self._begun.get(times.rank, 0) + 1
        counts = self._begun[times.rank] > self._warm_up
        flows = {_Flow(lane, name): sample for name, sample in times.flows.items()}
        flows |= self._unmatched.matched(lane, times)
        self._bound(flows)
        if not counts:
            return
        for name, durations in times.operations.items():
            self._operation(times, name, durations)
        for flow, found in flows.items():
            self._message(flow, found, times.step)

    def renewed(self, rank: str) -> None:
        """A new life of a rank begins: it warms up again, and the costs of before say nothing of it."""
        self._begun.pop(rank, None)
        self._unmatched = _Unmatched()
        for key in [key for key in self._operations if key[0] == rank]:
            del self._operations[key]
        lane, stage = place_of(rank)
        for offsets in [key for key in self._offsets if key[0] == lane and stage in key[1]]:
            del self._offsets[offsets]

    # ---------------------------------------------------------------- in

    def _operation(self, times: RankTimes, name: str, sample: Sample) -> None:
        operations = _operations(name)
        key: OperationKey | PairKey
        if len(operations) == 2:
            (_, forward), (op, backward) = operations
            key, what = (forward, op, backward), "pair"
        else:
            key, what = operations[0], "op"
        window = self._operations.get((times.rank, key))
        if window is None:
            window = self._operations[times.rank, key] = Window(_FLOOR_MS, self._steps)
        self._shifted(what, key, window.add(times.step, sample))

    def _way(self, flow: _Flow) -> Way | None:
        """None while the chunk before or after has not been seen."""
        chunk = int(flow.name[1:])
        source = self._homes.get(chunk - 1 if flow.name[0] == "F" else chunk + 1)
        target = self._homes.get(chunk)
        return None if source is None or target is None else (source, target)

    def _bound(self, flows: Mapping[_Flow, FlowSample]) -> None:
        """What messages show of the clocks at both ends, by time: else a clock would seem to be set back."""
        bounds: list[tuple[float, float, Callable[[float, float], None]]] = []
        for flow, sample in flows.items():
            way = self._way(flow)
            if way is None or self._same_clock(flow.lane, way):
                continue
            tracker = self._offsets[flow.lane, (min(way), max(way))]
            add = tracker.to_b if way[0] < way[1] else tracker.to_a
            bounds.append((_lower_clock_s(way, sample), sample.least_ms * 1e-3, add))
        for at_s, difference_s, bound in sorted(bounds, key=lambda each: each[0]):
            bound(at_s, difference_s)

    def _same_clock(self, lane: str, way: Way) -> bool:
        clocks = [self._clocks.get((lane, stage), "") for stage in way]
        return clocks[0] == clocks[1] != ""

    def _offset(self, flow: _Flow, way: Way, at_s: float) -> Offset | None:
        """The receiver's clock less the sender's."""
        if self._same_clock(flow.lane, way):
            return SAME_CLOCK
        found = self._offsets[flow.lane, (min(way), max(way))].at(at_s)
        if found is None or way[0] < way[1]:
            return found
        return Offset(-found.offset_s, found.uncertainty_s, found.drift)

    def _message(self, flow: _Flow, sample: FlowSample, step: int) -> None:
        way = self._way(flow)
        offset = None if way is None else self._offset(flow, way, _lower_clock_s(way, sample))
        if way is None or offset is None:
            return
        delay = self._delays.get(flow)
        if delay is None:
            delay = self._delays[flow] = _Delay(self._steps)
        self._shifted("link", way, delay.add(step, sample, offset))

    def _shifted(self, what: str, key: Key, change: Change | None) -> None:
        if change is not None:
            self.shifts.append(Shift(what, key, change))
            self.shifted += 1

    # ---------------------------------------------------------------- out

    def estimates(self) -> MeasuredCosts | None:
        """The present estimates; None before every stage has reported more than its warm-up."""
        placement = tuple(self._homes.get(chunk, -1) for chunk in range(max(self._homes, default=-1) + 1))
        if not placement or set(placement) != set(range(self._stages or max(placement) + 1)):
            return None
        found: dict[Key, tuple[Estimate, int]] = {}
        for (_, key), window in self._operations.items():
            if (estimate := window.estimate()) is not None:
                _slowest(found, key, estimate, window.since)
        if {placement[chunk] for chunk in _chunks(found)} != set(placement):
            return None
        links, since = self._links()
        since |= {key: step for key, (_, step) in found.items() if step}
        return MeasuredCosts(
            placement,
            self._microbatches,
            {key: estimate for key, (estimate, _) in found.items() if len(key) == 2},  # type: ignore[misc]
            {key: estimate for key, (estimate, _) in found.items() if len(key) == 3},
            links,
            self._step,
            since,
        )

    def _links(self) -> tuple[dict[Way, LinkEstimate], dict[Key, int]]:
        links: dict[Way, LinkEstimate] = {}
        since: dict[Key, int] = {}
        for flow, delay in self._delays.items():
            way = self._way(flow)
            if way is None:
                continue
            found, step = delay.estimate()
            if way not in links or found.total_ms > links[way].total_ms:
                links[way] = found
                since.pop(way, None)
                if step:
                    since[way] = step
        return links, since


def _lower_clock_s(way: Way, sample: FlowSample) -> float:
    """When the sample was taken, by the clock of the lower of the two stages: of the sender at sending, of the receiver at
    arrival."""
    return sample.at_s if way[0] < way[1] else sample.at_s + sample.least_ms * 1e-3


class _Unmatched:
    """Messages without a sender's stamp, until both of their ends have been reported."""

    def __init__(self) -> None:
        self._sent: dict[tuple[_Flow, int], Pass] = {}
        self._arrived: dict[tuple[_Flow, int], Pass] = {}

    def matched(self, lane: str, times: RankTimes) -> dict[_Flow, FlowSample]:
        """The newest pass of each flow of which both ends are known now."""
        if not times.sent and not times.arrived:
            return {}
        touched: set[tuple[_Flow, int]] = set()
        for held, given in ((self._sent, times.sent), (self._arrived, times.arrived)):
            for name, passes in given.items():
                for each in passes:
                    key = (_Flow(lane, name), each.number)
                    before = held.get(key)
                    held[key] = each if before is None else _joined(before, each)
                    touched.add(key)
        found: dict[_Flow, tuple[int, FlowSample]] = {}
        for key in touched:
            sent, arrived = self._sent.get(key), self._arrived.get(key)
            if sent is None or arrived is None or not arrived.stamps.keys() <= sent.stamps.keys():
                continue
            messages = [Stamped(sent.stamps[m], at_s, m in arrived.exact) for m, at_s in arrived.stamps.items()]
            del self._sent[key], self._arrived[key]
            if key[0] not in found or found[key[0]][0] < key[1]:
                found[key[0]] = (key[1], flow_sample(messages, arrived.nbytes))
        for held in (self._sent, self._arrived):
            for key in [key for key in held if self._old(key, held)]:
                del held[key]
        return {flow: sample for flow, (_, sample) in found.items()}

    @staticmethod
    def _old(key: tuple[_Flow, int], held: dict[tuple[_Flow, int], Pass]) -> bool:
        newest = max(number for flow, number in held if flow == key[0])
        return key[1] <= newest - _PASSES


def _joined(before: Pass, after: Pass) -> Pass:
    return Pass(after.number, before.stamps | after.stamps, before.exact | after.exact, after.nbytes)


def _slowest(found: dict[Key, tuple[Estimate, int]], key: Key, estimate: Estimate, since: int) -> None:
    """With the newest step of all ranks: they report a step one after the other."""
    if key not in found:
        found[key] = (estimate, since)
        return
    known, step = found[key][0], max(found[key][0].step, estimate.step)
    slowest, since = found[key] if known.value_ms >= estimate.value_ms else (estimate, since)
    found[key] = (replace(slowest, step=step), since)


def _chunks(keys: Iterable[Key]) -> set[int]:
    """Those that any operation or pair is of."""
    return {part for key in keys for part in key if not isinstance(part, Op)}


@cache
def _operations(name: str) -> tuple[OperationKey, ...]:
    """Of a name such as F0, BW2 or F0+B3."""
    parts = [(part.rstrip("0123456789"), part) for part in name.split("+")]
    return tuple((Op(op), int(part[len(op) :])) for op, part in parts)


@cache
def place_of(rank: str) -> tuple[str, int]:
    """A rank's lane, which it shares with the ranks that it exchanges messages with, and its stage: r0.pp1.tp1 is (tp1, 1)."""
    lane, stage = [], 0
    for part in rank.split(".")[1:]:
        if part.startswith("pp"):
            stage = int(part[2:])
        else:
            lane.append(part)
    return ".".join(lane), stage
