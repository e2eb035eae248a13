"""A simulated job whose order the policy may change: true costs, noisy measurements, answers that come steps later.

In: a seed, an order, a policy's rules, the true delays of each step. Out: a `Run`: what all steps took, what they would have
taken by the first order, and each switch. Clocks are off by seconds and drift: of a link's two ways one is measured too long by
the error of the estimated offset, the other too short by as much. What a switch costs is known as in a job: from one rehearsal
before the first, which is off by up to 30%.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from helixrt.schedule.adaptation.judge import Answer, CostEstimate, Question, timed
from helixrt.schedule.adaptation.policy import Adaptation, Ask, OrderPolicy, Switch
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.ir import Schedule
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.simulate import makespan_ms

Delays = Mapping[tuple[int, int], float]


@dataclass
class Run:
    """Times in ms; `orders[step]` is the key of the order that the step ran by, `asked` counts questions."""

    total_ms: float = 0.0
    fixed_ms: float = 0.0
    asked: int = 0
    orders: list[str] = field(default_factory=list)
    switches: list[tuple[int, Switch]] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        return self.total_ms / self.fixed_ms


@dataclass
class OrderWorld:
    """`delays(step)` are true; `lag` steps pass from a question to its answer; making an order ready takes `ready_ms`."""

    seed: int
    first: Schedule
    delays: Callable[[int], Delays]
    steps: int = 120
    rules: Adaptation = field(default_factory=lambda: Adaptation(effort=0.01))
    noise: float = 0.02
    outliers: float = 0.002  # of all values
    offset_ms: float = 0.3
    lag: int = 1
    ready_ms: float = 300.0
    costs: Costs | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.true = self.costs or uniform(self.first.stages, 10.0, 10.0, 10.0)
        hosts = range(self.first.stages)
        self.errors = [self.random.gauss(0.0, self.offset_ms) for _ in hosts]  # of the estimated offsets
        self.planned: dict[tuple[tuple[tuple[int, int], float], ...], Schedule] = {}
        self.timed: dict[tuple[str, tuple[tuple[tuple[int, int], float], ...]], float] = {}

    def run(self) -> Run:
        policy, found = OrderPolicy(self.first, self.rules, self.steps), Run()
        orders = {order_key(self.first): self.first}
        policy.rehearsed(self.ready_ms * self.random.uniform(0.7, 1.3))
        pending: tuple[int, Answer] | None = None
        in_use = order_key(self.first)
        for step in range(1, self.steps + 1):
            delays = self.delays(step)
            found.orders.append(in_use)
            found.total_ms += self.time_ms(orders[in_use], delays)
            found.fixed_ms += self.time_ms(self.first, delays)
            now = self.measured(step, orders[in_use], delays)
            if now is None:
                continue
            decision = policy.observed(step, now)
            if isinstance(decision, Ask):
                found.asked += 1
                pending = (step + self.lag, self.answer(decision.question, delays))
            elif pending is not None and step >= pending[0]:
                decision, pending = policy.answered(step, pending[1]), None
            if isinstance(decision, Switch):
                took_ms = 0.0 if decision.key in orders else self.ready_ms
                orders[decision.key] = decision.order
                found.total_ms += took_ms
                found.switches.append((step, decision))
                policy.switched(step, decision.key, took_ms)
                in_use = decision.key
        return found

    def answer(self, question: Question, delays: Delays) -> Answer:
        """With the order that is planned for the true costs; planning under noise takes seconds, and finds the like."""
        key = tuple(sorted(delays.items()))
        if key not in self.planned:
            self.planned[key] = plan(with_delays(self.true, delays), self.first.microbatches, effort=0.01).schedule
        return timed(question, self.planned[key])

    def time_ms(self, order: Schedule, delays: Delays) -> float:
        key = (order_key(order), tuple(sorted(delays.items())))
        if key not in self.timed:
            self.timed[key] = makespan_ms(order, with_delays(self.true, delays))
        return self.timed[key]

    def measured(self, step: int, order: Schedule, delays: Delays) -> CostEstimate | None:
        """What the estimates say after this step: each value with noise, some far off. None: nothing yet."""

        def noisy(value: float) -> float:
            off = 1.5 if self.random.random() < self.outliers else 1.0
            return max(0.0, value * off * (1 + self.random.gauss(0.0, self.noise)))

        self.errors = [error + self.random.gauss(0.0, self.offset_ms / 20) for error in self.errors]  # clocks drift
        true, stages = with_delays(self.true, delays), self.first.stages
        ways = [way for a in range(stages - 1) for way in ((a, a + 1), (a + 1, a))]
        links = {(a, b): Link(max(0.0, noisy(true.link(a, b).delay_ms) + self.errors[b] - self.errors[a])) for a, b in ways}
        values = {name: tuple(map(noisy, getattr(true, name))) for name in ("forward", "backward", "weight")}
        spreads = {name: tuple(self.noise * v for v in getattr(true, name)) for name in ("forward", "backward", "weight")}
        spread = {way: Link(self.offset_ms + self.noise * true.link(*way).delay_ms) for way in ways}
        return CostEstimate(replace(true, links=links, **values), replace(true, links=spread, **spreads))


def both(link: int, delay_ms: float) -> dict[tuple[int, int], float]:
    """Both ways between stage `link` and the next."""
    return {(link, link + 1): delay_ms, (link + 1, link): delay_ms}
