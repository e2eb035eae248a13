"""The exact optimum of a planning problem, by constraint programming (OR-tools CP-SAT, extra `exact`).

In: costs and a number of micro-batches. Out: the best schedule found in the time allowed, and a bound below which
no schedule can be. It is the oracle the planner is measured against, and `--exact` of the command.

Searched are all orders of F, B, W, whole backwards and overlapped pairs on every stage, with the micro-batches of
every chunk in order. That loses nothing: micro-batches cost the same, so what an operation waits for and what a stage
holds depend only on how many operations of each kind came before. In any schedule, call the k-th forward (k-th
backward) that a chunk runs the one of micro-batch k: the k-th can start once k of what it needs are there, which held
before the renaming. The W of a lone B is renamed the same way among the lone Bs; whole backwards keep both halves.
So only W may be out of order, and only where whole backwards are worth trying. They are in pairs that are shorter than
their parts, and alone where a cap meets `kept` above `activation`; elsewhere B then W does all a whole backward does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from helixrt.errors import ConfigError, MissingExtra
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, operations_of, provides
from helixrt.schedule.planner.bounds import Bounds, bounds
from helixrt.schedule.simulate import simulate
from helixrt.schedule.timeline import Timeline

TOLERANCE = 1e-9  # relative; makespans are sums of floats
EXACT_TICKS = 1 << 40  # times are whole ticks without rounding while a step is at most this long
ROUNDED_TICKS = 1 << 30  # ticks of a step where rounding cannot be avoided


@dataclass(frozen=True)
class Optimum:
    """The best schedule found; no schedule takes less than `bound_ms`.

    `proven`: the two agree: exactly when all times are decimals of a moderate number of digits, else up to
    the rounding of times to about a billionth of the step, always downwards, so that the bound holds.
    """

    schedule: Schedule
    makespan_ms: float
    bound_ms: float
    proven: bool


def optimum(
    costs: Costs,
    microbatches: int,
    *,
    time_limit_s: float = 30.0,
    hint: Schedule | None = None,
    workers: int = 1,
    seed: int = 0,
) -> Optimum:
    """The optimal schedule under `costs`, memory caps included, with delegated communication.

    `hint` is any schedule that fits the caps: the search begins there, and the result is never worse. The search ends
    with a proof or after `time_limit_s`.

    Raises ConfigError for caps that no schedule fits and a hint of another shape, MissingExtra without OR-tools.
    """
    if microbatches < 1:
        raise ConfigError("microbatches", microbatches, "must be at least 1")
    if not time_limit_s > 0:
        raise ConfigError("time_limit_s", time_limit_s, "must be above 0")
    known = bounds(costs, microbatches)
    best = hint or _one_by_one(costs, microbatches)
    if (best.placement, best.microbatches) != (costs.placement, microbatches):
        raise ConfigError("hint", best.name, f"must be of placement {costs.placement} and {microbatches} micro-batches")
    check(best)
    timeline = simulate(best, costs)
    makespan_ms = timeline.makespan_ms
    if not _fits(timeline):
        needed = list(timeline.peak_memory)
        raise ConfigError("hint", best.name, f"must fit the memory caps {list(costs.memory)}, needs {needed}")
    if makespan_ms <= known.makespan_ms * (1 + TOLERANCE):
        return Optimum(best, makespan_ms, min(known.makespan_ms, makespan_ms), True)

    model = _Model(costs, microbatches, makespan_ms, known)
    if hint is not None:  # one micro-batch at a time would only lead the solver astray
        model.suggest(best, {s.entry: s.start_ms for spans in timeline.spans for s in spans})
    found, bound_ms = model.solve(time_limit_s, workers, seed)
    if found is not None:
        check(found)
        timeline = simulate(found, costs)
        if timeline.makespan_ms < makespan_ms and _fits(timeline):
            best, makespan_ms = found, timeline.makespan_ms
    bound_ms = min(max(bound_ms, known.makespan_ms), makespan_ms)
    return Optimum(best, makespan_ms, bound_ms, makespan_ms <= bound_ms * (1 + model.tolerance))


def _fits(timeline: Timeline) -> bool:
    """Whether memory is within the caps, up to the rounding of sums."""
    caps = timeline.costs.memory
    return all(held <= cap * (1 + TOLERANCE) for held, cap in zip(timeline.peak_memory, caps, strict=True))


def _one_by_one(costs: Costs, microbatches: int) -> Schedule:
    """One micro-batch at a time, with whole backwards: slow, and it fits every cap that any schedule fits."""
    chunks = len(costs.placement)
    entries: list[list[Entry]] = [[] for _ in range(costs.stages)]
    for microbatch in range(microbatches):
        for chunk in range(chunks):
            entries[costs.placement[chunk]].append(Operation(Op.F, chunk, microbatch))
        for chunk in reversed(range(chunks)):
            entries[costs.placement[chunk]].append(Operation(Op.BW, chunk, microbatch))
    return Schedule("one-by-one", costs.stages, microbatches, costs.placement, tuple(map(tuple, entries)))


class _Model:
    """The planning problem as variables and constraints: a start and an end for each F, B and W, in whole ticks.

    Memory depends on the order on a stage alone, and rounding times down shortens every chain of operations in
    every order, so the optimum of the rounded problem is a bound for the true one.
    """

    def __init__(self, costs: Costs, microbatches: int, horizon_ms: float, known: Bounds) -> None:
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise MissingExtra("ortools", "exact", "the exact optimum") from error
        self._cp = cp_model
        self._model = cp_model.CpModel()
        self._costs, self._count = costs, microbatches
        self._scale, exact = _ticks_per_ms(costs, horizon_ms)
        # Two dozen operations of every micro-batch in a chain would round by less than this.
        self.tolerance = TOLERANCE if exact else 1e-6
        self._horizon = math.ceil(horizon_ms * self._scale * (1 + TOLERANCE)) + 1
        self._known = known
        # Whole ticks: what is at least 2.5 is at least 3. Rounded down starts are at least rounded down bounds.
        self._whole = math.ceil if exact else math.floor
        self._makespan = self._model.new_int_var(self._least(known.makespan_ms), self._horizon, "makespan")
        self._start: dict[Operation, Any] = {}
        self._end: dict[Operation, Any] = {}
        self._out_of_order: set[int] = set()  # stages with whole backwards among the ways
        self._taken: dict[Entry, Any] = {}  # literal of every entry that is one way among several to do an operation

        self._operations()
        self._messages()
        self._memory()
        self._model.minimize(self._makespan)

    def _ticks(self, value_ms: Fraction) -> int:
        return math.floor(value_ms * self._scale)

    def _least(self, bound_ms: float) -> int:
        """Ticks of a bound, which can be off by rounding."""
        return min(self._whole(bound_ms * float(self._scale) * (1 - TOLERANCE)), self._horizon)

    def _moment(self) -> Any:
        return self._model.new_int_var(0, self._horizon, "")

    def _all(self, op: Op, chunk: int) -> list[Operation]:
        return [Operation(op, chunk, m) for m in range(self._count)]

    def _operations(self) -> None:
        """Every operation once, alone or in a pair; one entry at a time per stage; micro-batches in order."""
        model, costs = self._model, self._costs
        for stage in range(costs.stages):
            held = [c for c, s in enumerate(costs.placement) if s == stage]
            alternatives = _alternatives(costs, held, self._count)
            ways: dict[Operation, list[Any]] = defaultdict(list)
            for entry in alternatives:
                self._taken[entry] = model.new_bool_var("")
                for operation in operations_of(entry):
                    for result in provides(operation):
                        ways[result].append(self._taken[entry])
            if any(operation.op is Op.W for operation in ways):
                self._out_of_order.add(stage)
            intervals = []
            for chunk in held:
                for op in (Op.F, Op.B, Op.W):
                    row = self._all(op, chunk)
                    ticks = self._ticks(_exact_ms(costs, row[0]))
                    for operation in row:
                        start, others = self._moment(), ways.get(operation)
                        if others is None:
                            self._start[operation], self._end[operation] = start, start + ticks
                            intervals.append(model.new_fixed_size_interval_var(start, ticks, ""))
                            continue
                        self._start[operation], self._end[operation] = start, self._moment()
                        alone = model.new_bool_var("")
                        self._taken[operation] = alone
                        model.add_exactly_one([alone, *others])
                        model.add(self._end[operation] == start + ticks).only_enforce_if(alone)
                        intervals.append(model.new_optional_fixed_size_interval_var(start, ticks, alone, ""))
                    self._within_bounds(row, stage)
                    if op is not Op.W or stage not in self._out_of_order:
                        for earlier, later in zip(row, row[1:], strict=False):
                            model.add(self._start[later] >= self._end[earlier])
                for m in range(self._count):
                    first, second, third = (Operation(op, chunk, m) for op in (Op.F, Op.B, Op.W))
                    model.add(self._start[second] >= self._end[first])
                    after_b = model.add(self._start[third] >= self._end[second])
                    if third in ways:
                        after_b.only_enforce_if(self._taken[third])
                    model.add(self._makespan >= self._end[third])
            for entry in alternatives:
                lead = operations_of(entry)[-1]
                lead = Operation(Op.B, lead.chunk, lead.microbatch)
                ticks, taken = self._ticks(_exact_ms(costs, entry)), self._taken[entry]
                intervals.append(model.new_optional_fixed_size_interval_var(self._start[lead], ticks, taken, ""))
                for result in (r for o in operations_of(entry) for r in provides(o)):
                    model.add(self._start[result] == self._start[lead]).only_enforce_if(taken)
                    model.add(self._end[result] == self._start[lead] + ticks).only_enforce_if(taken)
            model.add_no_overlap(intervals)

    def _within_bounds(self, row: list[Operation], stage: int) -> None:
        """What is known of the operations beforehand, but for the halves of whole backwards: it spares the solver work."""
        op, chunk = row[0].op, row[0].chunk
        whole = stage in self._out_of_order
        for operation, head_ms, tail_ms in zip(
            row, self._known.heads_ms[op, chunk], self._known.tails_ms[op, chunk], strict=True
        ):
            if op is not Op.W or not whole:
                self._model.add(self._start[operation] >= self._least(head_ms))
            if op is Op.F or not whole:
                self._model.add(self._makespan >= self._end[operation] + self._least(tail_ms))

    def _messages(self) -> None:
        """Results arrive a delay after their time on the wire, and each wire carries them in the order they are ready."""
        model, costs = self._model, self._costs
        wires: dict[tuple[int, int], list[list[tuple[Operation, Any]]]] = defaultdict(list)
        chain = [(Op.F, c, c + 1) for c in range(costs.chunks - 1)] + [(Op.B, c + 1, c) for c in range(costs.chunks - 1)]
        for op, source, target in chain:
            way = costs.placement[source], costs.placement[target]
            link = costs.link(*way)
            wire, delay = self._ticks(_fraction(link.wire_ms)), self._ticks(_fraction(link.delay_ms))
            sent: list[tuple[Operation, Any]] = []
            for made, taker in zip(self._all(op, source), self._all(op, target), strict=True):
                begin = self._end[made]
                if wire:
                    begin = self._moment()
                    model.add(begin >= self._end[made])
                    if sent:
                        model.add(begin >= sent[-1][1] + wire)
                    sent.append((made, begin))
                model.add(self._start[taker] >= begin + wire + delay)
            if sent:
                wires[way].append(sent)
        for way, rows in wires.items():
            wire = self._ticks(_fraction(costs.link(*way).wire_ms))
            for i, row in enumerate(rows):
                for a, begin_a in row:
                    for b, begin_b in (pair for other in rows[:i] for pair in other):
                        first = model.new_bool_var("")
                        for x, y, literal in ((a, b, first), (b, a, ~first)):
                            begin_x, begin_y = (begin_a, begin_b) if x is a else (begin_b, begin_a)
                            model.add(self._end[x] <= self._end[y]).only_enforce_if(literal)
                            model.add(begin_y >= begin_x + wire).only_enforce_if(literal)

    def _memory(self) -> None:
        """What a stage holds stays within its cap."""
        model, costs = self._model, self._costs
        for stage, cap in enumerate(costs.memory):
            held = [c for c, s in enumerate(costs.placement) if s == stage]
            if cap >= self._count * sum(max(costs.activation[c], costs.kept[c]) for c in held):
                continue
            chunk = held[0]
            size, kept = costs.activation[chunk], costs.kept[chunk]
            if len(held) == 1 and kept in (0.0, size) and (not kept or stage not in self._out_of_order):
                # All activations weigh the same and go in order: each waits until the one that makes room has gone.
                room = max(1, math.floor(cap / size * (1 + TOLERANCE)))
                frees = Op.W if kept else Op.B
                for m in range(room, self._count):
                    model.add(self._start[Operation(Op.F, chunk, m)] >= self._end[Operation(frees, chunk, m - room)])
                continue
            intervals, demands = [], []
            unit = 10**9 / cap
            for chunk in held:
                for m in range(self._count):
                    start = self._start[Operation(Op.F, chunk, m)]
                    middle, end = (self._end[Operation(op, chunk, m)] for op in (Op.B, Op.W))
                    weights = costs.activation[chunk], costs.kept[chunk]
                    if weights[0] == weights[1]:
                        pieces = [(start, end, weights[0])]
                    else:
                        pieces = [(start, middle, weights[0]), (middle, end, weights[1])]
                    for opening, closing, weight in pieces:
                        length = model.new_int_var(0, self._horizon, "")
                        intervals.append(model.new_interval_var(opening, length, closing, ""))
                        demands.append(math.floor(weight * unit))
            model.add_cumulative(intervals, demands, 10**9)

    def suggest(self, schedule: Schedule, start_ms: dict[Entry, float]) -> None:
        """Give the solver the schedule to begin with."""
        slots: dict[tuple[Op, int], list[float]] = defaultdict(list)
        for entries in schedule.entries:
            for entry in entries:
                for operation in operations_of(entry):
                    at = start_ms[entry]
                    for result in provides(operation):
                        lag = self._costs.backward[operation.chunk] if result.op is Op.W and operation.op is Op.BW else 0.0
                        slots[result.op, result.chunk].append(at + lag)
        for (op, chunk), times in slots.items():
            for operation, at in zip(self._all(op, chunk), sorted(times), strict=True):
                self._model.add_hint(self._start[operation], round(at * self._scale))

    def solve(self, time_limit_s: float, workers: int, seed: int) -> tuple[Schedule | None, float]:
        """(best schedule found or None, proven bound in ms)."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = workers
        solver.parameters.random_seed = seed
        status = solver.solve(self._model)
        if status == self._cp.MODEL_INVALID:
            raise AssertionError(f"the solver refuses the model: {self._model.validate()}")
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            # The horizon is the makespan of a schedule in hand, so nothing found means no time, not no solution.
            return None, 0.0
        bound = math.ceil(solver.best_objective_bound - 1e-6)
        return self._schedule(solver), float(bound / self._scale)

    def _schedule(self, solver: Any) -> Schedule:
        costs = self._costs
        lists: list[list[tuple[tuple[int, int, int, int], Entry]]] = [[] for _ in range(costs.stages)]
        for operation in self._start:
            if operation not in self._taken:
                self._put(lists, solver, operation)
        for entry, taken in self._taken.items():
            if solver.boolean_value(taken):
                self._put(lists, solver, entry)
        entries = tuple(tuple(entry for _, entry in sorted(row, key=lambda item: item[0])) for row in lists)
        return Schedule("optimum", costs.stages, self._count, costs.placement, entries)

    def _put(self, lists: list[list[tuple[tuple[int, int, int, int], Entry]]], solver: Any, entry: Entry) -> None:
        """Operations of no length that start together are ordered by their dependencies."""
        operation = next(r for o in operations_of(entry) for r in provides(o))
        chunks = self._costs.chunks
        rank = {Op.F: operation.chunk, Op.B: 2 * chunks - operation.chunk, Op.W: 3 * chunks}[operation.op]
        start, end = solver.value(self._start[operation]), solver.value(self._end[operation])
        lists[self._costs.placement[operation.chunk]].append(((start, end, rank, operation.microbatch), entry))


def _alternatives(costs: Costs, held: list[int], count: int) -> list[Entry]:
    """The pairs and whole backwards of a stage that can be better than their parts one after the other."""
    found: list[Entry] = []
    stage = costs.placement[held[0]]
    for back in held:
        if costs.kept[back] > costs.activation[back] and math.isfinite(costs.memory[stage]):
            found += [Operation(Op.BW, back, m) for m in range(count)]
        for ahead in held:
            for op in (Op.B, Op.BW):
                pair = Pair(Operation(Op.F, ahead, 0), Operation(op, back, 0))
                if _exact_ms(costs, pair) >= sum(_exact_ms(costs, o) for o in operations_of(pair)):
                    continue
                # A backward of micro-batch m comes after all forwards of m, so a pair's forward is of a later one.
                found += [Pair(Operation(Op.F, ahead, i), Operation(op, back, j)) for i in range(count) for j in range(i)]
    return found


def _fraction(value: float) -> Fraction:
    """The number as it is written in decimals."""
    return Fraction(repr(float(value)))


def _exact_ms(costs: Costs, entry: Entry) -> Fraction:
    """`costs.duration_ms` without rounding."""
    if isinstance(entry, Pair):
        measured = costs.pair_ms.get((entry.forward.chunk, entry.backward.op, entry.backward.chunk))
        if measured is not None:
            return _fraction(measured)
        return _fraction(costs.pair_factor) * (_exact_ms(costs, entry.forward) + _exact_ms(costs, entry.backward))
    times = {Op.F: (costs.forward,), Op.B: (costs.backward,), Op.W: (costs.weight,), Op.BW: (costs.backward, costs.weight)}
    return sum((_fraction(values[entry.chunk]) for values in times[entry.op]), Fraction(0))


def _ticks_per_ms(costs: Costs, horizon_ms: float) -> tuple[Fraction, bool]:
    """(ticks per ms, whether every time is a whole number of them)."""
    scale = math.lcm(*(value.denominator for value in _times(costs)))
    if scale * horizon_ms <= EXACT_TICKS:
        return Fraction(scale), True
    return Fraction(ROUNDED_TICKS) / Fraction(horizon_ms), False


def _times(costs: Costs) -> Iterable[Fraction]:
    for chunk in range(costs.chunks):
        for op in (Op.F, Op.B, Op.W):
            yield _exact_ms(costs, Operation(op, chunk, 0))
    for link in costs.links.values():
        yield from (_fraction(link.delay_ms), _fraction(link.wire_ms))
    for stage in range(costs.stages):
        held = [c for c, s in enumerate(costs.placement) if s == stage]
        for pair in _alternatives(costs, held, 2):
            yield _exact_ms(costs, pair)
