"""Shadow prices are what a simulation of the changed costs saves: everywhere, and to the ms; replanned ones are bracketed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.instances import random_instance
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.planner.prices import Kind, Price, more_memory, prices, replanned
from helixrt.schedule.simulate import DELEGATED, Comm, Direct, makespan_ms
from tests.schedule.folded_instances import random_folded_instance

EXACT = 1e-9  # relative


def cheaper(costs: Costs, price: Price, off_ms: float) -> Costs:
    """The same change of costs, written down from what a place's name means."""
    kind, _, where = price.place.partition(" ")
    if price.kind is Kind.LINK:
        a, b = map(int, where.split(">"))
        now = costs.link(a, b)
        faster = Link(now.delay_ms - off_ms, now.wire_ms) if kind == "link" else Link(now.delay_ms, now.wire_ms - off_ms)
        return replace(costs, links={**costs.links, (a, b): faster})
    number = int(where.split()[-1])
    if price.kind is Kind.OPERATION:
        name = {"F": "forward", "B": "backward", "W": "weight"}[kind]
        values = list(getattr(costs, name))
        values[number] -= off_ms
        return replace(costs, **{name: tuple(values)})
    share = 1 - off_ms / price.now_ms
    of_stage = [share if home == number else 1.0 for home in costs.placement]
    times = {
        name: tuple(v * s for v, s in zip(getattr(costs, name), of_stage, strict=True))
        for name in ("forward", "backward", "weight")
    }
    pairs = {key: ms * of_stage[key[0]] for key, ms in costs.pair_ms.items()}
    return replace(costs, **times, pair_ms=pairs)


def instance(seed: int) -> tuple[Costs, int]:
    costs, microbatches = (random_folded_instance if seed % 3 == 0 else random_instance)(seed)
    draw = random.Random(seed)
    links = {way: replace(link, wire_ms=float(draw.randint(0, 9))) for way, link in costs.links.items()}
    return replace(costs, links=links, pair_factor=draw.choice([1.0, 0.8])), min(microbatches, 10)


@pytest.mark.grid
@pytest.mark.parametrize("comm", [DELEGATED, Direct(1), Direct(2)])
@pytest.mark.parametrize("seed", range(4))
def test_a_price_is_what_a_simulation_saves(seed: int, comm: Comm) -> None:
    costs, microbatches = instance(seed)
    order = plan(costs, microbatches, effort=0.02).schedule
    step_ms, draw = makespan_ms(order, costs, comm), random.Random(seed)
    found = prices(order, costs, comm)
    assert {Kind.STAGE, Kind.OPERATION} <= {price.kind for price in found}
    for price in found:
        assert price.pieces[-1].upto_ms == price.now_ms
        assert all(a.per_ms > b.per_ms and a.upto_ms < b.upto_ms for a, b in zip(price.pieces, price.pieces[1:], strict=False))
        for off_ms in (0.0, price.holds_ms, *(draw.uniform(0, price.now_ms * (1 - EXACT)) for _ in range(4))):
            simulated_ms = makespan_ms(order, cheaper(costs, price, min(off_ms, price.now_ms * (1 - EXACT))), comm)
            assert price.saved_ms(off_ms) == pytest.approx(step_ms - simulated_ms, abs=1e-7 * step_ms), (price.place, off_ms)


@pytest.mark.parametrize("seed", range(1, 12, 2))
def test_prices_of_one_critical_path_add_up_to_the_step(seed: int) -> None:
    """With odd times there is one path: a step is the sum of its operations and delays, each as often as it is on the path."""
    draw = random.Random(seed)
    costs, microbatches = random_instance(seed)
    jitter: Callable[[float], float] = lambda ms: ms + draw.random()  # noqa: E731
    costs = replace(
        costs,
        forward=tuple(map(jitter, costs.forward)),
        backward=tuple(map(jitter, costs.backward)),
        weight=tuple(map(jitter, costs.weight)),
        links={way: Link(jitter(link.delay_ms), 0.0) for way, link in costs.links.items()},
    )
    order = plan(costs, microbatches, effort=0.02).schedule
    found = [price for price in prices(order, costs) if price.kind is not Kind.STAGE]
    assert all(price.per_ms == int(price.per_ms) for price in found)
    assert sum(price.per_ms * price.now_ms for price in found) == pytest.approx(makespan_ms(order, costs))


def test_by_hand() -> None:
    """Figure 5 of ADAPTRA: 20 ms on the first link of zb. The last 10 ms of it cost 40, the first 10 ms cost 10."""
    costs = uniform(4, 10, 10, 10)
    order = policies.build("zb", costs, 12)
    slow = with_delays(costs, {(0, 1): 10.0, (1, 0): 20.0})
    (back,) = [price for price in prices(order, slow) if price.place == "link 1>0"]
    alone = makespan_ms(order, slow)
    assert back.saved_ms(0) == 0 and back.saved_ms(20) == alone - makespan_ms(order, with_delays(costs, {(0, 1): 10.0}))
    assert [price.place for price in prices(order, costs) if price.kind is Kind.LINK] == []  # free links have nothing to take
    with pytest.raises(ConfigError, match="link 1>0 off_ms=21: must be 0 to what it takes, 20 ms"):
        back.saved_ms(21)


def test_measured_pairs_shrink_with_their_stage() -> None:
    costs = replace(uniform(2, 10, 10, 10), pair_ms={(0, Op.BW, 0): 22.0, (1, Op.BW, 1): 21.0})
    order = plan(costs, 6, effort=0.05).schedule
    for price in prices(order, costs):
        saved_ms = makespan_ms(order, costs) - makespan_ms(order, cheaper(costs, price, price.now_ms / 2))
        assert price.saved_ms(price.now_ms / 2) == pytest.approx(saved_ms)


@pytest.mark.parametrize("seed", range(4))
def test_what_replanning_saves_is_found_and_bounded(seed: int) -> None:
    costs, microbatches = random_instance(seed)
    order = policies.build("zb-h1", costs, microbatches)
    free = replace(costs, memory=())
    faster = replace(free, links={})
    answer = replanned(order, free, faster, effort=0.02)
    found_ms = makespan_ms(answer.schedule, faster)
    assert answer.before_ms == makespan_ms(order, free) and answer.saved_ms == pytest.approx(answer.before_ms - found_ms)
    assert answer.saved_ms <= answer.most_ms * (1 + EXACT) and answer.proven == (answer.most_ms <= answer.saved_ms + 1e-6)
    assert found_ms <= makespan_ms(order, faster) * (1 + EXACT), "the order as it is remains a choice"


def test_memory_has_a_price_until_the_bound_needs_no_more() -> None:
    costs = with_delays(uniform(4, 10, 10, 10, memory=4.0), {(0, 1): 40.0, (1, 0): 40.0})
    order = plan(costs, 12).schedule
    step_ms = makespan_ms(order, costs)
    saved = [more_memory(order, costs, more).saved_ms for more in (0.0, 1.0, 4.0, 30.0)]
    assert saved[0] == 0 < saved[1] < saved[2] <= saved[3] == step_ms - makespan_ms(plan(uncapped(costs), 12).schedule, costs)
    alone = more_memory(order, costs, 4.0, [0])
    assert 0 < alone.saved_ms <= saved[2] and peak_memory(alone.schedule, costs)[0] > 4.0
    assert max(peak_memory(alone.schedule, costs)[1:]) <= 4.0
    assert more_memory(order, costs, 4.0, [3]).saved_ms == 0, "the last stage has nothing to wait for"
    with pytest.raises(ConfigError, match="stages=0: must be stages below 4 with a memory cap"):
        more_memory(order, uncapped(costs), 1.0)


def uncapped(costs: Costs) -> Costs:
    return replace(costs, memory=())


def test_an_order_that_no_longer_fits_is_no_choice() -> None:
    costs = uniform(3, 10, 10, 10)
    order: Schedule = policies.build("gpipe", costs, 6)
    answer = replanned(order, costs, replace(costs, memory=(2.0,) * 3))
    assert max(peak_memory(answer.schedule, costs)) <= 2.0
