"""The helix planner: near-optimal orders under memory caps, uneven stages and directed delays.

In: `Costs` of one or two chunks per stage and a number of micro-batches. Out: a `Plan`: the schedule, its exact
makespan, a proven lower bound, and the memory it needs, never above the caps.

It starts, as ADAPTRA does (Section 4.3), from list scheduling, but goes back and forth in time: a list made
backwards in time (`list_scheduling`) says how late every operation may come, which are the priorities of the next list
forwards. Then the best priorities are disturbed, again and again, and justified the same way. The search ends as soon as
the proven bound is met. How much it does is counted in operations, not read from a clock: the same input gives the
same plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Schedule
from helixrt.schedule.list_scheduling import TOLERANCE, Lanes, Listed, Order, Priority, dispatch
from helixrt.schedule.simulate import simulate

PATIENCE = (0.0, 0.5, 0.3, 0.9)
ROUNDS = 2
LISTED_OPERATIONS = 120_000


@dataclass(frozen=True)
class Plan:
    """A schedule and what is known about it; times in ms, memory in the costs' unit, `gap` relative to the bound.

    `solve_ms` is by the clock that was passed to `plan`, None without one.
    """

    schedule: Schedule
    makespan_ms: float
    lower_bound_ms: float
    gap: float
    peak_memory: tuple[float, ...]
    solve_ms: float | None


def plan(costs: Costs, microbatches: int, *, effort: float = 1.0, clock: Callable[[], float] | None = None) -> Plan:
    """The best schedule found for these costs, within their memory caps.

    `effort` scales the work spent where the bound is not met. `clock` returns seconds (time.perf_counter).
    Raises ConfigError for fewer than one micro-batch, and for a cap that no schedule can keep.
    """
    begun = clock() if clock else 0.0
    if microbatches < 1:
        raise ConfigError("schedule.microbatches", microbatches, "must be at least 1")
    _check_caps(costs)
    bound = _lower_bound(costs, microbatches)
    order, problem = _search(costs, microbatches, bound, effort)
    schedule = Schedule("helix", costs.stages, microbatches, costs.placement, problem.entries(order))
    timeline = simulate(schedule, costs)
    return Plan(
        schedule=schedule,
        makespan_ms=timeline.makespan_ms,
        lower_bound_ms=bound,
        gap=timeline.makespan_ms / bound - 1.0 if bound else 0.0,
        peak_memory=timeline.peak_memory,
        solve_ms=(clock() - begun) * 1e3 if clock else None,
    )


def _check_caps(costs: Costs) -> None:
    """Every stage must be able to hold one micro-batch in all of its chunks: its last forward comes before any B."""
    for stage, cap in enumerate(costs.memory):
        chunks = [c for c, home in enumerate(costs.placement) if home == stage]
        least = sum(max(costs.activation[c], costs.kept[c]) for c in chunks)
        if cap * (1 + TOLERANCE) + TOLERANCE < least:
            rule = f"stage {stage} needs at least {least:g}, one micro-batch's activations in its {len(chunks)} chunk(s)"
            raise ConfigError("costs.memory", cap, rule)


def _lower_bound(costs: Costs, microbatches: int) -> float:
    """Per chunk: the way of the first micro-batch to it, then all work of its stage."""
    best, head = 0.0, 0.0
    seen: set[int] = set()
    for chunk, stage in enumerate(costs.placement):
        if stage not in seen:
            seen.add(stage)
            own = [c for c, home in enumerate(costs.placement) if home == stage]
            work = sum(costs.forward[c] + costs.backward[c] + costs.weight[c] for c in own)
            best = max(best, head + microbatches * work * min(1.0, costs.pair_factor))
        head += costs.forward[chunk]
        if chunk + 1 < costs.chunks:
            head += costs.link(stage, costs.placement[chunk + 1]).delay_ms if costs.placement[chunk + 1] != stage else 0.0
    return best


def _search(costs: Costs, microbatches: int, bound: float, effort: float) -> tuple[Order, Lanes]:
    """The best order found and the (forward) problem it belongs to."""
    ahead, back = Lanes.of(costs, microbatches), Lanes.of(costs, microbatches, mirrored=True)
    draw = random.Random(0)
    unit = sum(ahead.duration) / ahead.lanes
    best: Listed | None = None
    good: Priority = []
    listed, sweep = 0, 0
    while listed == 0 or listed < effort * LISTED_OPERATIONS:
        patience = PATIENCE[sweep % len(PATIENCE)]
        if sweep < len(PATIENCE):
            priority: Priority = _first_priority(ahead)
        else:
            priority = [[value + draw.gauss(0.0, unit) for value in lane] for lane in good]
        sweep += 1
        for _ in range(ROUNDS):
            forwards = dispatch(ahead, priority, patience)
            listed += ahead.operations
            assert forwards is not None
            if best is None or forwards.makespan_ms <= best.makespan_ms:
                best, good = forwards, priority
            if best.makespan_ms <= bound + TOLERANCE * bound:
                return best.order, ahead
            backwards = dispatch(back, _mirror(forwards.ends), patience)
            listed += ahead.operations
            assert backwards is not None
            priority = _mirror(backwards.ends)
    assert best is not None
    return best.order, ahead


def _first_priority(problem: Lanes) -> Priority:
    """B before F before W, as in ADAPTRA's Algorithm 4, and older micro-batches before newer ones."""
    chunks = problem.lanes // (2 if problem.fused else 3)
    rank = (1.0, 0.0, 2.0)
    step = float(problem.lanes)
    return [
        [rank[lane // chunks] * step * problem.microbatches + m * step - lane % chunks for m in range(problem.microbatches)]
        for lane in range(problem.lanes)
    ]


def _mirror(ends: list[list[float]]) -> Priority:
    """What ends last in one direction of time goes first in the other."""
    return [[-end for end in reversed(lane)] for lane in ends]


