"""Every schedule by its policy's name: what the command line, the benchmarks, the planner and training choose from.

In: a policy's name, costs, a number of micro-batches. Out: the policy's schedule, in the policy's own placement.
Costs are given for one chunk per stage, or for that placement; `costs_for` turns the former into the latter,
each chunk getting an even share of its stage, which is what the schedule is to be simulated under.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.generators import classic, v_shaped, zero_bubble
from helixrt.schedule.generators.adaptra import adaptra
from helixrt.schedule.ir import Schedule, folded, interleaved, linear


@dataclass(frozen=True, slots=True)
class Policy:
    """How a policy places chunks on that many stages, and the schedule it makes from costs and micro-batches.

    One that is not `bound` to its placement serves costs of any other as well.
    """

    placement: Callable[[int], tuple[int, ...]]
    schedule: Callable[[Costs, int], Schedule]
    bound: bool = True


def _fixed(generator: Callable[[int, int], Schedule]) -> Callable[[Costs, int], Schedule]:
    """A generator whose order does not depend on the costs."""
    return lambda costs, microbatches: generator(costs.stages, microbatches)


def _helix(costs: Costs, microbatches: int) -> Schedule:
    from helixrt.schedule.planner.plan import plan  # above this module: the planner starts from the policies listed here

    return plan(costs, microbatches).schedule


POLICIES: dict[str, Policy] = {
    "gpipe": Policy(linear, _fixed(classic.gpipe)),
    "1f1b": Policy(linear, _fixed(classic.one_f_one_b)),
    "interleaved": Policy(interleaved, _fixed(classic.interleaved)),
    "zb-h1": Policy(linear, _fixed(zero_bubble.zb_h1)),
    "zb-h2": Policy(linear, _fixed(zero_bubble.zb_h2)),
    "zb": Policy(linear, zero_bubble.zb),
    "zbv": Policy(folded, _fixed(v_shaped.zbv)),
    "dualpipev": Policy(folded, _fixed(v_shaped.dualpipev)),
    "w": Policy(folded, _fixed(v_shaped.w)),
    "adaptra": Policy(linear, adaptra),
    "helix": Policy(linear, _helix, bound=False),
}

BY_COSTS = ("zb", "adaptra", "helix")  # those that look at times, delays and caps


def policy(name: str) -> Policy:
    """The policy of this name. Raises ConfigError, which lists all, for an unknown one."""
    if name not in POLICIES:
        raise ConfigError("policy", name, f"must be one of {', '.join(POLICIES)}")
    return POLICIES[name]


def costs_for(name: str, costs: Costs) -> Costs:
    """These costs in the policy's placement: as they are, or one chunk per stage split evenly. helix keeps any.

    Raises ConfigError for an unknown policy, and for costs of another placement.
    """
    chosen = policy(name)
    placement = chosen.placement(costs.stages)
    return costs if costs.placement == placement or not chosen.bound else costs.split(placement)


def build(name: str, costs: Costs, microbatches: int) -> Schedule:
    """The policy's schedule; simulate it under `costs_for(name, costs)`.

    Only zb, adaptra and helix look at the times, delays and caps of `costs`. The others keep to their pattern whatever
    these are, so their schedule may exceed a cap.
    Raises ConfigError for an unknown policy, costs of another placement, a number of micro-batches below 1, and a cap
    under which adaptra or helix can not plan.
    """
    return policy(name).schedule(costs_for(name, costs), microbatches)
