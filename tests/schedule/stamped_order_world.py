"""A simulated job as `order_world`, whose measurements are those of a job: stamps of clocks that drift, through the estimator.

Simulated stages write when their messages were sent and arrived, by the clocks of their hosts, which are seconds apart, drift,
and are corrected by NTP. `observe` reduces that to costs as in a job, and the policy decides by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from helixrt.observe.estimator import Estimator
from helixrt.schedule.adaptation.judge import CostEstimate
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.ir import Schedule
from tests.observe.host_clocks import some_clock
from tests.observe.measured_world import World
from tests.schedule.order_world import Delays, OrderWorld


@dataclass
class StampedOrderWorld(OrderWorld):
    """`quiet_ms`: the delay of a link that is not slow. `hosts` as in `World`. `offset_ms` of `OrderWorld` has no meaning here:
    what is known of the clocks is what messages show."""

    quiet_ms: float = 0.0
    hosts: tuple[int, ...] = ()
    drift: float = 100e-6
    corrected: bool = True  # clocks, by NTP
    estimator: Estimator = field(init=False)
    world: World = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        ways = [way for a in range(self.first.stages - 1) for way in ((a, a + 1), (a + 1, a))]
        self.true = replace(self.true, links={way: Link(self.quiet_ms, 0.0) for way in ways})
        self.base = uniform(self.first.stages, memory=self.true.memory[0]).split(self.first.placement)  # as in a job
        self.estimator = Estimator(self.first.stages)
        seconds = 1e-3 * self.steps * self.time_ms(self.first, {})
        self.now_costs: Costs = self.true
        self.world = World(
            self.first,
            lambda step: self.now_costs,
            self.seed,
            noise=self.noise,
            outliers=self.outliers,
            hosts=self.hosts,
            clocks=[
                some_clock(self.random, seconds, drift=self.drift, corrected=self.corrected) for _ in range(self.first.stages)
            ],
        )

    def measured(self, step: int, order: Schedule, delays: Delays) -> CostEstimate | None:
        """What the estimates say after this step."""
        self.world.schedule, self.now_costs = order, with_delays(self.true, delays)
        for report in self.world.reports(step):
            self.estimator.add(report)
        found = self.estimator.estimates()
        if found is None or found.lacking():
            return None
        return CostEstimate(found.costs(base=self.base), found.spread(base=self.base))
