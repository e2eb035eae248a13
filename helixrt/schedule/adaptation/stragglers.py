"""How policies stand slow links: the straggler table, in the manner of ADAPTRA's Figures 14 to 17.

In: costs of one chunk per stage, micro-batches, the places and delays of slow links, policies. Out: one `Cell` per
policy, way to communicate, place and delay. Policies that plan from costs (adaptra, helix) plan for the delays, which
is what adaptation comes to once a delay has been noticed; helix stays with its order where the new one is slower in the
way stages communicate. The others keep the order they have without any delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.replay import ADAPTIVE
from helixrt.schedule.costs import Costs, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Schedule
from helixrt.schedule.simulate import DELEGATED, Comm, Direct, makespan_ms

POLICIES = ("1f1b", "zb", "adaptra", "helix")
COMMS: Mapping[str, Comm] = MappingProxyType({"direct": Direct(), "delegated": DELEGATED})
DELAYS_MS = (0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0)


@dataclass(frozen=True, slots=True)
class Place:
    """Links that are slow at once: `links` i between stage i and i + 1."""

    name: str
    links: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """A step's time in ms, and relative to the same policy's and communication's without delay."""

    place: Place
    delay_ms: float
    policy: str
    comm: str
    makespan_ms: float
    slowdown: float


def places(stages: int) -> tuple[Place, ...]:
    """The first, the middle and the last link alone, and all three at once. Raises ConfigError below 4 stages."""
    if stages < 4:
        raise ConfigError("stages", stages, "must be at least 4, for three different links")
    first, middle, last = 0, (stages - 1) // 2, stages - 2
    return (
        Place("first", (first,)),
        Place("middle", (middle,)),
        Place("last", (last,)),
        Place("three", (first, middle, last)),
    )


def straggler_table(
    costs: Costs,
    microbatches: int,
    where: Sequence[Place] | None = None,
    delays_ms: Sequence[float] = DELAYS_MS,
    names: Sequence[str] = POLICIES,
) -> tuple[Cell, ...]:
    """Every combination, in the order place, delay, policy, direct before delegated.

    Each delay is added to both ways of the place's links. Raises ConfigError as the policies do, for a link that is not
    there, and for a negative delay.
    """
    stages = costs.stages
    fixed = {name: policies.build(name, costs, microbatches) for name in names}
    alone = {(name, comm): _time_ms(name, fixed[name], costs, COMMS[comm]) for name in names for comm in COMMS}
    cells = []
    for place in where if where is not None else places(stages):
        if not all(0 <= link < stages - 1 for link in place.links):
            raise ConfigError("links", list(place.links), f"must be below {stages - 1}")
        for delay_ms in delays_ms:
            ways = [way for i in place.links for way in ((i, i + 1), (i + 1, i))]
            slowed = with_delays(costs, {way: costs.link(*way).delay_ms + delay_ms for way in ways})
            for name in names:
                adapts = name in ADAPTIVE and delay_ms > 0
                planned = policies.build(name, slowed, microbatches) if adapts else fixed[name]
                for comm in COMMS:
                    took_ms = _time_ms(name, planned, slowed, COMMS[comm])
                    if name == "helix":
                        took_ms = min(took_ms, _time_ms(name, fixed[name], slowed, COMMS[comm]))
                    before_ms = alone[name, comm]
                    slowdown = took_ms / before_ms if before_ms else 1.0
                    cells.append(Cell(place, delay_ms, name, comm, took_ms, slowdown))
    return tuple(cells)


def _time_ms(name: str, schedule: Schedule, costs: Costs, comm: Comm) -> float:
    return makespan_ms(schedule, policies.costs_for(name, costs), comm)
