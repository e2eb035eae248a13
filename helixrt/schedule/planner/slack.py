"""Planning for slack: of the orders that lose nothing now, the one that stands slow links best.

In: costs, micro-batches. Out: a `Plan` as `planner.plan` makes it, within the same caps. ADAPTRA spreads the slack that
memory allows evenly over the links before any is slow (Section 4.2, Algorithm 1), since no one knows which will be. Here
the planner itself is asked for orders under imagined delays on every link; those that are as fast as the plain plan under
the real costs are tried on one slow link after the other, and the one with the least time over all trials is taken.
So the iterations until a change is noticed are cheap, and many changes need no new plan at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, with_delays
from helixrt.schedule.ir import Schedule
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.plan import Plan, plan
from helixrt.schedule.simulate import makespan_ms

# In turns, a turn being the longest F and B of a stage: equation (1) measures what slack absorbs in these.
IMAGINED_TURNS = (0.25, 0.5, 1.0, 2.0)
TRIED_TURNS = (0.5, 1.5, 3.0)
_TRIED_LINKS = 8
_SLIVER = 1e-9


def plan_for_slack(
    costs: Costs, microbatches: int, *, loss: float = 0.0, effort: float = 1.0, clock: Callable[[], float] | None = None
) -> Plan:
    """The planned order with the most tolerance of those within 1 + `loss` times the plain plan's time.

    `effort` is the planner's, spent on every order it is asked for; `clock` returns seconds. Raises ConfigError for a
    negative `loss` and as `plan` does.
    """
    if not loss >= 0:
        raise ConfigError("loss", loss, "must be at least 0")
    begun_s = clock() if clock else 0.0
    found = plan(costs, microbatches, effort=effort)
    if costs.stages > 1:
        allowed_ms = found.makespan_ms * (1 + loss) * (1 + _SLIVER)
        orders = [(found.schedule, found.makespan_ms)]
        for turns in IMAGINED_TURNS:
            imagined = _slowed(costs, range(costs.stages - 1), turns * costs.turn_ms)
            order = plan(imagined, microbatches, effort=effort).schedule
            took_ms = makespan_ms(order, costs)
            if took_ms <= allowed_ms:
                orders.append((order, took_ms))
        # The first of equals: the plain plan, then those that imagined less.
        schedule, took_ms = min(orders, key=lambda order: _trial_ms(order[0], costs))
        found = replace(
            found,
            schedule=schedule,
            makespan_ms=took_ms,
            gap=took_ms / found.lower_bound_ms - 1.0 if found.lower_bound_ms else 0.0,
            peak_memory=peak_memory(schedule, costs),
        )
    return replace(found, solve_ms=(clock() - begun_s) * 1e3) if clock else found


def _slowed(costs: Costs, links: range, delay_ms: float) -> Costs:
    ways = [way for i in links for way in ((i, i + 1), (i + 1, i))]
    return with_delays(costs, {way: costs.link(*way).delay_ms + delay_ms for way in ways})


def _trial_ms(schedule: Schedule, costs: Costs) -> float:
    """The time over all trials: one slow link at a time, at most so many of them, evenly spread."""
    links = costs.stages - 1
    tried = sorted({round(k * (links - 1) / max(1, min(links, _TRIED_LINKS) - 1)) for k in range(min(links, _TRIED_LINKS))})
    turn_ms = costs.turn_ms
    return sum(makespan_ms(schedule, _slowed(costs, range(i, i + 1), turns * turn_ms)) for i in tried for turns in TRIED_TURNS)
