"""What no schedule can beat: a lower bound for the makespan, and the smallest memory that will do.

In: costs and a number of micro-batches. Out: milliseconds, proven for every valid schedule of these costs, with
pairs and whole backwards, in any order of micro-batches, with delegated or direct communication.

How `lower_bound` is proved. Take any schedule and number the operations of each kind and chunk in the order in which
they run, whichever micro-batch they are of: the m-th F, B, W. A whole backward counts as a B and a W in a row, a pair
as both of its operations.

1. *Chains.* The m-th B of a chunk has m others before it, each of them after its own input, so it comes after the m-th
   forward there and after the m-th B of the next chunk has arrived; likewise for F and W.
2. *Memory.* When the F numbered m + k starts and fewer than m + 1 W are done, k + 1 activations are held: more
   than fit, if k is what fits. So it comes after the m-th W. `_precedences` lists these relations.
3. *Stages.* All that must come before an operation on its stage takes its time there, one after the other: the start is
   at least t plus the work of those among them that cannot start before t, for any t. By 1 to 3, repeated, every
   operation gets an earliest start (head) and, in mirrored time, a least time from its end to the end of the step
   (tail).
4. *The whole.* The operations of a stage with heads of at least t and tails of at least u need t, their work, and u: the
   preemptive one-machine bound of Carlier (1982) and Jackson (1955), taken over all t and u. Links with wire time
   are machines too.

Pairs shorten both: a chain counts an operation at the least time in which it can be had, and a stage counts operations
at shares of time whose sum is no more than any pair of them takes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Op, Operation, Pair

SLIP = 1e-12  # relative; what rounding may add to a sum of times that are no dyadic fractions
MEMORY_SLIP = 1e-9  # relative; caps are often products
ROUNDS = 32  # of propagation; a cap makes one turn around the pipeline per round
SAMPLES = 32  # micro-batches per row, and three times as many moments, at which the work of stages is summed up

Times = NDArray[np.float64]


def smallest_memory(costs: Costs) -> tuple[float, ...]:
    """Per stage, the smallest cap under which a schedule exists, in the costs' unit.

    A micro-batch's backward begins only after all of its forwards, so a stage holds at least one micro-batch in all of
    its chunks at once; and running one micro-batch at a time, with whole backwards, needs no more.
    """
    return tuple(
        sum(size for size, home in zip(costs.activation, costs.placement, strict=True) if home == stage)
        for stage in range(costs.stages)
    )


def check_reachable(costs: Costs) -> None:
    """Raise ConfigError for the first cap that no schedule fits, with the smallest that would do."""
    for stage, (least, cap) in enumerate(zip(smallest_memory(costs), costs.memory, strict=True)):
        if cap * (1 + MEMORY_SLIP) < least:
            raise ConfigError(f"memory[{stage}]", cap, f"no schedule fits; the smallest that would do is {least:g}")


@dataclass(frozen=True)
class Bounds:
    """What holds for every schedule; times in ms, of shape [micro-batches], by kind (F, B, W) and chunk.

    The m-th operation of its kind and chunk starts no earlier than `heads_ms`, and the step does not end earlier than
    `tails_ms` after its end, nor before `makespan_ms`. (A whole backward's B ends when W could begin, see `_least`.)
    """

    makespan_ms: float
    heads_ms: dict[tuple[Op, int], Times]
    tails_ms: dict[tuple[Op, int], Times]


def lower_bound(costs: Costs, microbatches: int) -> float:
    """No schedule of `microbatches` micro-batches finishes earlier than this many ms. Raises as `bounds` does."""
    return bounds(costs, microbatches).makespan_ms


def bounds(costs: Costs, microbatches: int) -> Bounds:
    """Bounds for the step and each of its operations; the proof is in the module's docstring.

    Raises ConfigError for no micro-batches and for caps no schedule fits.
    """
    if microbatches < 1:
        raise ConfigError("microbatches", microbatches, "must be at least 1")
    check_reachable(costs)
    problem = _problem(costs, microbatches)
    heads = _heads(problem, microbatches)
    tails = [row[::-1] for row in _heads(problem.mirrored(), microbatches)]
    best = max(float(np.max(head + row.ms + tail)) for row, head, tail in zip(problem.rows, heads, tails, strict=True))
    for i, rows in enumerate(problem.machines):
        machine = _Machine.of(problem, i, microbatches)
        best = max(best, machine.bound(np.stack([heads[r] for r in rows]), np.stack([tails[r] for r in rows])))
    rounded = 1.0 if _dyadic(costs) else 1.0 - SLIP
    keys = [(op, c) for c in range(costs.chunks) for op in (Op.F, Op.B, Op.W)]
    return Bounds(
        makespan_ms=best * rounded,
        heads_ms={key: heads[row] * rounded for row, key in enumerate(keys)},
        tails_ms={key: tails[row] * rounded for row, key in enumerate(keys)},
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """The operations of one kind and chunk, or the messages between two chunks, one per micro-batch.

    Each takes at least `ms` from start to end, and at least a share of `busy_ms` of its machine's time; the first one
    `first_ms` more, since no backward is there for it to be paired with.
    """

    ms: float
    busy_ms: float
    first_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class _Edge:
    """The (m + shift)-th of `target` starts at the earliest `lag_ms` after the end of the m-th of `source`."""

    source: int
    target: int
    shift: int = 0
    lag_ms: float = 0.0


@dataclass(frozen=True)
class _Problem:
    """Rows in an order that most edges follow; the rows of each machine, and per machine the shifts between them."""

    rows: list[_Row]
    order: list[int]
    edges: list[_Edge]
    machines: list[list[int]]
    shifts: list[Times]  # [a, b]: the (m + shift)-th of b comes after the m-th of a; infinite if none does
    into: dict[int, list[_Edge]] = field(init=False)

    def __post_init__(self) -> None:
        into: dict[int, list[_Edge]] = defaultdict(list)
        for edge in self.edges:
            into[edge.target].append(edge)
        object.__setattr__(self, "into", into)

    def mirrored(self) -> _Problem:
        """The same in reversed time."""
        edges = [_Edge(e.target, e.source, e.shift, e.lag_ms) for e in self.edges]
        return _Problem(self.rows, self.order[::-1], edges, self.machines, [s.T for s in self.shifts])


def _problem(costs: Costs, count: int) -> _Problem:
    """Chunk c's F, B and W are rows 3c, 3c + 1 and 3c + 2; messages follow where they take time on a wire."""
    chunks = costs.chunks
    rows = _least(costs)
    edges = [_Edge(3 * c + i, 3 * c + i + 1) for c in range(chunks) for i in (0, 1)]
    machines: list[list[int]] = [[] for _ in range(costs.stages)]
    for c, home in enumerate(costs.placement):
        machines[home] += [3 * c, 3 * c + 1, 3 * c + 2]
    before: dict[int, list[int]] = {}  # the message row that goes just before a row of operations
    wires: dict[tuple[int, int], list[int]] = defaultdict(list)
    ways = [(c, c + 1, 0) for c in range(chunks - 1)] + [(c + 1, c, 1) for c in range(chunks - 1)]
    for source, target, kind in ways:
        way = costs.placement[source], costs.placement[target]
        made, taken = 3 * source + kind, 3 * target + kind
        link = costs.link(*way)
        if way[0] == way[1] or not link.wire_ms:
            edges.append(_Edge(made, taken, 0, link.delay_ms if way[0] != way[1] else 0.0))
            continue
        message = len(rows)
        rows.append(_Row(link.wire_ms, link.wire_ms))
        edges += [_Edge(made, message), _Edge(message, taken, 0, link.delay_ms)]
        wires[way].append(message)
        before[taken] = [message]
    order = [3 * c for c in range(chunks)] + [3 * c + i for c in reversed(range(chunks)) for i in (1, 2)]
    order = [row for r in order for row in (*before.get(r, []), r)]

    shifts = []
    for stage, machine in enumerate(machines):
        relations = _precedences(costs, stage, count)
        edges += [e for e in relations if e.shift]
        shifts.append(_closure(machine, relations, count))
    for messages in wires.values():
        machines.append(messages)
        shifts.append(_closure(messages, [], count))
    return _Problem(rows, order, edges, machines, shifts)


def _least(costs: Costs) -> list[_Row]:
    """F, B and W of every chunk, whatever pairs there are.

    A pair is cut into shares, one after the other, of the forward, the backward and, if it is a whole one, W. The
    forward's is shortened by all that a pair can save, then both others: so B's ends no sooner after the start
    than B can be had.
    """
    least = [list(times) for times in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    busy = [list(times) for times in least]
    pairs = bool(costs.pair_ms) or costs.pair_factor < 1.0
    for ahead, home in enumerate(costs.placement if pairs else ()):
        saved = 0.0
        for back in (c for c, stage in enumerate(costs.placement) if stage == home):
            for op in (Op.B, Op.BW):
                pair = Pair(Operation(Op.F, ahead, 0), Operation(op, back, 0))
                ms = costs.duration_ms(pair)
                gain = costs.duration_ms(pair.forward) + costs.duration_ms(pair.backward) - ms
                if gain <= 0:  # then one after the other does all that the pair does, no later
                    continue
                saved = max(saved, gain)
                least[ahead][0] = min(least[ahead][0], ms)
                least[back][1] = min(least[back][1], ms)
                more = gain - costs.forward[ahead]  # saved beyond what the forward takes
                if more > 0:
                    busy[back][1] = min(busy[back][1], max(0.0, costs.backward[back] - more))
                    busy[back][2] = min(busy[back][2], max(0.0, costs.weight[back] - more))
        busy[ahead][0] = max(0.0, costs.forward[ahead] - saved)
    rows = []
    for (f, b, _), (f_share, b_share, w_share), full in zip(least, busy, costs.forward, strict=True):
        rows += [_Row(f, f_share, full - f_share), _Row(b, b_share), _Row(w_share, w_share)]
    return rows


def _precedences(costs: Costs, stage: int, count: int) -> list[_Edge]:
    """What comes before what on a stage: by the model's order (shift 0), and by its memory cap (shift k)."""
    held = [c for c, home in enumerate(costs.placement) if home == stage]
    edges = []
    for c in held:
        edges += [_Edge(3 * c + 1, 3 * c + 2)]
        edges += [_Edge(3 * c, 3 * other + 1) for other in held]
        for later in (other for other in held if other > c):
            edges += [_Edge(3 * c, 3 * later), _Edge(3 * later + 1, 3 * c + 1)]

    def fitting(size: float, beside: float = 0.0) -> int:
        cap = costs.memory[stage]
        if size == 0 or math.isinf(cap):
            return count
        room = cap * (1 + MEMORY_SLIP) - beside
        return count if room >= size * count else max(1, int(room / size))  # one fits, see check_reachable

    for i, c in enumerate(held):
        # If the F numbered m + k of chunk c comes before the m-th B of this or a later chunk here, then that B begins
        # with k + 1 micro-batches in chunk c and each before it, and at least one in each after it up to its own.
        for j, back in enumerate(held[i:], start=i):
            one = sum(costs.activation[e] for e in held[i + 1 : j + 1])
            room = fitting(sum(costs.activation[e] for e in held[: i + 1]), one)
            if room < count:
                edges.append(_Edge(3 * back + 1, 3 * c, room))
        # It begins with k + 1 micro-batches in chunk c that are not through W if it comes before the m-th W.
        room = fitting(min(costs.activation[c], costs.kept[c]))
        if room < count:
            edges.append(_Edge(3 * c + 2, 3 * c, room))
    return edges


def _closure(machine: list[int], relations: list[_Edge], count: int) -> Times:
    """The least shift from each row of a machine to each, along relations; a row's own is 1."""
    place = {row: i for i, row in enumerate(machine)}
    shifts = np.full((len(machine), len(machine)), np.inf)
    for edge in relations:
        a, b = place[edge.source], place[edge.target]
        shifts[a, b] = min(shifts[a, b], edge.shift)
    np.fill_diagonal(shifts, 1)
    for via in range(len(machine)):
        shifts = np.minimum(shifts, shifts[:, via, None] + shifts[None, via, :])
    np.fill_diagonal(shifts, 1)
    return np.minimum(shifts, count)


def _heads(problem: _Problem, count: int) -> list[Times]:
    """The earliest starts of every row, by rounds of chains and stages until nothing moves."""
    index = np.arange(count, dtype=float)
    heads = [index * row.ms for row in problem.rows]
    machines = [_Machine.of(problem, i, count) for i in range(len(problem.machines))]
    sources = {row: {e.source for e in problem.into.get(row, ())} for row in problem.order}
    moved = set(problem.order)  # rows whose heads rose since those that depend on them were looked at
    for _ in range(ROUNDS):
        before, moved = moved, set()
        for row in problem.order:
            if not sources[row] & (before | moved) and row not in before:
                continue
            best = heads[row].copy()
            for edge in problem.into.get(row, ()):
                arrival = heads[edge.source][: count - edge.shift] + (problem.rows[edge.source].ms + edge.lag_ms)
                np.maximum(best[edge.shift :], arrival, out=best[edge.shift :])
            steps = index * problem.rows[row].ms
            best = np.maximum.accumulate(best - steps) + steps
            if (best > heads[row] * (1 + SLIP)).any():
                heads[row] = best
                moved.add(row)
        for machine in machines:
            if moved.isdisjoint(machine.rows) and before.isdisjoint(machine.rows):
                continue
            starts = np.stack([heads[row] for row in machine.rows])
            later = machine.work_before(starts)
            for row, head, start in zip(machine.rows, later, starts, strict=True):
                if (head > start * (1 + SLIP)).any():
                    heads[row] = head
                    moved.add(row)
        if not moved:
            break
    return heads


@dataclass(frozen=True)
class _Machine:
    """A stage or a link with the rows it works on."""

    rows: list[int]
    busy_ms: Times  # [row]
    first_ms: Times  # [row]
    some: NDArray[np.int_]  # the micro-batches whose heads are raised; their successors follow in the chain
    before: Times  # [row, other row, one of some]: how many of the other come before

    @staticmethod
    def of(problem: _Problem, machine: int, count: int) -> _Machine:
        rows = problem.machines[machine]
        some = np.unique(np.linspace(0, count - 1, min(count, SAMPLES)).astype(int))
        first = 1.0 - problem.shifts[machine].T
        return _Machine(
            rows=rows,
            busy_ms=np.array([problem.rows[r].busy_ms for r in rows]),
            first_ms=np.array([problem.rows[r].first_ms for r in rows]),
            some=some,
            before=np.clip(first[:, :, None] + some, 0, count),
        )

    def work_before(self, starts: Times) -> Times:
        """[row, m]: heads raised by the work that comes before each operation and cannot start before some t."""
        moments = _moments(starts)
        early = _before(starts, moments)
        work = self.before[:, :, None, :] - early[None, :, :, None]
        np.maximum(work, 0.0, out=work)
        sums = np.tensordot(self.busy_ms, work, axes=(0, 1))
        done = np.where(sums > 0.0, sums + moments[None, :, None], 0.0).max(axis=1)
        later = starts.copy()
        later[:, self.some] = np.maximum(starts[:, self.some], done)
        return later

    def bound(self, starts: Times, tails: Times) -> float:
        """The most that t, u and the work of what has a head of at least t and a tail of at least u add up to."""
        moments, rests = _moments(starts), _moments(tails)
        early = _before(starts, moments)
        # Tails fall with m: those of at least u are the first ones.
        enough = starts.shape[1] - _before(tails[:, ::-1], rests)
        among = np.maximum(enough[:, None, :] - early[:, :, None], 0.0)
        work = np.tensordot(self.busy_ms, among, axes=(0, 0))
        if self.first_ms.any():
            firsts = (early[:, :, None] == 0.0) & (among > 0.0)
            work += np.tensordot(self.first_ms, firsts.astype(float), axes=(0, 0))
        return float(np.where(work > 0.0, work + moments[:, None] + rests[None, :], 0.0).max())


def _moments(times: Times) -> Times:
    """The times at which a set of operations can begin; a sample of them where there are many."""
    every = np.unique(times)
    return every[:: math.ceil(len(every) / (3 * SAMPLES))]


def _before(ascending: Times, moments: Times) -> Times:
    """[row, t]: how many of the row's times are below t."""
    return np.stack([np.searchsorted(row, moments) for row in ascending]).astype(float)


def _dyadic(costs: Costs) -> bool:
    """Whether sums of the times are exact in floats."""
    times = [*costs.forward, *costs.backward, *costs.weight]
    times += [t for link in costs.links.values() for t in (link.delay_ms, link.wire_ms)]
    return not costs.pair_ms and costs.pair_factor >= 1.0 and all(float(t * 1024).is_integer() and t < 2**30 for t in times)
