"""How much a donor serves follows what its machine leaves idle, and its training hardly slows, whatever its bursts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from helixrt.protocol.serving import Sample, ServeLimit, ServeRules

RULES = ServeRules()


def simulate(
    demand: Callable[[float], float], cores: float, seconds: float, donors: int = 1
) -> tuple[float, float, Sequence[ServeLimit]]:
    """Donors that serve all they may beside training that wants `demand(t)` cores at time t.

    Returns by which fraction the training took longer, the cores served on average, and the limits at the end. Where
    more is wanted than there is, all the shortfall is the training's, which makes up for it on all cores.
    """
    limits = [ServeLimit(cores, RULES) for _ in range(donors)]
    lost = served_in_all = now = 0.0
    while now < seconds:
        served = [limit.limit for limit in limits]
        # An interval of ten slices, in which the demand may change.
        idle = delayed = 0.0
        for part in range(10):
            training = min(cores, demand(now + part * RULES.interval_s / 10))
            shortfall = max(0.0, training + sum(served) - cores)
            lost += min(training, shortfall) * RULES.interval_s / 10
            delayed += (shortfall > 0) / 10
            idle += max(0.0, cores - training - sum(served)) / 10
        for limit, each in zip(limits, served, strict=True):
            limit.add(Sample(idle, each, delayed))
        served_in_all += sum(served)
        now += RULES.interval_s
    return lost / cores / seconds, served_in_all / (seconds / RULES.interval_s), limits


@pytest.mark.parametrize("cores", [1, 2, 16, 128])
def test_an_idle_machine_is_used_but_for_a_reserve(cores: int) -> None:
    _, _, (limit,) = simulate(lambda t: 0.0, cores, 20.0)
    assert limit.limit == pytest.approx(0.9 * cores)


@pytest.mark.parametrize("cores", [1, 2, 16, 128])
@pytest.mark.parametrize("donors", [1, 2])
def test_a_busy_machine_is_hardly_used(cores: int, donors: int) -> None:
    slowed, served, _ = simulate(lambda t: cores, cores, 60.0, donors)
    assert 0 < served <= donors * RULES.share * cores
    assert slowed <= 0.05


def test_of_a_machine_with_more_work_than_processors_serving_takes_its_share_of_what_training_gets() -> None:
    limit = ServeLimit(2, RULES)
    for delayed, expected in ((0.0, 0.04), (0.6, 0.016), (1.0, 0.01)):
        limit.add(Sample(0.0, 0.01, delayed))
        assert limit.limit == pytest.approx(expected)


@pytest.mark.parametrize("used", [0.25, 0.5, 0.75])
def test_what_training_leaves_is_used(used: float) -> None:
    slowed, served, (limit,) = simulate(lambda t: 16 * used, 16, 60.0)
    assert slowed == 0.0 and limit.limit == pytest.approx(16 * (1 - used - RULES.reserve))
    assert served >= 0.8 * limit.limit


def test_when_training_comes_back_serving_gives_way_within_a_second() -> None:
    limit = ServeLimit(16, RULES)
    for _ in range(RULES.window):
        limit.add(Sample(16.0, 0.0))
    intervals = 0
    while limit.limit > RULES.share * 16:
        limit.add(Sample(0.0, limit.limit))
        intervals += 1
    assert intervals * RULES.interval_s <= 1.0


def test_bursts_of_training_are_slowed_by_five_percent_at_most(seed: int) -> None:
    """Steps of any length that use some of the processors throughout and all of them for a part."""
    for number in range(60):
        rng = random.Random(f"{seed}/{number}")
        cores, period = rng.choice([2, 8, 64]), 10 ** rng.uniform(-1.5, 1.5)
        calm, duty = rng.uniform(0, cores), rng.uniform(0.1, 0.9)

        def demand(t: float, cores: int = cores, period: float = period, calm: float = calm, duty: float = duty) -> float:
            return cores if (t / period) % 1.0 < duty else calm

        slowed, _, _ = simulate(demand, cores, max(30.0, 5 * period))
        assert slowed <= 0.05, (number, cores, period, calm, duty, slowed)


def test_it_is_the_same_for_the_same_samples_and_begins_again_when_told() -> None:
    rng = random.Random(5)
    one, other = ServeLimit(8), ServeLimit(8)
    for _ in range(100):
        sample = Sample(rng.uniform(0, 8), rng.uniform(0, 1), rng.uniform(0, 0.04))
        one.add(sample)
        other.add(sample)
        assert one.limit == other.limit and 0.9 * 0.02 * 8 <= one.limit <= 8
    one.forget()
    assert one.limit == 0.02 * 8
