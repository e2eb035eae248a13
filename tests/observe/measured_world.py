"""Flight records of a replica whose costs, links and clocks are known: exact simulations of its steps, with noise.

Every stage has a host of its own, unless `hosts` says otherwise, whose clock is off by seconds and drifts. Durations and
arrivals are noisy, and some are outliers, as a garbage collection makes them. The estimator is asked for what went in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from helixrt.observe.estimator import Estimator
from helixrt.observe.stamps import RankTimes, rank_times
from helixrt.record import Event, Kind
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Op, Schedule, operations_of
from helixrt.schedule.simulate import Timeline, simulate
from tests.observe.host_clocks import START_S, HostClock


@dataclass
class World:
    """`costs(step)` are the true ones. `stamped`: messages carry the sender's stamp and their arrival is recorded. `clocks`: of
    the hosts, by number; else some that drift. Between two steps `schedule` may be replaced."""

    schedule: Schedule
    costs: Callable[[int], Costs]
    seed: int = 0
    stamped: bool = True
    one_host: bool = False
    hosts: Sequence[int] = ()  # of the stages; each its own
    clocks: Sequence[HostClock] = ()
    noise: float = 0.02  # of a duration
    jitter_ms: float = 0.05  # of an arrival, on average
    outliers: float = 0.02  # share of operations and messages that take 20 ms longer
    offsets_s: float = 5.0
    drift: float = 50e-6
    skewed: Callable[[int], float] = lambda step: 0.0  # by which stage 1's clock is set to another time, in s
    now_s: float = START_S
    _random: random.Random = field(init=False)
    _simulated: tuple[Schedule, Costs, Timeline] | None = field(init=False, default=None)  # the newest

    def __post_init__(self) -> None:
        self._random = draw = random.Random(self.seed)
        stages = range(self.schedule.stages)
        self.hosts = self.hosts or ([0] * len(stages) if self.one_host else list(stages))
        if not self.clocks:
            offsets = [0.0 if self.one_host else draw.uniform(-self.offsets_s, self.offsets_s) for _ in stages]
            drifts = [0.0 if self.one_host else draw.uniform(-self.drift, self.drift) for _ in stages]
            self.clocks = [HostClock(*each) for each in zip(offsets, drifts, strict=True)]

    def clock(self, stage: int, at_s: float, step: int = 0) -> float:
        """What the host of a stage takes the time for."""
        skew = self.skewed(step) if stage == 1 else 0.0
        return self.clocks[self.hosts[stage]].read(at_s) + skew

    def clock_name(self, stage: int) -> str:
        """Of a host with several stages, which so are known to share their clock; "" for others."""
        return f"host{host}" if self.hosts.count(host := self.hosts[stage]) > 1 else ""

    def times(self, steps: int, begin: int = 1) -> Iterator[RankTimes]:
        """What the ranks report of steps `begin` to `steps`, in a random order within each step."""
        for step in range(begin, steps + 1):
            reports = self.reports(step)
            yield from (RankTimes.from_json(report.to_json()) for report in reports)

    def events(self, steps: int, begin: int = 1) -> list[Event]:
        """What all ranks write in steps `begin` to `steps`, and that a life of each begins, by time."""
        born = (
            Event(Kind.RANK_START, f"r0.pp{s}", 0, t := self.clock(s, self.now_s), t, {"clock": name} if name else {})
            for s in range(self.schedule.stages)
            for name in [self.clock_name(s)]
        )
        found = [*born, *(event for step in range(begin, steps + 1) for stage in self.step(step) for event in stage)]
        return sorted(found, key=lambda event: event.end_s)

    def estimator(self, steps: int, **options: int) -> Estimator:
        found = Estimator(**options)
        for report in self.times(steps):
            found.add(report)
        return found

    def _late_ms(self) -> float:
        return 20.0 if self._random.random() < self.outliers else 0.0

    def reports(self, step: int) -> list[RankTimes]:
        """What the ranks report of this step, in a random order."""
        found = [each for stage, events in enumerate(self.step(step)) for each in rank_times(events, self.clock_name(stage))]
        self._random.shuffle(found)
        return found

    def _timeline(self, costs: Costs) -> Timeline:
        known = self._simulated
        if known is None or known[0] is not self.schedule or known[1] != costs:
            known = self._simulated = (self.schedule, costs, simulate(self.schedule, costs))
        return known[2]

    def step(self, step: int) -> list[list[Event]]:
        """What each stage's rank writes in this step, by the schedule and the costs of now."""
        schedule, draw = self.schedule, self._random
        timeline = self._timeline(self.costs(step))
        begin_s = self.now_s
        self.now_s += timeline.makespan_ms * 1e-3 + 0.05

        def at(stage: int, ms: float) -> float:
            return self.clock(stage, begin_s + ms * 1e-3, step)

        events: list[list[Event]] = [[] for _ in range(schedule.stages)]

        def write(stage: int, kind: Kind, start_s: float, end_s: float, **detail: object) -> None:
            events[stage].append(Event(kind, f"r0.pp{stage}", step, start_s, end_s, detail))

        for stage in range(schedule.stages):
            write(stage, Kind.WORK_BEGIN, at(stage, 0), at(stage, 0), position=step)
        needed_ms: dict[tuple[Op, int, int], float] = {}  # when the receiver began to wait for what it takes in
        for stage, spans in enumerate(timeline.spans):
            before_ms = 0.0
            for span in spans:
                took_ms = (span.end_ms - span.start_ms) * (1 + draw.gauss(0, self.noise)) + self._late_ms()
                operations = operations_of(span.entry)
                woven = {"woven": True} if len(operations) > 1 else {}
                for each in operations:
                    needed_ms[each.op, each.chunk, each.microbatch] = before_ms
                    start_s = at(stage, span.start_ms)
                    detail = {"op": each.op.value, "chunk": each.chunk, "microbatch": each.microbatch, **woven}
                    write(stage, Kind.OPERATION, start_s, start_s + took_ms * 1e-3, **detail)
                before_ms = span.end_ms
        for message in timeline.messages:
            operation = message.operation
            lane, chunk = ("F", operation.chunk + 1) if operation.op is Op.F else ("B", operation.chunk - 1)
            tag = f"g1.s{step}.c{chunk}.m{operation.microbatch}.{lane}"
            sent_s = at(message.source, message.ready_ms)
            arrive_ms = message.arrive_ms + draw.expovariate(1 / self.jitter_ms) + self._late_ms()
            needed = next(
                ms
                for op in ((Op.F,) if lane == "F" else (Op.B, Op.BW))
                if (ms := needed_ms.get((op, chunk, operation.microbatch))) is not None
            )
            taken_ms = max(arrive_ms, needed)
            stamps = {"needed_s": at(message.target, needed)}
            if self.stamped:
                stamps |= {"sent_s": sent_s, "arrived_s": at(message.target, arrive_ms)}
            write(message.source, Kind.SEND, sent_s, sent_s, tag=tag, bytes=1000)
            taken_s = at(message.target, taken_ms) + 1e-5
            write(message.target, Kind.RECV, taken_s - 1, taken_s, tag=tag, bytes=1000, **stamps)
        for stage in range(schedule.stages):
            write(stage, Kind.WORK_END, at(stage, 0), at(stage, timeline.makespan_ms), position=step)
        return events
