"""What the estimator finds is what went into a simulated replica: noise, outliers, clocks seconds apart that drift."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.observe.estimates import MeasuredCosts
from helixrt.observe.estimator import Estimator, place_of
from helixrt.observe.samples import Stamped, flow_sample
from helixrt.observe.stragglers import stragglers
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op, Schedule, linear, operations_of
from tests.observe.measured_world import World

SEEDS = range(6)


def some_costs(seed: int, placement: tuple[int, ...], least_ms: float = 5.0) -> Costs:
    draw = random.Random(seed)
    chunks, stages = len(placement), max(placement) + 1

    def times() -> tuple[float, ...]:
        return tuple(draw.uniform(least_ms, 4 * least_ms) for _ in range(chunks))

    ways = [(a, b) for a in range(stages) for b in range(stages) if abs(a - b) == 1]
    links = {way: Link(draw.choice((0.0, 0.2, 3.0)), 0.0) for way in ways}
    return Costs(placement, times(), times(), times(), links)


def zb(costs: Costs, microbatches: int = 12) -> Schedule:
    return policies.build("zb", costs, microbatches)


def measured(world: World, steps: int = 10) -> MeasuredCosts:
    found = world.estimator(steps).estimates()
    assert found is not None
    return found


def assert_times_are(found: Costs, spread: Costs, true: Costs, name: str, within: float) -> None:
    for got, sure, real in zip(getattr(found, name), getattr(spread, name), getattr(true, name), strict=True):
        assert abs(got - real) <= within * real + 0.05, f"{name}: {found} for {true}"
        assert sure <= 0.1 * real, f"{name}: the uncertainty {sure} says nothing of {real}"


@pytest.mark.parametrize("seed", SEEDS)
def test_times_of_operations_are_found_under_noise_and_outliers(seed: int) -> None:
    true = some_costs(seed, linear(4))
    found = measured(World(zb(true), lambda step: true, seed))
    assert found.placement == true.placement and found.microbatches == 12 and found.step == 10
    for name in ("forward", "backward", "weight"):
        assert_times_are(found.costs(), found.spread(), true, name, within=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_delays_are_found_within_their_uncertainty_when_clocks_are_seconds_apart_and_drift(seed: int) -> None:
    true = some_costs(seed, linear(4))
    found = measured(World(zb(true), lambda step: true, seed))
    assert found.links.keys() == {(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)}
    for way, link in found.links.items():
        error_ms = abs(link.delay.value_ms - true.link(*way).delay_ms)
        assert error_ms <= link.delay.uncertainty_ms + 0.1, f"seed {seed}, {way}: {link} for {true.link(*way)}"
    for low, high in ((0, 1), (1, 2), (2, 3)):  # there and back no clock matters
        both = sum(found.links[way].total_ms for way in ((low, high), (high, low)))
        real = sum(true.link(*way).delay_ms for way in ((low, high), (high, low)))
        assert abs(both - real) <= 0.4, f"seed {seed}: {both} ms there and back for {real}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_delay_one_way_is_told_from_the_clocks_if_the_link_was_quiet_before(seed: int) -> None:
    calm = with_delays(some_costs(seed, linear(4)), {(a, b): 0.1 for a in range(4) for b in range(4) if abs(a - b) == 1})
    slow = with_delays(calm, {(1, 2): 60.0})
    world = World(zb(calm), lambda step: slow if 20 <= step < 60 else calm, seed)
    estimator = Estimator()
    known: dict[int, MeasuredCosts] = {}
    for times in world.times(70):
        estimator.add(times)
        if (found := estimator.estimates()) is not None:
            known[times.step] = found
    assert known[19].links[1, 2].delay.value_ms < 1.0
    link = known[22].links[1, 2]
    assert abs(link.delay.value_ms - 60) < 1.0 and link.delay.uncertainty_ms < 2.0, link
    assert known[22].links[2, 1].delay.value_ms < 1.0
    assert abs(known[55].links[1, 2].delay.value_ms - 60) < 5.0, known[55].links
    assert known[63].links[1, 2].delay.value_ms < 5.0
    steps = [shift.change.step for shift in estimator.shifts if shift.key == (1, 2)]
    assert steps == [20, 60], estimator.shifts
    assert not [shift for shift in estimator.shifts if shift.what == "op"]


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_of_one_host_need_no_offset(seed: int) -> None:
    true = with_delays(some_costs(seed, linear(4)), {(1, 2): 60.0})
    found = measured(World(zb(true), lambda step: true, seed, one_host=True))
    link = found.links[1, 2]
    assert abs(link.delay.value_ms - 60) < 0.3 and link.delay.uncertainty_ms < 0.1 and link.offset_ms == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_without_arrival_stamps_what_nobody_waited_for_is_an_upper_bound(seed: int) -> None:
    true = some_costs(seed, linear(4))
    found = measured(World(zb(true), lambda step: true, seed, stamped=False, one_host=True), steps=20)
    assert len(found.links) == 6
    for way, link in found.links.items():
        delay_ms = true.link(*way).delay_ms
        if link.upper_bound:
            assert link.delay.value_ms >= delay_ms - 0.1
            assert link.delay.value_ms - link.delay.uncertainty_ms <= delay_ms
        else:
            assert abs(link.delay.value_ms - delay_ms) < 0.3, f"seed {seed}, {way}: {link} for {delay_ms}"


def test_without_arrival_stamps_a_link_that_holds_the_next_stage_up_is_measured() -> None:
    true = with_delays(uniform(4, 10.0, 10.0, 10.0), {(1, 2): 60.0})
    found = measured(World(zb(true), lambda step: true, stamped=False, one_host=True), steps=20)
    link = found.links[1, 2]
    assert not link.upper_bound and link.delay.value_ms == pytest.approx(60.0, abs=0.5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rate_of_a_link_is_found_where_messages_queue(seed: int) -> None:
    true = uniform(4, 5.0, 5.0, 5.0)
    true = replace(true, links={(1, 2): Link(2.0, 25.0), (2, 1): Link(2.0, 0.0)})
    found = measured(World(zb(true, 16), lambda step: true, seed, one_host=True))
    link = found.links[1, 2]
    assert link.wire.value_ms == pytest.approx(25.0, rel=0.03) and link.delay.value_ms == pytest.approx(2.0, abs=1.0)
    assert link.rate_mbit == pytest.approx(1000 * 8e-3 / 25.0, rel=0.03)
    assert found.links[2, 1].rate_mbit is None and found.links[2, 1].delay.value_ms == pytest.approx(2.0, abs=0.3)


def shared_link(rng: random.Random, count: int, wire_ms: float, delay_ms: float, unfair: float) -> list[Stamped]:
    """Messages of two queues that take turns, and share a link: each queue has its part of the rate while both have messages,
    the first one `unfair` of it."""
    begin_ms = [rng.uniform(0.0, 0.3) * wire_ms * i for i in range(count)]
    left = {i: wire_ms for i in range(count)}
    arrived, now = {}, 0.0
    while left:
        heads = [min(waiting) for first in (0, 1) if (waiting := [i for i in left if i % 2 == first and begin_ms[i] <= now])]
        coming = min([begin_ms[i] for i in left if begin_ms[i] > now], default=math.inf)
        if not heads:
            now = coming
            continue
        parts = [1.0] if len(heads) == 1 else [unfair, 1.0 - unfair]
        until = min([coming, *(now + left[i] / part for i, part in zip(heads, parts, strict=True))])
        for i, part in zip(heads, parts, strict=True):
            left[i] -= part * (until - now)
            if left[i] < 1e-9:
                arrived[i] = until + delay_ms
                del left[i]
        now = until
    return [Stamped(begin_ms[i] * 1e-3, (arrived[i] + rng.gauss(0.0, 0.05)) * 1e-3, True) for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_rate_of_a_link_is_found_where_queues_share_it(seed: int) -> None:
    """A burst takes what the link says, and one more message nearly so."""
    rng = random.Random(seed)
    count, wire_ms, delay_ms = rng.randint(5, 16), rng.uniform(5.0, 50.0), rng.choice((0.0, 1.0, 5.0))
    offset_s = rng.choice((-7.0, 0.0, 3.0))  # of the receiver's clock
    sent = shared_link(rng, count, wire_ms, delay_ms, rng.uniform(0.3, 0.7))
    messages = [m._replace(arrived_s=m.arrived_s + offset_s) for m in sent]
    found = flow_sample(messages, 1000)
    assert found.wire.size and found.wire.median == pytest.approx(wire_ms, rel=0.25)
    burst_ms = (max(m.arrived_s for m in messages) - messages[0].sent_s) * 1e3
    assert abs(found.delay.median + count * found.wire.median - burst_ms) < 0.1 * count * wire_ms


@pytest.mark.parametrize("seed", range(20))
def test_delays_that_vary_are_no_rate(seed: int) -> None:
    rng = random.Random(seed)
    messages = []
    for i in range(rng.randint(5, 16)):
        sent_s = 0.01 * i + rng.gauss(0.0, 1e-4)
        messages.append(Stamped(sent_s, sent_s + 0.06 + abs(rng.gauss(0.0, rng.choice((0.0, 1e-3)))), True))
    assert not flow_sample(messages, 1000).wire.size


def test_a_pure_delay_with_many_messages_under_way_is_no_rate() -> None:
    true = with_delays(uniform(4, 10.0, 10.0, 10.0), {(0, 1): 100.0, (1, 0): 100.0})
    found = measured(World(policies.build("helix", true, 16), lambda step: true, one_host=True))
    assert found.links[0, 1].rate_mbit is None
    assert found.links[0, 1].delay.value_ms == pytest.approx(100.0, abs=0.5)


@pytest.mark.parametrize("policy", ["zbv", "interleaved", "dualpipev"])
def test_several_chunks_a_stage_and_woven_pairs_are_measured(policy: str) -> None:
    linear_costs = uniform(4, 10.0, 12.0, 8.0)
    true = policies.costs_for(policy, linear_costs)
    schedule = policies.build(policy, linear_costs, 8)
    true = replace(true, pair_factor=0.8)
    found = measured(World(schedule, lambda step: true, 3, one_host=True))
    assert found.placement == schedule.placement
    assert found.costs().forward == pytest.approx(true.forward, rel=0.03)
    pairs = {entry for entries in schedule.entries for entry in entries if not hasattr(entry, "op")}
    assert len(found.pairs) == len({(p.forward.chunk, p.backward.op, p.backward.chunk) for p in pairs})
    for (f, op, b), estimate in found.pairs.items():
        both = true.forward[f] + true.backward[b] + (true.weight[b] if op is Op.BW else 0.0)
        assert estimate.value_ms == pytest.approx(0.8 * both, rel=0.05)
    per_stage = found.costs(linear(4))
    assert per_stage.forward == pytest.approx(linear_costs.forward, rel=0.03)


def on_stage_2(times: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(ms * (1.5 if stage == 2 else 1.0) for stage, ms in enumerate(times))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_stage_is_a_change_of_its_operations_and_of_no_link(seed: int) -> None:
    calm = some_costs(seed, linear(4))
    slowed = replace(
        calm,
        forward=on_stage_2(calm.forward),
        backward=on_stage_2(calm.backward),
        weight=on_stage_2(calm.weight),
    )
    estimator = World(zb(calm), lambda step: slowed if step >= 20 else calm, seed).estimator(30)
    assert {(shift.what, shift.key) for shift in estimator.shifts} == {("op", (op, 2)) for op in (Op.F, Op.B, Op.W)}
    assert {shift.change.step for shift in estimator.shifts} == {20}
    found = estimator.estimates()
    assert found is not None and found.costs().forward[2] == pytest.approx(1.5 * calm.forward[2], rel=0.03)
    assert found.since == {(op, 2): 20 for op in (Op.F, Op.B, Op.W)}


def test_a_single_slow_step_is_no_change() -> None:
    calm = uniform(4, 10.0, 10.0, 10.0)
    paused = replace(calm, forward=(40.0,) * 4, backward=(30.0,) * 4)
    estimator = World(zb(calm), lambda step: paused if step in (1, 7, 15) else calm).estimator(20)
    assert not estimator.shifts
    found = estimator.estimates()
    assert found is not None and found.costs().forward == pytest.approx(calm.forward, rel=0.02)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clock_that_is_set_to_another_time_is_followed(seed: int) -> None:
    true = with_delays(uniform(4, 10.0, 10.0, 10.0), {(0, 1): 2.0, (1, 0): 2.0, (1, 2): 2.0, (2, 1): 2.0})
    world = World(zb(true), lambda step: true, seed, skewed=lambda step: -3.0 if step >= 12 else 0.0)
    found = measured(world, steps=24)
    for way in ((0, 1), (1, 0), (1, 2), (2, 1)):
        link = found.links[way]
        assert abs(link.delay.value_ms - 2.0) <= link.delay.uncertainty_ms + 0.3 <= 8.0, f"{way}: {link}"


def test_costs_take_what_was_not_measured_from_others() -> None:
    true = uniform(3, 10.0, 12.0, 8.0, memory=5.0)
    world = World(policies.build("1f1b", true, 6), lambda step: true, one_host=True)  # whole backwards
    found = measured(world)
    assert (Op.BW, 0) in found.operations and (Op.B, 0) not in found.operations
    assert found.costs().backward == pytest.approx((10.0,) * 3, rel=0.05)
    told = found.costs(base=true)
    assert told.backward == pytest.approx((12.0,) * 3, rel=0.05) and told.memory == true.memory
    assert told.weight == pytest.approx((8.0,) * 3, rel=0.05)
    with pytest.raises(ConfigError, match="must be the one measured"):
        found.costs(base=uniform(4))
    lacking = replace(found, operations={key: value for key, value in found.operations.items() if key != (Op.F, 1)})
    with pytest.raises(ConfigError, match="F of chunk 1: was not measured"):
        lacking.costs()
    assert lacking.costs(base=true).forward[1] == 10.0


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_return_to_whole_backwards_their_times_count(seed: int) -> None:
    """An order of B and W ran for some steps; a stage becomes slower when the order of whole backwards runs again."""
    calm = replace(some_costs(seed, linear(4)), links={})
    slowed = replace(calm, forward=on_stage_2(calm.forward), backward=on_stage_2(calm.backward), weight=on_stage_2(calm.weight))
    whole = policies.build("1f1b", calm, 12)
    world = World(whole, lambda step: slowed if step >= 40 else calm, seed)
    estimator = Estimator()
    for order, begin, end in ((whole, 1, 10), (zb(calm), 11, 30), (whole, 31, 60)):
        world.schedule = order
        for times in world.times(end, begin):
            estimator.add(times)
    found = estimator.estimates()
    assert found is not None and {op for op, _ in found.operations} == {Op.F, Op.B, Op.W, Op.BW}
    for base in (None, uniform(4)):
        for name in ("forward", "backward", "weight"):  # a whole backward divides as B and W were measured
            assert_times_are(found.costs(base=base), found.spread(base=base), slowed, name, within=0.05)
    (slow,) = [each for each in stragglers(found, estimator.shifts) if "before step 40" in each.why]
    assert slow.stage == 2 and "1.5 times" in slow.why.replace("1.50", "1.5").replace("1.49", "1.5").replace("1.51", "1.5")


def test_pairs_that_run_no_more_are_left_out() -> None:
    true = replace(policies.costs_for("dualpipev", uniform(4, 10.0, 12.0, 8.0)), pair_factor=0.8)
    woven = policies.build("dualpipev", uniform(4, 10.0, 12.0, 8.0), 8)
    apart = replace(woven, entries=[[o for entry in entries for o in operations_of(entry)] for entries in woven.entries])
    world = World(woven, lambda step: true, 3, one_host=True)
    estimator = world.estimator(8)
    before = estimator.estimates()
    assert before is not None and set(before.costs().pair_ms) == set(before.pairs) != set()
    world.schedule = apart
    for times in world.times(12, 9):
        estimator.add(times)
    found = estimator.estimates()
    assert found is not None and not found.costs().pair_ms and not found.spread().pair_ms
    told = found.costs(base=replace(true, pair_ms={(0, Op.B, 7): 21.0}))
    assert told.pair_ms == {(0, Op.B, 7): 21.0}


def test_nothing_is_said_before_every_stage_was_heard() -> None:
    true = uniform(3)
    estimator = Estimator(stages=3)
    for times in World(zb(true), lambda step: true).times(2):
        if times.rank != "r0.pp2":
            estimator.add(times)
    assert estimator.estimates() is None


def test_ranks_that_share_a_stage_count_as_the_slowest() -> None:
    true = uniform(2, 10.0, 10.0, 10.0)
    estimator = Estimator()
    for factor, lane in ((1.0, ""), (1.3, ".tp1")):
        slow = uniform(2, 10.0 * factor, 10.0, 10.0)
        for times in World(zb(true), lambda step, slow=slow: slow, one_host=True).times(6):  # type: ignore[misc]
            estimator.add(replace(times, rank=times.rank + lane))
    found = estimator.estimates()
    assert found is not None and found.costs().forward == pytest.approx((13.0, 13.0), rel=0.03)
    assert place_of("r3.pp2.dp1.tp1") == ("dp1.tp1", 2)
