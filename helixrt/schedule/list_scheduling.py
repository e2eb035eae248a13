"""List scheduling of a pipeline, forwards and backwards in time.

In: costs, a number of micro-batches, and a priority of every operation. Out: an order for every stage, that keeps to the
memory caps, with its times. A *lane* is all operations of one kind in one chunk; its micro-batches go in order, so an
order of a stage is a sequence of lanes. `Lanes.of(..., mirrored=True)` is the same problem with time running from the
end to the start (W, B, F: an activation then is taken by W and given back by F): lists made there put everything as
late as possible, and the ends there are the priorities here. Going back and forth so is Li and Willis' justification
("An iterative scheduling technique for resource-constrained project scheduling", EJOR 1992).

Where an overlapped pair is shorter than its two operations, a forward and a backward that are due together become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Operation, Pair

Priority = Sequence[Sequence[float]]  # [lane][micro-batch]; the smallest goes first
Order = list[list[int]]  # per stage: a lane, or of a pair lanes + forward lane * lanes + backward lane
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Lanes:
    """A planning problem in arrays over lanes: F of chunk c is c, B is C + c, W is 2 C + c (absent when `fused`).

    An operation needs its lane's `source` (-1: none), after `latency` ms and `wire` ms on the link `link`, and its
    lane's `local` on the same stage. It takes `take` memory when it starts and gives `give` back when it ends. With
    `fused`, B is the whole backward. `pair[f, b]` is the time of an overlapped pair, where it is a gain.
    """

    microbatches: int
    stages: int
    lanes: int
    stage: tuple[int, ...]
    duration: tuple[float, ...]
    source: tuple[int, ...]
    latency: tuple[float, ...]
    wire: tuple[float, ...]
    link: tuple[int, ...]
    local: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    take: tuple[float, ...]
    give: tuple[float, ...]
    cap: tuple[float, ...]
    held: tuple[tuple[int, ...], ...]
    pair: dict[tuple[int, int], float]
    fused: bool
    mirrored: bool

    @property
    def chunks(self) -> int:
        return self.lanes // (2 if self.fused else 3)

    @property
    def operations(self) -> int:
        return self.lanes * self.microbatches

    @classmethod
    def of(cls, costs: Costs, microbatches: int, *, mirrored: bool = False, fused: bool = False) -> Lanes:
        """The problem of these costs. Mirrored, time on the wire counts as delay, since a link's order is not known."""
        chunks, place = costs.chunks, costs.placement
        lanes = (2 if fused else 3) * chunks
        backward = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)] if fused else list(costs.backward)
        after: list[tuple[int, int, tuple[int, int] | None]] = [(chunks - 1, 2 * chunks - 1, None)]
        for c in range(chunks - 1):
            after.append((c, c + 1, (place[c], place[c + 1])))
            after.append((chunks + c + 1, chunks + c, (place[c + 1], place[c])))
        if not fused:
            after += [(chunks + c, 2 * chunks + c, None) for c in range(chunks)]
        source, local, link = [-1] * lanes, [-1] * lanes, [-1] * lanes
        latency, wire = [0.0] * lanes, [0.0] * lanes
        readers: list[list[int]] = [[] for _ in range(lanes)]
        for early, late, way in after:
            a, b = (late, early) if mirrored else (early, late)
            readers[a].append(b)
            if way is None:
                local[b] = a
                continue
            source[b] = a
            if way[0] != way[1]:
                there = costs.link(*way)
                latency[b] = there.delay_ms + (there.wire_ms if mirrored else 0.0)
                wire[b] = 0.0 if mirrored else there.wire_ms
                link[b] = way[0] * costs.stages + way[1]
        take, give = [0.0] * lanes, [0.0] * lanes
        for c in range(chunks):
            last = chunks + c if fused else 2 * chunks + c
            kept = 0.0 if fused else costs.kept[c]
            whole = max(costs.activation[c], kept)
            if mirrored:
                # Taking all at W where a part would do only makes the mirrored lists more careful than need be.
                take[last if kept else chunks + c], give[c] = whole, whole
            else:
                take[c] = whole
                give[chunks + c] += whole - kept
                give[last] += kept
        stage = [place[lane % chunks] for lane in range(lanes)]
        held: list[list[int]] = [[] for _ in range(costs.stages)]
        for lane, home in enumerate(stage):
            held[home].append(lane)
        pair = {}
        op = Op.BW if fused else Op.B
        for f in range(chunks):
            for b in range(chunks):
                if place[f] == place[b]:
                    both = costs.duration_ms(Pair(Operation(Op.F, f, 0), Operation(op, b, 1)))
                    if both < costs.forward[f] + backward[b] - TOLERANCE:
                        pair[f, chunks + b] = both
        return cls(
            microbatches=microbatches,
            stages=costs.stages,
            lanes=lanes,
            stage=tuple(stage),
            duration=tuple([*costs.forward, *backward, *([] if fused else costs.weight)]),
            source=tuple(source),
            latency=tuple(latency),
            wire=tuple(wire),
            link=tuple(link),
            local=tuple(local),
            readers=tuple(map(tuple, readers)),
            take=tuple(take),
            give=tuple(give),
            cap=tuple(cap * (1 + TOLERANCE) + TOLERANCE for cap in costs.memory),
            held=tuple(map(tuple, held)),
            pair=pair,
            fused=fused,
            mirrored=mirrored,
        )

    def entries(self, order: Order) -> tuple[tuple[Entry, ...], ...]:
        """An order of this problem (not mirrored) as the IR's lists."""
        chunks = self.chunks
        kinds = (Op.F, Op.BW if self.fused else Op.B, Op.W)
        made = [0] * self.lanes

        def operation(lane: int) -> Operation:
            made[lane] += 1
            return Operation(kinds[lane // chunks], lane % chunks, made[lane] - 1)

        def entry(code: int) -> Entry:
            if code < self.lanes:
                return operation(code)
            forward, backward = divmod(code - self.lanes, self.lanes)
            return Pair(operation(forward), operation(backward))

        return tuple(tuple(map(entry, codes)) for codes in order)


@dataclass(frozen=True, slots=True)
class Listed:
    """An order with its makespan in ms and, per lane, when each micro-batch ends."""

    makespan_ms: float
    order: Order
    ends: list[list[float]]


def dispatch(problem: Lanes, priority: Priority, patience: float) -> Listed | None:
    """The order that comes about when every stage, whenever it is free, starts the best of what it could start.

    `patience` in [0, 1): how far a stage waits for a better operation that will arrive: 0 never idles when it could
    work, 1 - epsilon waits for everything that arrives before the earliest end of what it could run now (Storer, Wu and
    Vaccari, Management Science 1992). None if the stages block each other over memory (kept out by a rule that leaves
    room for the oldest unfinished micro-batch; see `_room`).
    """
    count, stages = problem.microbatches, problem.stages
    stage, duration, source, latency = problem.stage, problem.duration, problem.source, problem.latency
    local, take, give, wire, link = problem.local, problem.take, problem.give, problem.wire, problem.link
    readers, pairs, cap = problem.readers, problem.pair, problem.cap
    held = problem.held
    takers = [sorted((lane for lane in lanes if take[lane]), key=lambda lane: lane % problem.chunks) for lanes in held]
    done = [0] * problem.lanes
    ends: list[list[float]] = [[] for _ in range(problem.lanes)]
    arrivals: list[list[float]] = [[] for _ in range(problem.lanes)]
    wired = any(wire)
    busy_link: dict[int, float] = {}
    free = [0.0] * stages
    memory = [0.0] * stages
    order: Order = [[] for _ in range(stages)]
    decision, choice, partner = [0.0] * stages, [-1] * stages, [-1] * stages
    dirty: list[int] | range = range(stages)
    for _ in range(problem.operations):
        for s in dirty:
            idle_from = free[s]
            horizon = math.inf
            candidates = []
            for lane in held[s]:
                k = done[lane]
                if k == count:
                    continue
                start = idle_from
                if source[lane] >= 0:
                    arrived = arrivals[lane]
                    if len(arrived) <= k:
                        continue
                    if arrived[k] > start:
                        start = arrived[k]
                near = local[lane]
                if near >= 0:
                    if done[near] <= k:
                        continue
                    if ends[near][k] > start:
                        start = ends[near][k]
                if take[lane]:
                    if memory[s] + take[lane] > cap[s]:
                        continue
                    if len(takers[s]) > 1 and not _room(problem, takers[s], done, lane):
                        continue
                until = start + patience * duration[lane]
                if until < horizon:
                    horizon = until
                candidates.append((start, lane))
            best, least, when = -1, math.inf, math.inf
            for start, lane in candidates:
                if start <= horizon:
                    rank = priority[lane][done[lane]]
                    if rank < least or (rank == least and start < when):
                        best, least, when = lane, rank, start
            partner[s] = -1
            if pairs and best >= 0:
                gain = TOLERANCE
                for start, lane in candidates:
                    key = (best, lane) if (best, lane) in pairs else (lane, best)
                    both = pairs.get(key)
                    if both is not None:
                        later = start if start > when else when
                        saved = duration[best] + duration[lane] - both - (later - when)
                        if saved > gain:
                            gain, partner[s] = saved, lane
                if partner[s] >= 0:
                    when = max(when, next(start for start, lane in candidates if lane == partner[s]))
            choice[s], decision[s] = best, when
        s = decision.index(min(decision))
        lane = choice[s]
        if lane < 0:
            # Either every operation is in a list, the last ones as pairs, or the stages block each other.
            break
        started: tuple[int, ...] = (lane,)
        end = decision[s] + duration[lane]
        code = lane
        if partner[s] >= 0:
            key = (lane, partner[s]) if (lane, partner[s]) in pairs else (partner[s], lane)
            started, end = key, decision[s] + pairs[key]
            code = problem.lanes + key[0] * problem.lanes + key[1]
        free[s] = end
        order[s].append(code)
        touched = [s]
        for lane in started:
            done[lane] += 1
            ends[lane].append(end)
            memory[s] += take[lane] - give[lane]
            for reader in readers[lane]:
                if source[reader] == lane:
                    sent = end
                    if wired and link[reader] >= 0:
                        sent = max(end, busy_link.get(link[reader], 0.0)) + wire[reader]
                        busy_link[link[reader]] = sent
                    arrivals[reader].append(sent + latency[reader])
                    touched.append(stage[reader])
        dirty = touched
    if min(done) < count:
        return None
    return Listed(max(free), order, ends)


def _room(problem: Lanes, takers: Sequence[int], done: Sequence[int], lane: int) -> bool:
    """Whether the stage, having started `lane`, can still hold the oldest unfinished micro-batch of every chunk.

    `takers` are in the order in which a micro-batch needs them. When it comes to one of them, older micro-batches can
    have finished; it holds its own share in the chunks before, and newer ones hold what they have taken. Micro-batches
    go in order in every lane, so the oldest one of the pipeline finds room on every stage, and nothing blocks.
    """
    take = problem.take
    for position, k in enumerate(takers):
        at = done[k] + (k == lane)
        if at >= problem.microbatches:
            continue
        total = take[k]
        for other_position, other in enumerate(takers):
            if other == k:
                continue
            ahead = done[other] + (other == lane) - at
            if ahead > 0:
                total += ahead * take[other]
            elif other_position < position:
                total += take[other]
        if total > problem.cap[problem.stage[k]]:
            return False
    return True
