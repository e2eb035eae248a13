"""List scheduling of a pipeline: in either direction of time, with patience, memory caps and overlapped pairs.

In: a problem (`lanes`) and a priority of every operation. Out: an order for every stage, that keeps to the caps, with
its times. In mirrored problems (W, B, F: an activation is taken by W and given back by F) everything comes as late as
possible. Where an overlapped pair is shorter than its operations, a forward and a backward that are due together
become one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.schedule.planner.lanes import TOLERANCE, Lanes, Order, Overlap

Priority = Sequence[Sequence[float]]  # [lane][micro-batch]; the smallest goes first


@dataclass(frozen=True, slots=True)
class Listed:
    """An order with its makespan in ms and, per lane, when each micro-batch ends."""

    makespan_ms: float
    order: Order
    ends: list[list[float]]


def dispatch(problem: Lanes, priority: Priority, patience: float, share: Sequence[float] = ()) -> Listed | None:
    """The order that comes about when every stage, whenever it is free, starts the best of what it could start.

    `patience` in [0, 1): how far a stage waits for a better operation that will arrive: 0 never idles when it could
    work, 1 - epsilon waits for everything that arrives before the earliest end of what it could run now (Storer, Wu and
    Vaccari, Management Science 1992). `share[chunk]` is the most memory that a chunk may hold, with room for one of its
    micro-batches at least, so that the oldest one always goes on; none given, all share the cap. None if the stages block
    each other over memory, which `_room` keeps them from.
    """
    lanes, count, stages = problem.lanes, problem.microbatches, problem.stages
    stage, duration, source, latency = problem.stage, problem.duration, problem.source, problem.latency
    take, give, wire, link = problem.take, problem.give, problem.wire, problem.link
    readers, cap, pairs, local = problem.readers, problem.cap, problem.pairs, problem.local
    done = [0] * lanes
    ends: list[list[float]] = [[] for _ in range(lanes)]
    arrivals: list[list[float]] = [[] for _ in range(lanes)]
    always = [0.0] * count
    takers, watched = [], []
    for held in problem.held:
        takers.append(sorted((lane for lane in held if take[lane]), key=lambda lane: lane % problem.chunks))
        rows = []
        for lane in held:
            here = ends[local[lane]] if local[lane] >= 0 else None
            first = arrivals[lane] if source[lane] >= 0 else here if here is not None else always
            rows.append((lane, first, here if here is not first else None, patience * duration[lane], take[lane]))
        watched.append(rows)
    wired = any(wire)
    busy_until: dict[int, float] = {}
    free, memory = [0.0] * stages, [0.0] * stages
    chunks, holding = problem.chunks, [0.0] * problem.chunks
    order: Order = [[] for _ in range(stages)]
    decision, choice = [0.0] * stages, [-1] * stages
    overlap: list[Overlap | None] = [None] * stages
    dirty: Sequence[int] = range(stages)
    left = lanes * count
    while left:
        for s in dirty:
            idle_from, horizon = free[s], math.inf
            candidates = []
            for lane, first, second, wait, needed in watched[s]:
                k = done[lane]
                if k >= len(first):
                    continue  # its input is not made yet, or all are done
                start = first[k]
                if second is not None:
                    if k >= len(second):
                        continue
                    if second[k] > start:
                        start = second[k]
                if start < idle_from:
                    start = idle_from
                if needed:
                    if memory[s] + needed > cap[s]:
                        continue
                    if share and holding[lane % chunks] + needed > share[lane % chunks]:
                        continue
                    if len(takers[s]) > 1 and not _room(problem, takers[s], done, lane):
                        continue
                candidates.append((start, lane))
                if start + wait < horizon:
                    horizon = start + wait
            best, least, when = -1, math.inf, math.inf
            for start, lane in candidates:
                if start <= horizon:
                    rank = priority[lane][done[lane]]
                    if rank < least or (rank == least and start < when):
                        best, least, when = lane, rank, start
            choice[s], decision[s] = best, when
            if pairs[s] and best >= 0:
                starts = {lane: start for start, lane in candidates}
                seconds = _seconds(problem, s, starts, done, arrivals, memory[s])
                overlap[s], decision[s] = _overlap(problem, s, best, starts, seconds)
        soonest = min(decision)
        if soonest == math.inf:
            return None
        s = decision.index(soonest)
        pair = overlap[s]
        if pair is None:
            started: tuple[int, ...] = (choice[s],)
            end = soonest + duration[choice[s]]
            order[s].append(choice[s])
        else:
            started = pair.lanes
            end = soonest + pair.together_ms
            order[s].append(pair.code)
        free[s] = end
        dirty = [s]
        for lane in started:
            left -= 1
            done[lane] += 1
            ends[lane].append(end)
            change = take[lane] - give[lane]
            memory[s] += change
            holding[lane % chunks] += change
            for reader in readers[lane]:
                if source[reader] == lane:
                    sent = end
                    if wired and link[reader] >= 0:
                        sent = max(end, busy_until.get(link[reader], 0.0)) + wire[reader]
                        busy_until[link[reader]] = sent
                    arrivals[reader].append(sent + latency[reader])
                    if stage[reader] != s:
                        dirty.append(stage[reader])
    return Listed(max(free), order, ends)


def _seconds(
    problem: Lanes, s: int, starts: dict[int, float], done: Sequence[int], arrivals: list[list[float]], memory: float
) -> dict[int, float]:
    """When the second halves of whole backwards could start whose first halves could: they need not wait for those."""
    takers = sorted((lane for lane in problem.held[s] if problem.take[lane]), key=lambda lane: lane % problem.chunks)
    found: dict[int, float] = {}
    for pair in problem.pairs[s]:
        if len(pair.lanes) < 3:
            continue
        _, b, w = pair.lanes
        first, second = (w, b) if problem.mirrored else (b, w)
        if first not in starts or second in found or done[first] != done[second]:
            continue
        start = starts[first]
        if problem.source[second] >= 0:
            if len(arrivals[second]) <= done[second]:
                continue
            start = max(start, arrivals[second][done[second]])
        if problem.take[second]:
            if memory + problem.take[second] > problem.cap[s]:
                continue
            if len(takers) > 1 and not _room(problem, takers, done, second):
                continue
        found[second] = start
    return found


def _overlap(
    problem: Lanes, s: int, best: int, starts: dict[int, float], seconds: dict[int, float]
) -> tuple[Overlap | None, float]:
    """The pair with `best` that saves most, less the wait for its other half, and the start; None if none saves."""
    second_kind = 1 if problem.mirrored else 2
    when, gain, found = starts[best], TOLERANCE, None
    for pair in problem.pairs[s]:
        if best not in pair.lanes:
            continue
        whole = len(pair.lanes) == 3
        parts = [
            (seconds if whole and kind == second_kind else starts).get(lane, math.inf) for kind, lane in enumerate(pair.lanes)
        ]
        later = max(parts)
        saved = pair.gain_ms - (later - starts[best])
        if saved > gain:
            gain, found, when = saved, pair, later
    return found, when


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
