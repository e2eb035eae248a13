"""A training run replayed over a trace of slow links and NIC failures: what each strategy makes of it.

In: a `Trace`, costs of one chunk per stage, micro-batches per iteration, and a `Strategy`: which policy plans, whether
it plans again when links change, how stages communicate, what switching and restarting cost. Out: the time of
every iteration, so throughput over time and totals. Section 7.5 of the ADAPTRA paper (Figure 21, Table 3).

A change of the links is known `detection_lag` iterations later; the iterations in between run the old order over the
new links. What adapting means is the policy's own: ADAPTRA keeps an order that equation (1) accepts, the first one
if it can, and otherwise plans with Algorithm 2; helix starts from an order planned for slack and re-plans by
`replan.replan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.host_memory import HostMemory
from helixrt.schedule.adaptation.replan import replan
from helixrt.schedule.adaptation.trace import Trace
from helixrt.schedule.costs import Costs, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.generators.adaptra import slack, tolerates
from helixrt.schedule.ir import Schedule
from helixrt.schedule.planner.slack import plan_for_slack
from helixrt.schedule.simulate import DELEGATED, Comm, Delegated, Direct, makespan_ms

ADAPTIVE = ("adaptra", "helix")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a run is scheduled and what it does when links change or a NIC dies.

    `adaptive`: a new schedule is planned for changed links, which runs from `detection_lag` iterations after the change
    and costs `switch_ms` once. Without `failover`, a NIC failure costs a restart from the last checkpoint, `restart_s`;
    with it, traffic moves to another NIC within the iteration (Section 5.3). `host` is what activations beyond the
    costs' memory caps may use, for helix with delegated communication.
    Raises ConfigError for negative values, and when a policy is to adapt that can not.
    """

    name: str
    policy: str
    comm: Comm
    adaptive: bool = False
    failover: bool = False
    detection_lag: int = 1
    switch_ms: float = 100.0
    restart_s: float = 60.0
    host: HostMemory | None = None

    def __post_init__(self) -> None:
        policies.policy(self.policy)
        if self.adaptive and self.policy not in ADAPTIVE:
            raise ConfigError("strategy.policy", self.policy, f"only {' and '.join(ADAPTIVE)} plan again when links change")
        for key, value in (("detection_lag", self.detection_lag), ("switch_ms", self.switch_ms), ("restart_s", self.restart_s)):
            if not value >= 0:
                raise ConfigError(f"strategy.{key}", value, "must be at least 0")


# The paper's baselines communicate from the GPU and restart; ADAPTRA and helix delegate, adapt and fail over.
STRATEGIES = (
    Strategy(name="1f1b", policy="1f1b", comm=Direct()),
    Strategy(name="zb", policy="zb", comm=Direct()),
    Strategy(name="adaptra", policy="adaptra", comm=DELEGATED, adaptive=True, failover=True),
    Strategy(name="helix", policy="helix", comm=DELEGATED, adaptive=True, failover=True),
)


@dataclass(frozen=True, slots=True)
class Switch:
    """A new order was taken up at the start of `iteration`, over links as they had been seen."""

    iteration: int
    schedule: Schedule
    delays_ms: Mapping[tuple[int, int], float]


@dataclass(frozen=True)
class Replayed:
    """One strategy over one trace. `iteration_ms` holds every iteration's time, switches and restarts included."""

    strategy: Strategy
    microbatches: int
    undisturbed_ms: float
    iteration_ms: tuple[float, ...]
    switches: tuple[Switch, ...] = field(repr=False)

    @property
    def total_s(self) -> float:
        return sum(self.iteration_ms) / 1e3

    @property
    def slowdown(self) -> float:
        """The total relative to that of a run in which nothing happens, at least 1 but for rounding."""
        undisturbed_ms = self.undisturbed_ms * len(self.iteration_ms)
        return sum(self.iteration_ms) / undisturbed_ms if undisturbed_ms else 1.0

    def throughput(self, window: int = 1) -> tuple[float, ...]:
        """Micro-batches per second at every iteration, over it and the `window` - 1 before it."""
        rates = []
        for last in range(len(self.iteration_ms)):
            times = self.iteration_ms[max(0, last - window + 1) : last + 1]
            rates.append(self.microbatches * len(times) / sum(times) * 1e3 if sum(times) else 0.0)
        return tuple(rates)


def replay(trace: Trace, costs: Costs, microbatches: int, strategy: Strategy, effort: float = 1.0) -> Replayed:
    """Run the trace's iterations one by one. `effort` is the helix planner's.

    Raises ConfigError when the costs are of another number of stages than the trace, and as the policy does.
    """
    if costs.stages != trace.stages:
        raise ConfigError("costs.stages", costs.stages, f"must be the trace's, {trace.stages}")
    own = policies.costs_for(strategy.policy, costs)
    host = strategy.host if isinstance(strategy.comm, Delegated) else None
    if strategy.adaptive and strategy.policy == "helix":
        home = plan_for_slack(own, microbatches, effort=effort).schedule
    else:
        home = policies.build(strategy.policy, costs, microbatches)
    current = home
    known: dict[tuple[int, frozenset[tuple[tuple[int, int], float]]], float] = {}

    def time_ms(schedule: Schedule, delays: Mapping[tuple[int, int], float]) -> float:
        key = (id(schedule), frozenset(delays.items()))
        if key not in known:
            known[key] = makespan_ms(schedule, _slowed(own, delays), strategy.comm, host)
        return known[key]

    seen: Mapping[tuple[int, int], float] = {}
    times: list[float] = []
    switches: list[Switch] = []
    planned: list[Schedule] = [home]  # kept, so that an id names one schedule throughout
    for iteration in range(trace.iterations):
        extra_ms = 0.0
        reported = trace.delays_ms(iteration - strategy.detection_lag)
        if strategy.adaptive and reported != seen:
            measured = _slowed(own, reported)
            if strategy.policy == "helix":
                chosen = replan(current, measured, comm=strategy.comm, host=host, known=(home,), effort=effort).schedule
            else:
                chosen = _adapted(home, current, measured, costs, microbatches)
            if chosen.entries != current.entries:
                current = chosen
                planned.append(chosen)
                switches.append(Switch(iteration, chosen, reported))
                extra_ms += strategy.switch_ms
        seen = reported
        if not strategy.failover:
            extra_ms += sum(strategy.restart_s * 1e3 for f in trace.failures if f.iteration == iteration)
        times.append(time_ms(current, trace.delays_ms(iteration)) + extra_ms)
    return Replayed(strategy, microbatches, time_ms(home, {}), tuple(times), tuple(switches))


def _slowed(costs: Costs, delays: Mapping[tuple[int, int], float]) -> Costs:
    return with_delays(costs, {way: costs.link(*way).delay_ms + extra_ms for way, extra_ms in delays.items()})


def _adapted(home: Schedule, current: Schedule, measured: Costs, costs: Costs, microbatches: int) -> Schedule:
    """ADAPTRA's rule (Sections 4.2 and 6): a new plan where the delays exceed what equation (1) tolerates."""
    for schedule in (home, current):
        if all(tolerates(measured, slack(schedule))) or measured.links == costs.links:
            return schedule
    return policies.build("adaptra", measured, microbatches)
