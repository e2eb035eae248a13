"""The policy that changes a running job's order: it switches when that pays, returns, and does no harm when nothing is sure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.judge import CostEstimate, Question, judge
from helixrt.schedule.adaptation.policy import Adaptation, Ask, Decision, OrderPolicy, Stay, Switch
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.exchange.as_json import key_of, order_key, order_text, read
from helixrt.schedule.generators import policies
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Schedule
from helixrt.schedule.simulate import makespan_ms
from tests.schedule.order_world import Delays, OrderWorld, both

COSTS = uniform(4, 10.0, 10.0, 10.0)
SLOW = with_delays(COSTS, both(1, 60.0))
NONE = uniform(4, 0.0, 0.0, 0.0)
ZB = build("zb", 4, 12)


def exact(costs: Costs) -> CostEstimate:
    return CostEstimate(costs, NONE)


def ask(policy: OrderPolicy, step: int, costs: Costs) -> Decision:
    """What the policy decides after the planner's answer, if it asks."""
    decision = policy.observed(step, exact(costs))
    return policy.answered(step, judge(decision.question)) if isinstance(decision, Ask) else decision


def steady(policy: OrderPolicy, first: int, last: int, costs: Costs) -> None:
    for step in range(first, last + 1):
        assert isinstance(ask(policy, step, costs), Stay)


@pytest.mark.parametrize("name", policies.POLICIES)
def test_an_order_is_named_by_what_it_is_and_comes_back_from_its_text(name: str) -> None:
    made = build(name, 4, 8)
    text = order_text(made)
    again = read(text, "again")
    assert (again.entries, again.placement, again.microbatches) == (made.entries, made.placement, made.microbatches)
    assert order_key(again) == order_key(made) == key_of(text)
    other = build("gpipe" if name != "gpipe" else "1f1b", 4, 8)
    assert order_key(other) != order_key(made)


@pytest.mark.parametrize("start", [0, 50_000])
def test_a_replica_that_starts_again_late_counts_no_steps_of_before(start: int) -> None:
    """Its order is somewhat slower than the first one when it starts, and quicker later."""
    other, slower = build("gpipe", 4, 12), replace(COSTS, backward=(10.0, 10.0, 10.0, 14.0))
    assert makespan_ms(ZB, slower) < makespan_ms(other, slower)
    policy = OrderPolicy(ZB, Adaptation(), 100_000, in_use=other)
    decision = ask(policy, start + 1, slower)
    assert policy.lost_ms == 0.0 and "more was lost" not in str(decision)
    ask(policy, start + 11, slower)
    assert policy.lost_ms == pytest.approx(10 * (makespan_ms(other, slower) - makespan_ms(ZB, slower)), rel=0.01)


def once(step: int) -> Delays:
    return both(1, 60.0) if 20 <= step < 60 else {}


@pytest.mark.parametrize("seed", range(3))
def test_under_noise_the_order_changes_within_three_steps_and_comes_back(seed: int) -> None:
    found = OrderWorld(seed, ZB, once, steps=80).run()
    slow = found.orders[23:59]  # of steps 24 to 59
    assert order_key(ZB) not in slow and found.orders[65:] == [order_key(ZB)] * 15
    assert len(found.switches) == 2 and found.slowdown < 0.8


def test_a_slow_link_changes_the_order_to_the_proven_best_and_its_end_brings_the_first_one_back() -> None:
    found = OrderWorld(0, ZB, once, steps=80, noise=0.0, outliers=0.0).run()
    (away, there), (back, home) = found.switches
    assert (away, back) == (21, 61)  # noticed in the step, answered one later
    assert makespan_ms(there.order, SLOW) == 450.0 and makespan_ms(ZB, SLOW) == 790.0  # the bound is 450
    assert there.gain_ms == pytest.approx(340.0, rel=0.1) and "slower than the order tolerates" in there.why
    assert home.key == order_key(ZB) and "of before" in home.why
    check(there.order)
    assert found.orders[20] == home.key and set(found.orders[21:61]) == {there.key} and set(found.orders[61:]) == {home.key}


def test_nothing_is_asked_within_the_band_and_once_beyond_it() -> None:
    policy = OrderPolicy(ZB, Adaptation(), 0)
    steady(policy, 1, 5, COSTS)
    policy = OrderPolicy(ZB, Adaptation(), 0)
    assert isinstance(ask(policy, 1, COSTS), Stay)
    within = with_delays(COSTS, both(0, 1.9))  # a tenth of F and B is 2 ms
    assert isinstance(policy.observed(2, exact(within)), Stay)
    wide = with_delays(NONE, both(1, 25.0))  # 60 ms are less than three spreads
    assert isinstance(policy.observed(3, CostEstimate(SLOW, wide)), Stay)
    decision = policy.observed(4, exact(SLOW))
    assert isinstance(decision, Ask) and "a message from stage 1 to 2 went from 0 to 60 ms" in decision.why
    assert policy.observed(5, exact(SLOW)) == Stay("the planner is asked")


def test_a_switch_must_pay_in_the_steps_that_are_left() -> None:
    """340 ms a step against 1.5 times 500 ms: three steps pay, two do not."""
    for left, pays in ((2, False), (3, True)):
        policy = OrderPolicy(ZB, Adaptation(loss_share=1.0), 50)
        steady(policy, 1, 49 - left, COSTS)
        assert isinstance(ask(policy, 50 - left, SLOW), Switch) is pays


def test_what_the_last_switch_took_counts_for_the_next_and_a_ready_order_is_free() -> None:
    policy = OrderPolicy(ZB, Adaptation(loss_share=1.0), 200)
    steady(policy, 1, 9, COSTS)
    there = ask(policy, 10, SLOW)
    assert isinstance(there, Switch)
    policy.switched(11, there.key, took_ms=9000.0)
    steady(policy, 12, 29, SLOW)
    back = ask(policy, 30, COSTS)
    assert isinstance(back, Switch) and back.key == order_key(ZB)
    policy.switched(31, back.key, took_ms=0.0)
    elsewhere = with_delays(COSTS, {**both(0, 60.0), **both(2, 60.0)})
    decision = ask(policy, 45, elsewhere)
    if isinstance(decision, Switch):  # the ready one does as well there
        assert decision.key == there.key
    else:
        assert isinstance(decision, Stay) and "do not pay for 9e+03 ms" in decision.why
    again = ask(policy, 50, SLOW)
    assert isinstance(again, Switch) and again.key == there.key


def test_an_order_that_a_rank_cannot_run_is_never_proposed_again() -> None:
    policy = OrderPolicy(ZB, Adaptation(), 0)
    steady(policy, 1, 30, COSTS)
    first = ask(policy, 31, SLOW)
    assert isinstance(first, Switch)
    policy.refuse(first.key, 10.0)
    for step in range(32, 60):
        decision = ask(policy, step, with_delays(COSTS, both(1, 60.0 + 10 * (step % 2))))
        assert not isinstance(decision, Switch) or decision.key != first.key
        if isinstance(decision, Switch):
            policy.refuse(decision.key, 0.0)


def test_a_switch_that_could_not_be_made_and_an_answer_that_never_came_are_tried_again() -> None:
    policy = OrderPolicy(ZB, Adaptation(), 0)
    steady(policy, 1, 30, COSTS)
    assert isinstance(policy.observed(31, exact(SLOW)), Ask)
    policy.unanswered()
    first = ask(policy, 32, SLOW)
    assert isinstance(first, Switch)
    policy.postpone()
    again = ask(policy, 33, SLOW)
    assert isinstance(again, Switch) and again.key == first.key


def test_a_replica_that_starts_again_goes_on_with_its_order_and_can_return_to_the_first_one() -> None:
    other = judge(Question(exact(SLOW), ZB)).timed[-1].order
    policy = OrderPolicy(ZB, Adaptation(), 0, in_use=other)
    assert policy.in_use == order_key(other) and policy.first == order_key(ZB)
    steady(policy, 40, 45, SLOW)
    gpipe = build("gpipe", 4, 12)  # far slower than the first order under all costs
    slower = OrderPolicy(ZB, Adaptation(), 0, in_use=gpipe)
    decision = ask(slower, 40, COSTS)
    assert isinstance(decision, Switch) and decision.predicted_ms == makespan_ms(ZB, COSTS)


@pytest.mark.parametrize("resumed", [True, False])
def test_the_first_order_comes_back_although_nobody_knows_any_more_what_it_was_chosen_for(resumed: bool) -> None:
    """Of a replica that starts again while a link is slow, and of a run whose link was slow from the beginning: the two orders
    take the same time when the link has recovered."""
    other = judge(Question(exact(SLOW), ZB)).timed[-1].order
    assert makespan_ms(other, COSTS) == makespan_ms(ZB, COSTS)
    policy = OrderPolicy(ZB, Adaptation(switch_ms=1.0), 0, in_use=other if resumed else None)
    if resumed:
        steady(policy, 40, 49, SLOW)
    else:
        away = next(d for step in range(40, 45) if isinstance(d := ask(policy, step, SLOW), Switch))
        policy.switched(45, away.key, 1.0)
        steady(policy, 46, 49, SLOW)
    back = ask(policy, 50, COSTS)
    assert isinstance(back, Switch) and back.key == order_key(ZB) and back.gain_ms == 0.0
    policy.switched(51, back.key, 0.0)
    steady(policy, 52, 70, COSTS)


@pytest.mark.parametrize("dwell", [3, 1000])
def test_more_loss_than_allowed_ends_with_the_first_order_also_where_the_order_was_just_changed(dwell: int) -> None:
    rules = Adaptation(least_gain=0.5, dwell=dwell)  # so nothing but the account leads to a switch
    policy = OrderPolicy(ZB, rules, 1000, in_use=build("1f1b", 4, 12))
    policy.known[policy.first] = replace(policy.known[policy.first], chosen_for=exact(SLOW))
    policy.switched(0, policy.in_use, 0.0)
    allowed = rules.loss_share * 1000 * makespan_ms(ZB, COSTS)
    lost_ms = makespan_ms(build("1f1b", 4, 12), COSTS) - makespan_ms(ZB, COSTS)
    assert lost_ms > 0
    full = math.ceil(allowed / lost_ms)
    steady(policy, 1, full - 1, COSTS)
    decision = next(d for step in range(full, full + 3) if isinstance(d := ask(policy, step, COSTS), Switch))
    assert decision.key == order_key(ZB) and decision.why == "more was lost than allowed"


def test_the_first_order_stays_known_when_a_rank_cannot_make_it_ready_again() -> None:
    policy = OrderPolicy(ZB, Adaptation(), 0, in_use=build("gpipe", 4, 12))
    back = ask(policy, 40, COSTS)
    assert isinstance(back, Switch) and back.key == policy.first
    policy.refuse(policy.first, 1.0)
    policy.lost_ms = 1e9
    for step in range(41, 60):
        decision = ask(policy, step, with_delays(COSTS, both(1, 10.0 * (step % 2))))
        assert not isinstance(decision, Switch) or decision.key != policy.first
        policy.postpone()


def test_half_as_long_again_as_the_rehearsal_is_counted_until_a_switch_was_made() -> None:
    """Three steps are left, 340 ms a step: 1.5 times 600 ms pay, 1.5 times 750 ms do not."""
    for rehearsed_ms, pays in ((400.0, True), (500.0, False)):
        policy = OrderPolicy(ZB, Adaptation(loss_share=1.0), 50)
        policy.rehearsed(rehearsed_ms)
        steady(policy, 1, 46, COSTS)
        assert isinstance(ask(policy, 47, SLOW), Switch) is pays


@pytest.mark.parametrize(
    ("key", "value", "least"), [("dwell", 0, 1), ("payback", 0.5, 1), ("least_gain", -0.1, 0), ("switch_ms", math.inf, 0)]
)
def test_rules_out_of_their_range_are_refused(key: str, value: float, least: int) -> None:
    with pytest.raises(ConfigError, match=rf"schedule.adaptation.{key}={value}: must be a number, at least {least}"):
        Adaptation(**{key: value})


# Wrong estimates do no harm


def flapping(rng: random.Random, stages: int, period: int) -> Callable[[int], Delays]:
    """A link is slow for `period` steps, none is for as many, then another one."""
    spells = [both(rng.randrange(stages - 1), 10.0 * rng.choice((1, 2, 4, 6))) for _ in range(100)]
    return lambda step: spells[step // (2 * period)] if (step // period) % 2 else {}


def world(seed: int) -> OrderWorld:
    """Delays that flap every 5 steps, noisy stamps, clocks that drift; answers come late, switches cost up to several steps."""
    rng = random.Random(seed)
    microbatches = rng.choice((6, 8))
    first: Schedule = build(rng.choice(("1f1b", "zb", "zb-h1", "adaptra", "helix")), 4, microbatches)
    costs = uniform(4, 10.0, 10.0, 10.0)
    if rng.random() < 0.5:  # caps make the orders for slow links slower without them
        costs = replace(costs, memory=(float(rng.randint(4, 6)),) * 4)
        first = policies.build("helix", costs, microbatches)
    return OrderWorld(
        seed,
        first,
        flapping(rng, 4, 5),
        steps=100,
        noise=rng.choice((0.01, 0.03, 0.06)),
        offset_ms=rng.choice((0.0, 0.3, 2.0)),
        lag=rng.randrange(3),
        ready_ms=rng.choice((0.0, 100.0, 500.0, 1500.0)),
        costs=costs,
    )


def no_harm(seed: int) -> None:
    found = world(seed).run()
    assert len(found.switches) <= 8, f"seed {seed}: {len(found.switches)} switches in 100 steps"
    assert found.slowdown <= 1.03, f"seed {seed}: {found.slowdown:.3f} times the fixed order"


@pytest.mark.parametrize("part", range(3))
def test_flapping_delays_and_noise_do_no_harm(part: int) -> None:
    for seed in range(8 * part, 8 * part + 8):
        no_harm(seed)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("part", range(20))
def test_flapping_delays_and_noise_do_no_harm_in_a_thousand_seeds(part: int) -> None:
    for seed in range(50 * part, 50 * part + 50):
        no_harm(seed)


def test_the_same_inputs_give_the_same_decisions() -> None:
    one, other = world(5).run(), world(5).run()
    assert one == other
