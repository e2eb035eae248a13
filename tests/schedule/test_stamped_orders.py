"""The policy fed by a job's own measurements: stamps of clocks that are seconds apart, drift and are set, through the
estimator.

Delays flap, stamps are noisy, links may be slow one way only, which no method can tell from a clock that is off where it has
been so from the beginning: a run never takes more than 3% longer than by its first order, and the order seldom changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from helixrt.schedule.costs import uniform
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.generators import policies
from helixrt.schedule.generators.classic import build
from tests.schedule.order_world import Delays, both
from tests.schedule.stamped_order_world import StampedOrderWorld

ZB = build("zb", 4, 8)
HOSTS = ((), (), (0, 0, 1, 1), (0, 1, 1, 2))  # of the stages: each its own, or shared


def flapping(rng: random.Random, stages: int, period: int) -> Callable[[int], Delays]:
    """A link is slow for `period` steps, one way or both, none is for as many, then another one; or the other way round."""

    def spell() -> Delays:
        link, delay_ms = rng.randrange(stages - 1), 10.0 * rng.choice((1, 2, 4, 6))
        return rng.choice((both(link, delay_ms), {(link, link + 1): delay_ms}, {(link + 1, link): delay_ms}))

    spells, first = [spell() for _ in range(100)], rng.randrange(2)
    return lambda step: spells[step // (2 * period)] if (step // period) % 2 == first else {}


def world(seed: int, steps: int) -> StampedOrderWorld:
    rng = random.Random(seed)
    microbatches = rng.choice((6, 8))
    first = build(rng.choice(("1f1b", "zb", "zb-h1", "adaptra", "helix")), 4, microbatches)
    costs = uniform(4, 10.0, 10.0, 10.0)
    if rng.random() < 0.5:  # caps make the orders for slow links slower without them
        costs = replace(costs, memory=(float(rng.randint(4, 6)),) * 4)
        first = policies.build("helix", costs, microbatches)
    return StampedOrderWorld(
        seed,
        first,
        flapping(rng, 4, rng.choice((5, 5, 12, 20))),
        steps=steps,
        noise=rng.choice((0.01, 0.03, 0.06)),
        outliers=rng.choice((0.0, 0.002, 0.02)),
        lag=rng.randrange(3),
        ready_ms=rng.choice((0.0, 100.0, 500.0, 1500.0)),
        costs=costs,
        quiet_ms=rng.choice((0.0, 0.2, 2.0)),
        hosts=rng.choice(HOSTS),
    )


def no_harm(seed: int, steps: int) -> None:
    found = world(seed, steps).run()
    assert len(found.switches) <= 8, f"seed {seed}: {len(found.switches)} switches in {steps} steps"
    assert found.slowdown <= 1.03, f"seed {seed}: {found.slowdown:.3f} times the fixed order"


@pytest.mark.grid
@pytest.mark.parametrize("part", range(12))
def test_clocks_that_drift_and_delays_that_flap_do_no_harm(part: int) -> None:
    for seed in range(8 * part, 8 * part + 8):
        no_harm(seed, steps=60)


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("tenth", range(10))
def test_clocks_that_drift_and_delays_that_flap_do_no_harm_in_many_seeds(sweep_part: int, tenth: int) -> None:
    """250 seeds; with `--seeds 5000` a thousand."""
    first = 250 * sweep_part + 25 * tenth
    for seed in range(first, first + 25):
        no_harm(seed, steps=100)


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_link_is_followed_by_clocks_that_drift(seed: int) -> None:
    slow = lambda step: both(1, 60.0) if 15 <= step < 45 else {}  # noqa: E731
    found, first = StampedOrderWorld(seed, ZB, slow, steps=60, ready_ms=100.0, corrected=False).run(), order_key(ZB)
    assert found.orders[14] == first and first not in found.orders[20:44], f"seed {seed}: {found.switches}"
    assert found.slowdown < 0.9, f"seed {seed}: {found.slowdown:.3f}"
