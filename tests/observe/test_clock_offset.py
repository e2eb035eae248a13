"""The offset of two clocks is always within its uncertainty, and the uncertainty is no larger than the messages make it."""

from __future__ import annotations

import random

import pytest

from helixrt.observe.clock_offset import MOST_DRIFT, OffsetTracker

SEEDS = range(40)


class Clocks:
    """Clock b is `offset_s` ahead of clock a at time 0 and gains `drift` seconds a second; delays have a least one and more."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.drift = seed, draw.uniform(-MOST_DRIFT, MOST_DRIFT) * 0.9
        self.offset_s = draw.uniform(-100.0, 100.0)
        self.least_s = {"to_b": draw.choice((0.0, 1e-4, 2e-3)), "to_a": draw.choice((0.0, 1e-4, 2e-3))}
        self.tracker, self.now_s = OffsetTracker(), 1e9

    def true_s(self, at_s: float) -> float:
        return self.offset_s + self.drift * (at_s - 1e9)

    def exchange(self, steps: int, more_to_b_s: float = 0.0) -> None:
        for _ in range(steps):
            self.now_s += self.draw.uniform(0.05, 2.0)
            for way in ("to_b", "to_a"):
                delay_s = self.least_s[way] + self.draw.expovariate(1e4) + (more_to_b_s if way == "to_b" else 0.0)
                if way == "to_b":
                    self.tracker.to_b(self.now_s, delay_s + self.true_s(self.now_s))
                else:
                    self.tracker.to_a(self.now_s + delay_s, delay_s - self.true_s(self.now_s))

    def error_s(self) -> tuple[float, float]:
        """Of what the tracker says, and what it claims at most."""
        found = self.tracker.at(self.now_s)
        assert found is not None
        return abs(found.offset_s - self.true_s(self.now_s)), found.uncertainty_s


@pytest.mark.parametrize("seed", SEEDS)
def test_the_offset_is_within_its_uncertainty_at_every_step(seed: int) -> None:
    clocks = Clocks(seed)
    for _ in range(30):
        clocks.exchange(1)
        error_s, claimed_s = clocks.error_s()
        assert error_s <= claimed_s + 1e-5, f"seed {seed}"
    assert claimed_s < 1e-3 + sum(clocks.least_s.values()), f"seed {seed}: it says {claimed_s} s after 30 steps"


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_known_of_a_quiet_link_is_not_lost_when_it_gets_slow_one_way(seed: int) -> None:
    clocks = Clocks(seed)
    clocks.exchange(40)
    before_s = clocks.error_s()[1]
    clocks.exchange(40, more_to_b_s=0.06)
    error_s, claimed_s = clocks.error_s()
    assert error_s <= claimed_s + 1e-5, f"seed {seed}"
    assert claimed_s <= 6 * before_s + 1e-3, f"seed {seed}: {claimed_s} s for {before_s} s before"
    found = clocks.tracker.at(clocks.now_s)
    assert found is not None and abs(found.drift - clocks.drift) < 2e-4


def test_a_link_that_was_slow_one_way_from_the_beginning_stays_uncertain_by_half_of_it() -> None:
    clocks = Clocks(1)
    clocks.exchange(30, more_to_b_s=0.06)
    error_s, claimed_s = clocks.error_s()
    assert error_s <= claimed_s and 0.03 <= claimed_s < 0.04


@pytest.mark.parametrize("jump_s", [-7.0, -0.5, 0.5, 7.0])
def test_a_clock_that_is_set_is_followed(jump_s: float) -> None:
    clocks = Clocks(3)
    clocks.exchange(20)
    clocks.offset_s += jump_s
    clocks.exchange(20)
    error_s, claimed_s = clocks.error_s()
    assert error_s <= claimed_s + 1e-5 and claimed_s < 5e-3


def test_nothing_is_said_before_there_was_a_message_each_way() -> None:
    tracker = OffsetTracker()
    assert tracker.at(0.0) is None
    tracker.to_b(1.0, 3.0)
    assert tracker.at(1.0) is None
    tracker.to_a(1.5, -2.9)
    found = tracker.at(1.5)
    assert (
        found is not None
        and found.offset_s == pytest.approx(2.95, abs=1e-3)
        and found.uncertainty_s == pytest.approx(0.05, rel=0.02)
    )


@pytest.mark.parametrize("back_s", [1.0, 3600.0])
def test_a_clock_whose_times_repeat_since_it_was_set_back_is_followed_at_once(back_s: float) -> None:
    """Clock a is, so that later messages have earlier times."""
    tracker, offset_s = OffsetTracker(), 5.0
    for clock_s in (*range(100, 120), *(119.5 - back_s + 0.5 * step for step in range(4))):
        now_offset_s = offset_s if clock_s >= 100 and isinstance(clock_s, int) else offset_s + back_s
        tracker.to_b(clock_s, now_offset_s + 1e-3)
        tracker.to_a(clock_s + 0.01, 1e-3 - now_offset_s)
    found = tracker.at(clock_s)
    assert found is not None and abs(found.offset_s - (offset_s + back_s)) <= found.uncertainty_s <= 2e-3
