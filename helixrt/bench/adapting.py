"""The adaptation loop on real ranks whose operations sleep: links become slow and recover; when does the order change?

The ranks are those of `helixrt bench adaptation`. The loop is that of a job: stamps of the ranks, estimates, the policy, the
planner in a process of its own, and a new order, taken up one step after it was decided, as if it had to be made ready. Beside
it orders that stay: 1f1b and zb, direct and delegated. Scenarios: a link that is slow for a while (ADAPTRA, Figure 14), the
trace of the paper's Table 3 without its NIC failure, and a link that flaps, which must do no harm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import write
from helixrt.bench._sleeping_rank import Round
from helixrt.bench.adaptation import Size, _ask, _ranks
from helixrt.errors import ConfigError
from helixrt.job.order_planner import OrderPlanner
from helixrt.observe.estimator import Estimator
from helixrt.schedule.adaptation.judge import Answer, CostEstimate
from helixrt.schedule.adaptation.policy import Adaptation, Ask, OrderPolicy, Switch
from helixrt.schedule.adaptation.stragglers import COMMS
from helixrt.schedule.adaptation.trace import table3
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Schedule
from helixrt.schedule.planner.slack import plan_for_slack
from helixrt.schedule.simulate import makespan_ms

Delays = Mapping[tuple[int, int], float]
FIXED = (("1f1b", "direct"), ("zb", "direct"), ("zb", "delegated"))
SLOW_FROM, SLOW_TO, SLOW_STEPS = 20, 60, 80
FLAP, FLAP_STEPS = 5, 100
CALM_STEPS = 6  # without delays, before the loop and again after it


@dataclass(frozen=True)
class Scenario:
    """`delays(step)` in ms, for steps 1 to `steps`."""

    name: str
    steps: int
    delays: Callable[[int], Delays]


@dataclass
class Run:
    """Of one strategy: every step's time as measured, and by the simulation under the true delays; for the loop its switches:
    (the step that was done, why, predicted ms before and after)."""

    name: str
    steps_ms: list[float] = field(default_factory=list)
    simulated_ms: list[float] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)  # by number, in the order in which they were first used
    switches: list[tuple[int, str, float, float]] = field(default_factory=list)
    unanswered: int = 0  # questions that the planner gave no answer to: it runs at the lowest priority

    @property
    def total_s(self) -> float:
        return sum(self.steps_ms) / 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="4x12@10", help="the pipeline, as STAGESxMICROBATCHES@MS; table3 needs 8 stages")
    parser.add_argument("--scenario", default="slow-link", choices=["slow-link", "table3", "flapping"])
    parser.add_argument(
        "--factor", type=float, default=6.0, help="delay of slow-link and flapping, as a multiple of an operation"
    )
    parser.add_argument("--every", type=int, default=10, help="run one of so many iterations of table3")
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shared_memory"])
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    size = Size.parse(args.size)
    scenario = _scenario(args, size)
    costs = uniform(size.stages, size.operation_ms, size.operation_ms, size.operation_ms)
    with _ranks(size.stages, args.transport) as ranks:
        fixed = [_fixed(ranks, scenario, costs, size.microbatches, *strategy) for strategy in FIXED]
        first = plan_for_slack(costs, size.microbatches, effort=0.1).schedule
        calm_ms = _calm_ms(ranks, costs, first)
        loop = _adapting(ranks, scenario, costs, first)
        calm_ms += _calm_ms(ranks, costs, first)
    _print(scenario, size, fixed, loop, calm_ms)
    runs = {each.name: {**asdict(each), "total_s": each.total_s} for each in (*fixed, loop)}
    settings = {"size": args.size, "scenario": args.scenario, "factor": args.factor, "every": args.every}
    summary = _summary(scenario, fixed, loop, calm_ms)
    write(args.json, "adapting", settings, {}, summary=summary, undisturbed_ms=calm_ms, runs=runs)
    return 0


def _scenario(args: argparse.Namespace, size: Size) -> Scenario:
    middle = (size.stages - 1) // 2
    slow = dict.fromkeys([(middle, middle + 1), (middle + 1, middle)], args.factor * size.operation_ms)
    if args.scenario == "slow-link":
        return Scenario("slow-link", SLOW_STEPS, lambda step: slow if SLOW_FROM <= step < SLOW_TO else {})
    if args.scenario == "flapping":
        return Scenario("flapping", FLAP_STEPS, lambda step: slow if step // FLAP % 2 else {})
    trace = table3()
    if size.stages != trace.stages:
        raise ConfigError("--size", args.size, f"must have the trace's {trace.stages} stages")
    check_least(args, every=1)
    steps = trace.iterations // args.every
    return Scenario("table3", steps, lambda step: trace.delays_ms((step - 1) * args.every))


def _fixed(ranks: Sequence[Connection], scenario: Scenario, costs: Costs, microbatches: int, policy: str, comm: str) -> Run:
    order, found = policies.build(policy, costs, microbatches), Run(f"{policy} {comm}")
    for step in range(1, scenario.steps + 1):
        slowed = with_delays(costs, scenario.delays(step))
        answers = _ask(ranks, Round(order, slowed, COMMS[comm], 1))
        found.steps_ms.append(max(answer.ends_ms[0] for answer in answers))
        found.simulated_ms.append(makespan_ms(order, slowed, COMMS[comm]))
        found.orders.append(0)
    return found


def _calm_ms(ranks: Sequence[Connection], costs: Costs, order: Schedule) -> list[float]:
    """Steps by the loop's first order, with nothing that is slow."""
    answers = _ask(ranks, Round(order, costs, COMMS["delegated"], CALM_STEPS))
    return [max(answer.ends_ms[step] for answer in answers) for step in range(CALM_STEPS)]


def _adapting(ranks: Sequence[Connection], scenario: Scenario, costs: Costs, first: Schedule) -> Run:
    found, estimator = Run("helix adapting"), Estimator()
    policy = OrderPolicy(first, Adaptation(), scenario.steps)
    planner, in_use, following = OrderPlanner(), first, None
    numbers = {policy.in_use: 0}
    asked: Future[Answer | str | None] | None = None
    with ThreadPoolExecutor(1) as thread:
        try:
            for step in range(1, scenario.steps + 1):
                slowed = with_delays(costs, scenario.delays(step))
                answers = _ask(ranks, Round(in_use, slowed, COMMS["delegated"], 1))
                found.steps_ms.append(max(answer.ends_ms[0] for answer in answers))
                found.simulated_ms.append(makespan_ms(in_use, slowed))
                found.orders.append(numbers[policy.in_use])
                if following is not None:
                    in_use = following.order
                    numbers.setdefault(following.key, len(numbers))
                    policy.switched(step, following.key, 0.0)
                    following = None
                for times in (times for answer in answers for times in answer.times):
                    estimator.add(times)
                measured = estimator.estimates()
                if measured is None:
                    continue
                answer: Answer | str | None = None
                if asked is not None and asked.done():
                    answer, asked = asked.result(), None
                    if not isinstance(answer, Answer):
                        policy.unanswered()
                        found.unanswered += 1
                if isinstance(answer, Answer):
                    decision = policy.answered(step, answer)
                else:
                    decision = policy.observed(step, CostEstimate(measured.costs(base=costs), measured.spread(base=costs)))
                if isinstance(decision, Ask):
                    asked = thread.submit(planner.ask, decision.question)
                elif isinstance(decision, Switch):
                    following = decision
                    found.switches.append((step, decision.why, decision.present_ms, decision.predicted_ms))
        finally:
            planner.close()
    return found


def _summary(scenario: Scenario, fixed: Sequence[Run], loop: Run, calm_ms: Sequence[float]) -> dict[str, Any]:
    """Ratios of times are measured; `undisturbed` is the median step of a run in which nothing is slow, by the loop's first
    order."""
    said: dict[str, Any] = {
        "switches after steps": [step for step, *_ in loop.switches],
        "questions without an answer": loop.unanswered,
        "measured / simulated, median": round(median(a / b for a, b in zip(loop.steps_ms, loop.simulated_ms, strict=True)), 4),
        "total, s": {each.name: round(each.total_s, 2) for each in (*fixed, loop)},
        "total of others / total of the loop": {each.name: round(each.total_s / loop.total_s, 3) for each in fixed},
        "total / undisturbed": round(loop.total_s * 1e3 / (median(calm_ms) * scenario.steps), 3),
    }
    if scenario.name == "slow-link":
        steady = slice(min(SLOW_FROM + 4, SLOW_TO - 2), SLOW_TO - 1)  # the order has followed
        mine = median(loop.steps_ms[steady])
        said["steps until the new order"] = next((s - SLOW_FROM + 2 for s, *_ in loop.switches if s >= SLOW_FROM), None)
        said["slow step, ms"] = {each.name: round(median(each.steps_ms[steady]), 1) for each in (*fixed, loop)}
        said["slow step / simulated"] = round(mine / median(loop.simulated_ms[steady]), 3)
        said["slow step / that of others"] = {e.name: round(mine / median(e.steps_ms[steady]), 3) for e in fixed}
        said["the first order is back"] = loop.orders[-1] == 0
    return said


def _print(scenario: Scenario, size: Size, fixed: Sequence[Run], loop: Run, calm_ms: Sequence[float]) -> None:
    print(f"adapting: {scenario.name}, {scenario.steps} steps of {size} with operations that sleep")
    for step, why, before_ms, after_ms in loop.switches:
        print(f"  after step {step}: {before_ms:.0f} -> {after_ms:.0f} ms predicted; {why}")
    for key, value in _summary(scenario, fixed, loop, calm_ms).items():
        print(f"  {key}: {value}")
