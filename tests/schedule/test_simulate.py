"""The simulator and the check against executors written in another way, on random orders, costs and links."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.ir import (
    Entry,
    Op,
    Operation,
    Pair,
    Schedule,
    ScheduleError,
    linear,
    needs,
    operations_of,
    provides,
    route,
)
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.simulate import DELEGATED, Comm, Direct, makespan_ms, simulate
from helixrt.schedule.timeline import Cause, Timeline

PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def random_schedule(rng: random.Random) -> Schedule:
    """A valid order: at every turn some operation whose inputs exist goes to the end of its stage's list."""
    stages, n = rng.randint(1, 4), rng.randint(1, 4)
    placement = [*range(stages), *(rng.randrange(stages) for _ in range(rng.choice([0, 0, 1, stages])))]
    if rng.random() < 0.5:
        placement[stages:] = reversed(placement[:stages])
    draft = Schedule("random", stages, n, tuple(placement), ((),) * stages)
    whole, pairing = rng.random(), rng.random()
    left = set()
    for chunk in range(draft.chunks):
        for m in range(n):
            left.add(Operation(Op.F, chunk, m))
            left |= {Operation(op, chunk, m) for op in ([Op.BW] if rng.random() < whole else [Op.B, Op.W])}
    done: set[Operation] = set()
    entries: list[list[Entry]] = [[] for _ in range(stages)]
    while left:
        able = sorted((o for o in left if all(i in done for i in needs(draft, o))), key=str)
        entry: Entry = rng.choice(able)
        stage = placement[entry.chunk]
        partners = [o for o in able if placement[o.chunk] == stage and o.op in (Op.B, Op.BW)]
        if entry.op is Op.F and partners and rng.random() < pairing:
            entry = Pair(entry, rng.choice(partners))
        entries[stage].append(entry)
        for o in operations_of(entry):
            left.remove(o)
            done.update(provides(o))
    return replace(draft, entries=tuple(map(tuple, entries)))


def random_costs(rng: random.Random, placement: tuple[int, ...]) -> Costs:
    chunks, stages = len(placement), max(placement) + 1
    draw = rng.choice([lambda: float(rng.randint(0, 3)), lambda: 10 * rng.random(), lambda: rng.choice([0.1, 0.2, 0.3])])

    def times() -> tuple[float, ...]:
        return tuple(draw() for _ in range(chunks))

    links = {
        (a, b): Link(draw() * rng.choice([0, 1, 5]), draw() * rng.choice([0, 1]))
        for a in range(stages)
        for b in range(stages)
        if a != b and rng.random() < 0.7
    }
    return Costs(
        placement,
        times(),
        times(),
        times(),
        links,
        activation=tuple(rng.randint(0, 4) for _ in range(chunks)),
        kept=tuple(rng.randint(0, 4) for _ in range(chunks)),
        pair_factor=rng.choice([1.0, 0.8, 1.3]),
        pair_ms={(rng.randrange(chunks), rng.choice([Op.B, Op.BW]), rng.randrange(chunks)): 0.1 + draw() for _ in range(2)},
    )


seeds = st.integers(0, 2**32 - 1)
comms = st.sampled_from([DELEGATED, Direct(1), Direct(2), Direct(3)])


def output(operation: Operation) -> Operation:
    return next(r for r in provides(operation) if r.op is operation.op or r.op is Op.B)


class Machine:
    """The oracle: a stage is a program of receives, computations and sends; time jumps from one event to the next."""

    def __init__(self, schedule: Schedule, costs: Costs, comm: Comm) -> None:
        self.schedule, self.costs = schedule, costs
        self.depth = comm.depth if isinstance(comm, Direct) else None
        self.programs: list[deque[tuple[str, Entry]]] = []
        for stage in range(schedule.stages):
            program: deque[tuple[str, Entry]] = deque()
            for entry in schedule.entries[stage]:
                for o in operations_of(entry):
                    program += [("recv", i) for i in needs(schedule, o) if i.op is not Op.W and self.crosses(i, stage)]
                program.append(("compute", entry))
                program += [("send", o) for o in operations_of(entry) if route(schedule, o)]
            self.programs.append(program)
        self.queues: list[deque[tuple[str, Operation]]] = [deque() for _ in range(schedule.stages)]
        self.wires: dict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self.wire_until: dict[tuple[int, int], float] = defaultdict(float)
        self.busy_until: dict[int, float] = {}
        self.sent: dict[Operation, tuple[float, float]] = {}  # result: begin, arrival
        self.spans: list[list[tuple[float, float]]] = [[] for _ in range(schedule.stages)]
        self.now = 0.0

    def crosses(self, result: Operation, stage: int) -> bool:
        return self.schedule.placement[result.chunk] != stage

    def here(self, result: Operation) -> bool:
        return result in self.sent and self.sent[result][1] <= self.now

    def put_on_wire(self, operation: Operation) -> None:
        link = self.costs.link(*route(self.schedule, operation))
        off = self.now + link.wire_ms
        self.wire_until[route(self.schedule, operation)] = off
        self.sent[output(operation)] = (self.now, off + link.delay_ms)

    def move(self, stage: int) -> bool:
        """Do one thing that is possible now."""
        queue, program = self.queues[stage], self.programs[stage]
        if queue:
            what, message = queue[0]
            result = message if what == "recv" else output(message)
            if what == "send" and result not in self.sent:
                self.put_on_wire(message)
                return True
            if self.here(result):
                queue.popleft()
                return True
        if stage in self.busy_until:
            if self.busy_until[stage] > self.now:
                return False
            del self.busy_until[stage]
            return True
        if not program:
            return False
        what, entry = program[0]
        if what == "compute":
            received = all(
                self.here(i)
                for o in operations_of(entry)
                for i in needs(self.schedule, o)
                if i.op is not Op.W and self.crosses(i, stage)
            )
            if not received or any(w == "recv" for w, _ in queue):
                return False
            end = self.now + self.costs.duration_ms(entry)
            self.spans[stage].append((self.now, end))
            self.busy_until[stage] = end
        elif self.depth is None:
            if what == "send":
                self.wires[route(self.schedule, entry)].append(entry)
        elif len(queue) == self.depth:
            return False
        else:
            queue.append((what, entry))
        program.popleft()
        return True

    def move_wire(self, way: tuple[int, int]) -> bool:
        if not self.wires[way] or self.wire_until[way] > self.now:
            return False
        self.put_on_wire(self.wires[way].popleft())
        return True

    def run(self) -> None:
        while True:
            while any([self.move(s) for s in range(self.schedule.stages)] + [self.move_wire(w) for w in list(self.wires)]):
                pass
            marks = [*self.busy_until.values(), *self.wire_until.values(), *(a for _, a in self.sent.values())]
            later = [t for t in marks if t > self.now]
            if not later:
                break
            self.now = min(later)
        assert not any(self.programs)


@PROPERTY
@given(seeds, comms)
def test_an_independent_executor_agrees_to_the_last_digit(seed: int, comm: Comm) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule.placement)
    check(schedule)
    machine = Machine(schedule, costs, comm)
    machine.run()
    timeline = simulate(schedule, costs, comm)
    assert [[(s.start_ms, s.end_ms) for s in spans] for spans in timeline.spans] == machine.spans
    assert {output(m.operation): (m.begin_ms, m.arrive_ms) for m in timeline.messages} == machine.sent
    assert makespan_ms(schedule, costs, comm) == timeline.makespan_ms == max(s[-1][1] for s in machine.spans)
    assert_idle_and_busy_time_tile_the_step(timeline)
    assert_causes(timeline, comm)
    assert_memory_is_what_is_held(timeline)


def assert_idle_and_busy_time_tile_the_step(timeline: Timeline) -> None:
    for spans, bubbles in zip(timeline.spans, timeline.bubbles, strict=True):
        pieces = sorted((p.start_ms, p.end_ms) for p in (*spans, *bubbles))
        assert pieces[0][0] == 0.0 and pieces[-1][1] == timeline.makespan_ms
        assert all(before[1] == after[0] for before, after in zip(pieces, pieces[1:], strict=False))
        busy = sum(s.end_ms - s.start_ms for s in spans)
        assert busy + sum(b.end_ms - b.start_ms for b in bubbles) == pytest.approx(timeline.makespan_ms)


def assert_causes(timeline: Timeline, comm: Comm) -> None:
    """By the definition: idle links and no queues would have let an entry start when blocking sets in."""
    schedule, costs = timeline.schedule, timeline.costs
    ends = {r: s.end_ms for spans in timeline.spans for s in spans for o in operations_of(s.entry) for r in provides(o)}
    for stage, (spans, bubbles) in enumerate(zip(timeline.spans, timeline.bubbles, strict=True)):
        place = {s.entry: i for i, s in enumerate(spans)}
        for bubble in bubbles:
            if bubble.waiting is None:
                assert bubble.cause is Cause.COOL_DOWN and bubble.start_ms == spans[-1].end_ms
                continue
            at = place[bubble.waiting]
            assert (bubble.cause is Cause.WARM_UP) == (at == 0)
            if not at:
                continue
            links = {
                i: costs.link(schedule.placement[i.chunk], stage)
                for o in operations_of(bubble.waiting)
                for i in needs(schedule, o)
                if schedule.placement[i.chunk] != stage
            }
            clear = max([spans[at - 1].end_ms, *(ends[i] + link.wire_ms + link.delay_ms for i, link in links.items())])
            if bubble.cause is Cause.BLOCKING:
                assert isinstance(comm, Direct) and bubble.start_ms == clear
            else:
                assert bubble.end_ms == (clear if isinstance(comm, Direct) else spans[at].start_ms)


def assert_memory_is_what_is_held(timeline: Timeline) -> None:
    schedule, costs = timeline.schedule, timeline.costs
    begun = {o: s.start_ms for spans in timeline.spans for s in spans for o in operations_of(s.entry) if o.op is Op.F}
    ended = {r: s.end_ms for spans in timeline.spans for s in spans for o in operations_of(s.entry) for r in provides(o)}
    for stage, steps in enumerate(timeline.memory):
        assert steps[0] == (0.0, 0.0) and steps[-1][1] == 0.0
        assert [t for t, _ in steps] == sorted(t for t, _ in steps)
        for now in {t for t, _ in steps}:
            count = 0.0
            for f, start in begun.items():
                if schedule.placement[f.chunk] == stage and start <= now < ended[replace(f, op=Op.W)]:
                    count += (costs.activation if now < ended[replace(f, op=Op.B)] else costs.kept)[f.chunk]
            assert [held for t, held in steps if t <= now][-1] == count
    assert timeline.peak_memory == peak_memory(schedule, costs)


def lists(entries: list[list[Entry]], microbatches: int) -> Schedule:
    return Schedule("made", len(entries), microbatches, linear(len(entries)), tuple(map(tuple, entries)))


def one_f_one_b(stages: int, n: int) -> Schedule:
    entries: list[list[Entry]] = []
    for stage in range(stages):
        ahead = min(stages - stage, n)
        order: list[Entry] = [Operation(Op.F, stage, m) for m in range(ahead)]
        for m in range(n):
            order.append(Operation(Op.BW, stage, m))
            order += [Operation(Op.F, stage, m + ahead)] if m + ahead < n else []
        entries.append(order)
    return lists(entries, n)


@pytest.mark.parametrize("delay,makespan", [(0, 117), (1, 147), (2, 177), (4, 237)])
def test_1f1b_over_one_slow_link_of_eight_stages(delay: float, makespan: float) -> None:
    assert makespan_ms(one_f_one_b(8, 32), with_delays(uniform(8), {(3, 4): delay, (4, 3): delay})) == makespan


@pytest.mark.parametrize(
    "depth,delay,starts", [(1, 15, [0, 10, 25, 40]), (2, 30, [0, 10, 20, 40, 70]), (9, 30, [0, 10, 20, 30])]
)
def test_a_slow_send_blocks_the_forwards_behind_it(depth: int, delay: float, starts: list[float]) -> None:
    """The paper's Figure 2 (F3 behind Send-F1) and Figure 6 (F4 behind SF2)."""
    n = len(starts)
    schedule = lists([[Operation(Op.F, s, m) for m in range(n)] for s in range(2)], n)
    costs = with_delays(uniform(2, 10, 10, 10), {(0, 1): delay})
    timeline = simulate(schedule, costs, Direct(depth))
    assert [s.start_ms for s in timeline.spans[0]] == starts
    blocked = [b for b in timeline.bubbles[0] if b.cause is Cause.BLOCKING]
    assert sum(b.end_ms - b.start_ms for b in blocked) == starts[-1] - 10 * (n - 1)
    assert [s.start_ms for s in simulate(schedule, costs).spans[0]] == [10 * m for m in range(n)]


def test_wire_time_occupies_a_link_and_delay_does_not() -> None:
    schedule = lists([[Operation(Op.F, s, m) for m in range(4)] for s in range(2)], 4)
    slow = replace(uniform(2), links={(0, 1): Link(delay_ms=5)})
    thin = replace(uniform(2), links={(0, 1): Link(wire_ms=5)})
    assert [s.start_ms for s in simulate(schedule, slow).spans[1]] == [6, 7, 8, 9]
    assert [s.start_ms for s in simulate(schedule, thin).spans[1]] == [6, 11, 16, 21]


def test_costs_of_another_placement_and_orders_that_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="costs.placement"):
        simulate(one_f_one_b(2, 2), uniform(3))
    with pytest.raises(ConfigError, match="comm.depth=0"):
        Direct(0)
    order: list[Entry] = [Operation(Op.B, 0, 0), Operation(Op.F, 0, 0), Operation(Op.W, 0, 0)]
    with pytest.raises(ScheduleError, match=r"stage 0 stands at B\(chunk 0, micro-batch 0\) and waits for F"):
        simulate(lists([order], 1), uniform(1))


def finishes_with_queues(schedule: Schedule, room: int) -> bool:
    """The oracle: a send waits for the take-in `room` places before it on its lane; a graph without a circle runs."""
    before: dict[object, set[object]] = defaultdict(set)
    sends: dict[tuple[int, int, Op], list[object]] = defaultdict(list)
    takes: dict[tuple[int, int, Op], list[object]] = defaultdict(list)
    made: dict[Operation, object] = {}
    for stage, entries in enumerate(schedule.entries):
        last: list[object] = []
        for index, entry in enumerate(entries):
            node = (stage, index)
            before[node] |= set(last)
            last = [node]
            for o in operations_of(entry):
                for result in provides(o):
                    made[result] = node
                if way := route(schedule, o):
                    sends[*way, output(o).op].append(("send", o))
                    before["send", o].add(node)
                    made[output(o)] = ("send", o)
                    last.append(("send", o))
    for stage, entries in enumerate(schedule.entries):
        for index, entry in enumerate(entries):
            for o in operations_of(entry):
                for need in needs(schedule, o):
                    before[stage, index].add(made[need])
                    if schedule.placement[need.chunk] != stage:
                        takes[schedule.placement[need.chunk], stage, need.op].append((stage, index))
    for lane, queue in sends.items():
        for place, node in enumerate(queue[room:]):
            before[node].add(takes[lane][place])
    left = set(before)
    while free := {node for node in left if not before[node] & left}:
        left -= free
    return not left


@PROPERTY
@given(seeds)
def test_bounded_send_queues_agree_with_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    for room in (1, 2, 3):
        try:
            check(schedule, send_queue=room)
            runs = True
        except ScheduleError as error:
            runs = False
            assert "blocks itself" in str(error)
        assert runs == finishes_with_queues(schedule, room)


def test_a_full_queue_is_named_with_what_stands_in_it() -> None:
    """Stage 1 wants the second micro-batch first, which can not be sent while the first fills the queue."""
    first: list[Entry] = [Operation(Op.F, 0, 0), Operation(Op.F, 0, 1)]
    second: list[Entry] = [Operation(Op.F, 1, 1), Operation(Op.F, 1, 0)]
    schedule = lists([first, second], 2)
    check(schedule)
    check(schedule, send_queue=2)
    with pytest.raises(ScheduleError) as caught:
        check(schedule, send_queue=1)
    assert str(caught.value).split("blocks itself: ")[1].split("; ") == [
        "stage 0 stands at F(chunk 0, micro-batch 1) and waits until stage 1 takes in one of F(chunk 0, micro-batch 0)",
        "stage 1 stands at F(chunk 1, micro-batch 1) and waits for F(chunk 0, micro-batch 1)",
    ]
    with pytest.raises(ConfigError, match="send_queue=0"):
        check(schedule, send_queue=0)


def test_random_orders_do_meet_full_queues() -> None:
    """Guards the property above: some of the orders it draws must not fit one place per queue."""
    verdicts = {finishes_with_queues(random_schedule(random.Random(seed)), 1) for seed in range(40)}
    assert verdicts == {True, False}
