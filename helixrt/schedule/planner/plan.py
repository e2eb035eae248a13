"""The helix planner: near-optimal orders under memory caps, uneven stages and directed delays.

In: `Costs` of one or more chunks per stage and a number of micro-batches. Out: a `Plan`: the schedule, its exact
makespan, a proven lower bound, and the memory it needs, never above the caps.

ADAPTRA (Section 4.3) makes one list forwards in time. Here lists are made back and forth in time (`justification`), the
best is improved along its critical path (`local_search`), and the published schedules of the same placement stand
beside it (`policies`), so none that fits the caps is faster. All of it ends as soon as the proven bound is met.
How much is done is counted in operations, not read from a clock: the same input gives the same plan. Micro-batches go in
order in every chunk, for each of F, B and W; the bound holds for any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.policies import POLICIES
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.bounds import check_reachable, lower_bound
from helixrt.schedule.planner.justification import Justifier
from helixrt.schedule.planner.lanes import TOLERANCE, Form, Lanes, Order
from helixrt.schedule.planner.local_search import improve
from helixrt.schedule.simulate import makespan_ms, simulate

FIRST_WORK = 1_000_000  # operations timed, or their like, in the first lists, of which there is at least one sweep
LISTING_WORK = 500_000  # in further lists
SEARCH_WORK = 800_000  # along the critical path, before those and again after
WORK_PER_OPERATION = 10_000  # the most for each operation of the problem in all that: tiny ones are soon searched out
LARGE = 8_000  # operations; beyond, the search shrinks, since timing published schedules and bounds takes its share


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
    check_reachable(costs)
    bound_ms = lower_bound(costs, microbatches)
    timeline = simulate(_search(costs, microbatches, bound_ms, effort), costs)
    return Plan(
        schedule=timeline.schedule,
        makespan_ms=timeline.makespan_ms,
        lower_bound_ms=bound_ms,
        gap=max(0.0, timeline.makespan_ms / bound_ms - 1.0) if bound_ms else 0.0,
        peak_memory=timeline.peak_memory,
        solve_ms=(clock() - begun) * 1e3 if clock else None,
    )


def _search(costs: Costs, microbatches: int, bound_ms: float, effort: float) -> Schedule:
    """Cheap means first; each begins from the best order of those before, and none is used once the bound is met."""
    draw = random.Random(microbatches)

    def schedule_of(problem: Lanes, order: Order) -> Schedule:
        return Schedule("helix", costs.stages, microbatches, costs.placement, problem.entries(order))

    def exact_ms(problem: Lanes, order: Order) -> float:
        return makespan_ms(schedule_of(problem, order), costs)

    best_ms, best = math.inf, None
    forms = _forms(costs)
    for form in forms:
        lists = Justifier(costs, microbatches, exact_ms, draw, form)
        lists.run(bound_ms, min(FIRST_WORK, lists.cost * lists.first))
        if lists.best and lists.best_ms > bound_ms * (1 + TOLERANCE):
            size = lists.problem.operations
            share = min(1.0, WORK_PER_OPERATION * size / (LISTING_WORK + 2 * SEARCH_WORK), LARGE / size)
            _refine(lists, bound_ms, effort * share / len(forms), draw)
        if lists.best_ms < best_ms:
            best_ms, best = lists.best_ms, schedule_of(lists.problem, lists.best)
    if best_ms > bound_ms * (1 + TOLERANCE):
        for schedule in _published(costs, microbatches):
            published_ms = makespan_ms(schedule, costs)
            if published_ms < best_ms:
                best_ms, best = published_ms, replace(schedule, name="helix")
    assert best is not None, "a cap that can be kept leaves room for some list"
    return best


def _refine(lists: Justifier, bound_ms: float, effort: float, draw: random.Random) -> None:
    """Along the critical path, with more lists, and along the critical path again, from the best of both."""
    if any(lists.problem.pairs):
        lists.run(bound_ms, (LISTING_WORK + SEARCH_WORK) * effort)
        return
    lists.offer(*improve(lists.problem, lists.best, bound_ms, SEARCH_WORK * effort, draw))
    if lists.best_ms > bound_ms * (1 + TOLERANCE):
        lists.run(bound_ms, LISTING_WORK * effort)
        lists.offer(*improve(lists.problem, lists.best, bound_ms, SEARCH_WORK * effort, draw))


def _forms(costs: Costs) -> tuple[Form, ...]:
    """How backwards are tried. Splitting them is never slower, but for two cases.

    A pair with a whole backward may save more; and where W keeps more than the forward left, a tight cap may have room
    only for whole ones.
    """
    split = [0.0] * costs.stages
    for chunk, stage in enumerate(costs.placement):
        split[stage] += max(costs.activation[chunk], costs.kept[chunk])
    tight = any(cap < need for cap, need in zip(costs.memory, split, strict=True))
    paired = costs.pair_factor < 1 or any(op is Op.BW for _, op, _ in costs.pair_ms)
    return (Form.SPLIT, *([Form.MIXED] if paired else []), *([Form.WHOLE] if tight else []))


def _published(costs: Costs, microbatches: int) -> Iterator[Schedule]:
    """The published schedules of this placement that exist for these numbers and fit the caps."""
    for name, policy in POLICIES.items():
        if name == "helix" or policy.placement(costs.stages) != costs.placement:
            continue
        try:
            made = policy.schedule(costs, microbatches)
        except ConfigError:
            continue
        if all(peak <= cap * (1 + TOLERANCE) for peak, cap in zip(peak_memory(made, costs), costs.memory, strict=True)):
            yield made
