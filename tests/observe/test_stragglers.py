"""Slow stages and slow links are told apart, with the figures that show them; what is even is no straggler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.observe.estimator import Estimator
from helixrt.observe.stragglers import Cause, Straggler, stragglers
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.generators import policies
from tests.observe.measured_world import World

CALM = with_delays(uniform(4, 10.0, 10.0, 10.0), {(a, b): 0.2 for a in range(4) for b in range(4) if abs(a - b) == 1})


def slowed(costs: Costs, stage: int, factor: float) -> Costs:
    def of(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(ms * (factor if at == stage else 1.0) for at, ms in enumerate(times))

    return replace(costs, forward=of(costs.forward), backward=of(costs.backward), weight=of(costs.weight))


def found(before: Costs, after: Costs, seed: int = 0, change: int = 12, steps: int = 20, **options: bool) -> list[Straggler]:
    schedule = policies.build("zb", CALM, 12)
    world = World(schedule, lambda step: after if step >= change else before, seed, **options)
    estimator: Estimator = world.estimator(steps)
    measured = estimator.estimates()
    assert measured is not None
    return stragglers(measured, estimator.shifts)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_host", [True, False])
def test_a_stage_that_became_slow_is_one_by_both_measures(seed: int, one_host: bool) -> None:
    (one,) = found(CALM, slowed(CALM, 2, 1.5), seed, one_host=one_host)
    assert (one.cause, one.stage, one.since, one.place) == (Cause.COMPUTE, 2, 12, "stage 2")
    assert one.value_ms == pytest.approx(45.0, rel=0.03) and one.usual_ms == pytest.approx(30.0, rel=0.03)
    assert "1.5" in one.why and "before step 12" in one.why


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_host", [True, False])
def test_a_link_that_became_slow_is_one_and_the_stages_that_wait_are_none(seed: int, one_host: bool) -> None:
    (one,) = found(CALM, with_delays(CALM, {(1, 2): 60.0}), seed, one_host=one_host)
    assert (one.cause, one.way, one.since, one.place) == (Cause.LINK, (1, 2), 12, "link 1>2")
    assert one.value_ms == pytest.approx(60.0, abs=1.5) and "times an operation" in one.why


@pytest.mark.parametrize("stamped", [True, False])
def test_an_even_replica_has_none(stamped: bool) -> None:
    assert found(CALM, CALM, one_host=True, stamped=stamped) == []


def test_a_stage_that_was_always_slower_is_one_by_the_others() -> None:
    uneven = slowed(CALM, 3, 1.4)
    (one,) = found(uneven, uneven)
    assert (one.stage, one.since) == (3, 0) and one.usual_ms == pytest.approx(30.0, rel=0.03) and "before" not in one.why


def test_a_stage_that_became_fast_is_none() -> None:
    assert found(slowed(CALM, 1, 1.5), CALM) == []


def test_a_link_slow_from_the_beginning_between_hosts_is_one_without_a_direction() -> None:
    slow = with_delays(CALM, {(1, 2): 60.0})
    (one,) = found(slow, slow)
    assert one.way == (1, 2) and one.value_ms == pytest.approx(60.2, abs=1.0) and "which way is slow is not known" in one.why
    (known,) = found(slow, slow, one_host=True)
    assert known.way == (1, 2) and known.value_ms == pytest.approx(60.0, abs=0.5) and "not known" not in known.why
