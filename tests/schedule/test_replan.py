"""Re-planning, the host's memory, traces and the straggler table: hand-made cases, invariants, and the paper's orders."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.host_memory import HostMemory, host_peak
from helixrt.schedule.adaptation.replan import link_verdicts, replan
from helixrt.schedule.adaptation.replay import STRATEGIES, Strategy, replay
from helixrt.schedule.adaptation.stragglers import straggler_table
from helixrt.schedule.adaptation.trace import NicFailure, Straggler, Trace, read, table3
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op, Operation, Schedule
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.planner.slack import plan_for_slack
from helixrt.schedule.simulate import DELEGATED, Direct, makespan_ms, simulate

BOTH = [(3, 4), (4, 3)]


def slow_middle(costs: Costs, delay_ms: float) -> Costs:
    return with_delays(costs, dict.fromkeys(BOTH, delay_ms))


# The host's memory


def one_stage(microbatches: int) -> Schedule:
    order = [Operation(op, 0, m) for op in (Op.F, Op.BW) for m in range(microbatches)]
    return Schedule("one", 1, microbatches, (0,), (tuple(order),))


def test_copies_to_the_host_by_hand() -> None:
    """Room for two of three: the second goes out while the third waits for its room, and comes back when the first is done."""
    costs = Costs((0,), (10.0,), (10.0,), (10.0,), memory=(2.0,))
    host = HostMemory((1.0,), (0.1,))
    spans = simulate(one_stage(3), costs, DELEGATED, host).spans[0]
    assert [s.start_ms for s in spans] == [0, 10, 30, 40, 70, 90]
    assert host_peak(one_stage(3), costs, host) == (1.0,)
    with pytest.raises(ConfigError, match=r"costs.memory\[0\]=0.5: stage 0 needs more on the device"):
        simulate(one_stage(3), replace(costs, memory=(0.5,)), DELEGATED, host)


@pytest.mark.parametrize("seed", range(12))
def test_copies_cost_nothing_when_fast_and_never_help(seed: int) -> None:
    rng = random.Random(seed)
    stages, n = rng.randint(2, 5), rng.randint(5, 10)
    costs = replace(
        slow_links(rng, uniform(stages, *(rng.randint(1, 9) for _ in range(3)))),
        activation=tuple(rng.choice([1.0, 2.0]) for _ in range(stages)),
        kept=tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(stages)),
        memory=tuple(rng.choice([2.0, 3.0, 4.0, 100.0]) for _ in range(stages)),
    )
    schedule = policies.build(rng.choice(["gpipe", "1f1b", "zb-h2"]), costs, n)
    free_ms = makespan_ms(schedule, costs)
    hosts = [HostMemory((99.0,) * stages, (rate,) * stages) for rate in (1e12, 2.0, 0.1)]
    times = [makespan_ms(schedule, costs, DELEGATED, host) for host in hosts]
    assert times[0] == pytest.approx(free_ms)
    assert free_ms <= times[1] <= times[2]
    for most, away, cap in zip(peak_memory(schedule, costs), host_peak(schedule, costs, hosts[2]), costs.memory, strict=True):
        assert (away > 0) == (most > cap) and away >= most - cap
    roomy = replace(costs, memory=peak_memory(schedule, costs))
    assert makespan_ms(schedule, roomy, DELEGATED, hosts[2]) == free_ms


def slow_links(rng: random.Random, costs: Costs) -> Costs:
    ways = [(a, b) for a in range(costs.stages) for b in (a - 1, a + 1) if 0 <= b < costs.stages]
    return replace(costs, links={way: Link(rng.choice([0.0, 5.0]), rng.choice([0.0, 1.0])) for way in ways})


# Re-planning


def test_an_order_that_tolerates_stays_and_one_that_does_not_is_replaced() -> None:
    costs = uniform(8, 10, 10, 10)
    zb = policies.build("zb", costs, 32)
    mild = replan(zb, slow_middle(costs, 10))
    assert mild.tolerated and mild.by_equation and mild.schedule is zb and mild.gain_ms == 0
    hard = replan(zb, slow_middle(costs, 40))
    assert not hard.tolerated and not hard.by_equation
    assert [link.stage for link in hard.links if not link.tolerated] == [3]
    assert (hard.links[3].slack, hard.links[3].round_trip_ms, hard.links[3].budget_ms) == (2, 80, 20)
    check(hard.schedule)
    assert hard.current_ms == makespan_ms(zb, slow_middle(costs, 40))
    assert hard.makespan_ms == makespan_ms(hard.schedule, slow_middle(costs, 40)) >= hard.lower_bound_ms
    assert hard.gain_ms > 400 and hard.current_ms > 1.4 * hard.makespan_ms
    back = replan(hard.schedule, costs, known=[zb])
    assert back.makespan_ms <= 1030 * 1.01


def test_memory_has_two_tiers_and_copies_count() -> None:
    costs = replace(uniform(8, 10, 10, 10), memory=(8.0,) * 8)
    home = policies.build("helix", costs, 32)
    measured = slow_middle(costs, 40)
    device = replan(home, measured)
    assert max(device.peak_memory) <= 8 and device.host_peak == (0.0,) * 8
    fast = replan(home, measured, host=HostMemory((16.0,) * 8, (10.0,) * 8))
    assert max(fast.peak_memory) > 8 and max(fast.host_peak) <= 16
    slow = replan(home, measured, host=HostMemory((16.0,) * 8, (0.01,) * 8))
    assert slow.makespan_ms == device.makespan_ms and max(slow.host_peak) == 0
    assert fast.lower_bound_ms <= fast.makespan_ms < 0.9 * device.makespan_ms
    with pytest.raises(ConfigError, match="host=given"):
        replan(home, measured, comm=Direct(), host=HostMemory((16.0,) * 8, (1.0,) * 8))


def test_an_order_above_the_cap_is_never_kept() -> None:
    costs = uniform(4, 10, 10, 10)
    zb = policies.build("zb", costs, 12)
    found = replan(zb, replace(costs, memory=(4.0,) * 4))
    assert not found.fits and not found.tolerated and max(found.peak_memory) <= 4
    assert link_verdicts(policies.build("zbv", costs, 8), costs) == ()


@pytest.mark.parametrize("cap,tolerated_ms", [(float("inf"), 30), (12, 0)])
def test_planning_for_slack_costs_nothing_and_stands_more(cap: float, tolerated_ms: float) -> None:
    costs = uniform(8, 10, 10, 10, memory=cap)
    plain, slack = plan(costs, 32), plan_for_slack(costs, 32)
    check(slack.schedule)
    assert slack.makespan_ms == plain.makespan_ms == makespan_ms(slack.schedule, costs)
    assert slack.peak_memory == peak_memory(slack.schedule, costs) and max(slack.peak_memory) <= cap

    def slowest(schedule: Schedule, delay_ms: float) -> float:
        slowed = [with_delays(costs, {(i, i + 1): delay_ms, (i + 1, i): delay_ms}) for i in range(7)]
        return max(makespan_ms(schedule, one) for one in slowed)

    assert slowest(slack.schedule, 30) <= slowest(plain.schedule, 30)
    assert slowest(slack.schedule, tolerated_ms) == 1030 + tolerated_ms
    with pytest.raises(ConfigError, match="loss=-1"):
        plan_for_slack(costs, 32, loss=-1)


# Traces


def test_table_3_ships_as_the_paper_gives_it() -> None:
    trace = table3()
    assert (trace.stages, trace.iterations, len(trace.stragglers)) == (8, 1200, 9)
    assert trace.failures == (NicFailure(1030, 2),)
    assert trace.delays_ms(14) == {} == trace.delays_ms(86)
    assert trace.delays_ms(15) == {(2, 3): 30, (3, 2): 30} == trace.delays_ms(85)
    assert sum(trace.delays_ms(800).values()) == 6 * 40


EVENTS = '{"stages": 2, "iterations": 3, "events": [%s]}'


@pytest.mark.parametrize(
    "text,rule",
    [
        ('{"stages": 2,\n "iterations" 3}', "trace=line 2, column 15: is not JSON"),
        ("[]", "trace=list: must be an object"),
        ('{"stages": 0, "iterations": 3, "events": []}', "trace.stages=0"),
        ('{"stages": 2, "iterations": 3}', "trace.events=None"),
        (EVENTS % '{"first": 1}', r"trace.events\[0\]="),
        (EVENTS % '{"iteration": 3, "nic_failure": 0}', "below 3"),
        (EVENTS % '{"first": 1, "last": 3, "links": [[0, 1]], "delay_ms": 1}', "=1-3: must be"),
        (EVENTS % '{"first": 1, "last": 2, "links": [[0, 2]], "delay_ms": 1}', "below 2"),
        (EVENTS % '{"first": 1, "last": 2, "links": [0], "delay_ms": 1}', "pair of stages"),
        (EVENTS % '{"first": 1, "last": 2, "links": [[0, 1]], "delay_ms": -1}', "at least 0"),
        (EVENTS % '{"first": 1, "last": 2, "links": [[0, 1]], "delay_ms": "1"}', "must be a number"),
    ],
)
def test_a_wrong_trace_is_one_line(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        read(text)
    assert "\n" not in str(caught.value)


def test_detection_switches_and_restarts_take_effect_when_they_should() -> None:
    costs = uniform(4, 10, 10, 10)
    trace = Trace(4, 12, (Straggler(3, 7, ((1, 2),), 60.0),), (NicFailure(10, 1),))
    fixed = replay(trace, costs, 12, Strategy(name="fixed", policy="zb", comm=DELEGATED, restart_s=2.0))
    slowed = makespan_ms(policies.build("zb", costs, 12), with_delays(costs, {(1, 2): 60.0, (2, 1): 60.0}))
    assert list(fixed.iteration_ms) == [390.0] * 3 + [slowed] * 5 + [390.0] * 2 + [2390.0, 390.0]
    adaptive = replace(STRATEGIES[-1], detection_lag=2, switch_ms=7.0)
    adapted = replay(trace, costs, 12, adaptive)
    assert adapted.switches[0].iteration == 5
    assert adapted.iteration_ms[4] > adapted.iteration_ms[5] - 7.0 == adapted.iteration_ms[6]
    assert adapted.iteration_ms[10] <= 390.0 * 1.01
    assert adapted.total_s == pytest.approx(sum(adapted.iteration_ms) / 1e3)
    assert adapted.throughput()[0] == pytest.approx(12 / 0.39)
    with pytest.raises(ConfigError, match="strategy.policy=1f1b"):
        Strategy(name="x", policy="1f1b", comm=DELEGATED, adaptive=True)
    with pytest.raises(ConfigError, match="costs.stages=3"):
        replay(trace, uniform(3), 12, adaptive)


def test_the_papers_trace_in_the_stated_setting() -> None:
    results = {s.name: replay(table3(), uniform(8, 10, 10, 10), 32, s) for s in STRATEGIES}
    helix = results["helix"]
    assert results["zb"].total_s >= 1.41 * helix.total_s
    assert results["1f1b"].total_s >= 1.37 * helix.total_s
    assert helix.total_s <= results["adaptra"].total_s
    assert 1.0 <= helix.slowdown <= 1.05


def test_the_straggler_table_comes_out_as_in_figures_14_to_17() -> None:
    cells = straggler_table(uniform(8, 10, 10, 10), 32, delays_ms=(0.0, 30.0, 60.0))
    table = {(c.place.name, c.delay_ms, c.policy, c.comm): c for c in cells}
    assert all(c.slowdown == 1.0 for c in cells if not c.delay_ms)
    for place in ("first", "middle", "last", "three"):
        for delay_ms in (30.0, 60.0):

            def slowdown(policy: str, comm: str, key: tuple[str, float] = (place, delay_ms)) -> float:
                return table[*key, policy, comm].slowdown

            assert slowdown("zb", "direct") > slowdown("1f1b", "direct")  # the domino effect and blocking together
            assert slowdown("helix", "delegated") < slowdown("zb", "delegated") < slowdown("zb", "direct")
            assert slowdown("1f1b", "delegated") <= slowdown("1f1b", "direct")
            best = table[place, delay_ms, "helix", "delegated"].makespan_ms
            assert best <= table[place, delay_ms, "adaptra", "delegated"].makespan_ms
            assert best < table[place, delay_ms, "1f1b", "delegated"].makespan_ms
            assert slowdown("helix", "delegated") <= (1.07 if place != "three" else 1.2)
