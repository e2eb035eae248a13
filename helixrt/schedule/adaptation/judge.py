"""How the orders at hand, and a planned one, do under measured costs: what the policy decides by.

In: a `Question`: costs with the spread of their delays, the order in use, the orders known, the costs of before. Out: an
`Answer`: a time for each order at the low, the middle and the high end of the delays, and under the costs of before. It plans,
so it takes milliseconds to seconds: it is asked off the step's path (`helixrt.job.order_planner`). The same question gives the
same answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, Link
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.ir import Schedule
from helixrt.schedule.simulate import DELEGATED, Comm, makespan_ms


@dataclass(frozen=True)
class CostEstimate:
    """Measured costs, and the spread of each value in ms, in the same form; memory and pairs of `spread` are not looked at.

    Raises ConfigError for a spread of another placement.
    """

    costs: Costs
    spread: Costs

    def __post_init__(self) -> None:
        if self.spread.placement != self.costs.placement:
            raise ConfigError("spread.placement", self.spread.placement, f"must be that of the costs, {self.costs.placement}")

    def shifted(self, spreads: float) -> Costs:
        """The costs with every delay moved by so many spreads, at least to 0."""
        links = {}
        for (a, b), link in self.costs.links.items():
            links[a, b] = Link(max(0.0, link.delay_ms + spreads * self.spread.link(a, b).delay_ms), link.wire_ms)
        return replace(self.costs, links=links)


@dataclass(frozen=True)
class Question:
    """`before` are the costs that the last answer was about, None for the first question. `effort` is the planner's."""

    observed: CostEstimate
    in_use: Schedule
    known: tuple[Schedule, ...] = ()
    before: Costs | None = None
    comm: Comm = DELEGATED
    least_gain: float = 0.02
    effort: float = 0.1


@dataclass(frozen=True)
class Timed:
    """What a step takes by this order, in ms: with the delays as measured, less and more than that by their spread, and under
    the costs of before (where there are none, as measured with links that cost nothing: what a slow start may turn into)."""

    key: str
    order: Schedule
    middle_ms: float
    low_ms: float
    high_ms: float
    before_ms: float

    def gain_ms(self, other: Timed) -> float:
        """How much less time `other` takes, at the end of the delays where that is least."""
        return min(self.middle_ms - other.middle_ms, self.low_ms - other.low_ms, self.high_ms - other.high_ms)


@dataclass(frozen=True)
class Answer:
    """`timed[0]` is the order in use. `by_equation`: equation (1) holds on every link that it speaks of."""

    observed: CostEstimate
    timed: tuple[Timed, ...]
    by_equation: bool

    def of(self, key: str) -> Timed | None:
        """The order with this key, if it was timed."""
        return next((each for each in self.timed if each.key == key), None)


def judge(question: Question) -> Answer:
    """Time the orders, and plan another one where the order in use does not tolerate the costs. Raises what `replan` does."""
    from helixrt.schedule.adaptation.replan import replan  # brings numpy, which settings do without

    costs, known = question.observed.costs, question.known
    found = replan(
        question.in_use, costs, comm=question.comm, known=known, least_gain=question.least_gain, effort=question.effort
    )
    return timed(question, found.schedule)


def timed(question: Question, planned: Schedule) -> Answer:
    """The answer, with this order as the one that was planned."""
    from helixrt.schedule.adaptation.replan import fits, link_verdicts

    observed, in_use = question.observed, question.in_use
    ends = (observed.costs, observed.shifted(-1.0), observed.shifted(1.0))
    before = question.before or replace(observed.costs, links={})
    found: dict[str, Timed] = {}
    for order in (in_use, *(each for each in question.known if fits(each, observed.costs)), planned):
        if (key := order_key(order)) not in found:
            found[key] = Timed(key, order, *(makespan_ms(order, costs, question.comm) for costs in (*ends, before)))
    by_equation = all(link.tolerated for link in link_verdicts(in_use, observed.shifted(1.0)))
    return Answer(observed, tuple(found.values()), by_equation)
