"""Links over NICs with several paths under seeded faults and noise: nothing lost or doubled, and no flow oscillates.

A failing seed prints the line that replays it (`python -m helixrt.emulate.path_world --seed …`).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from helixrt.emulate import path_world
from helixrt.emulate.path_world import RATE, HoppingEnd, PathWorld
from helixrt.emulate.seeded import Violation
from helixrt.protocol.hopping.messages import PolicyName, Reason
from helixrt.protocol.link.options import LinkOptions
from tests.emulate import broken_rules as broken
from tests.emulate.broken_rules import Rule, noticed_by

NOTICED_WITHIN = 2_000  # seeds


def test_a_run_replays_exactly_and_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(100) if PathWorld(seed).run().congested)
    path_world.main(["--seed", str(seed), "--text"])
    first = capsys.readouterr().out
    path_world.main(["--seed", str(seed), "--text"])
    assert capsys.readouterr().out == first
    assert first.startswith(f"PathVerdict(seed={seed}") and re.search(r"both   NIC 0: path 0 at", first)
    assert re.search(r"end [01]  rail \d takes PROBE", first) and re.search(r"end [01]  Hopped\(", first)


# ---------------------------------------------------------------- what hopping is for


class Busy(PathWorld):
    """Equal paths, no faults, and always something to send."""

    lengths = (5000,)
    noise = (0.0, 0.0002, 0.0005)

    def draw_weather(self, rng: random.Random) -> None:
        super().draw_weather(rng)
        self.doubles = self.loses = self.stalls = 0.0
        self.noise_s, self.safe = rng.choice(self.noise), True
        self.rates = [RATE] * self.rails

    def traffic(self, until: float) -> None:
        for index in range(60):
            for end in self.ends:
                self.message(end, self.ends[1 - end.me], 0, index, until)

    def trouble(self, until: float) -> None:
        pass


class Noisy(Busy):
    """Equal paths at first; then every delay is noise, and rates jump. Some average RTTs as the paper does: not at all."""

    noise = (0.002, 0.005, 0.01)

    def draw_options(self, rng: random.Random) -> LinkOptions:
        options = super().draw_options(rng)
        assert options.hopping is not None
        return replace(options, hopping=replace(options.hopping, alpha=rng.choice((0.25, 1.0))))

    def trouble(self, until: float) -> None:
        when = 0.0
        while when < until:
            when += self.random.uniform(0.002, 0.02)
            self.at(when, self.set_rate, self.random.randrange(self.rails), self.random.choice((0.05, 0.1, 0.3, 1.0)))


class Slowed(Busy):
    """A path gets ten times slower and stays so: the one that end 0 uses."""

    def trouble(self, until: float) -> None:
        self.at(SLOW_S, self.slow_down)

    def slow_down(self) -> None:
        (end, _) = self.ends
        assert isinstance(end, HoppingEnd)
        self.slowed = end.path
        self.set_rate(self.slowed, 0.1)


class Kept(Slowed):
    policy = PolicyName.ECMP


SLOW_S, LEFT_S = 0.05, 0.15


def begun_late(world: Slowed) -> int:
    """Long messages of end 0 that began on the slow path though it has been slow for long."""
    world.spans_s = (0.4,)
    world.run()
    (end, _) = world.ends
    assert isinstance(end, HoppingEnd)
    return sum(path == world.slowed and when > LEFT_S for when, path in end.begun)


def test_noise_on_equal_paths_moves_no_flow() -> None:
    for seed in range(20):
        world = Busy(seed)
        world.run()
        for end in world.ends:
            assert isinstance(end, HoppingEnd)
            assert not end.hops[Reason.CONGESTED], f"seed {seed}: {end.hops}"


@pytest.mark.system
def test_no_noise_makes_a_flow_oscillate() -> None:
    """Every hop is checked by the world: none for congestion within the time-to-live of another one."""
    totals: Counter[Reason] = Counter()
    for seed in range(30):
        world = Noisy(seed)
        world.run()
        for end in world.ends:
            assert isinstance(end, HoppingEnd)
            rest_s = end.hopping.remember * end.hopping.base_s
            assert end.hops[Reason.CONGESTED] <= 1 + world.now / rest_s
            totals += end.hops
    assert totals[Reason.CONGESTED] > 100, totals  # it would, if it could


@pytest.mark.system
def test_a_path_that_turns_slow_is_left_and_not_taken_again() -> None:
    assert [begun_late(Slowed(seed)) for seed in range(20)] == [0] * 20
    assert sum(begun_late(Kept(seed)) > 0 for seed in range(20)) == 20  # what there is to gain


# ---------------------------------------------------------------- rules broken on purpose

BROKEN = [
    broken.another_switch_at_once,
    broken.a_path_that_failed_is_taken,
    broken.a_path_that_failed_is_kept,
    broken.a_path_gets_all_there_is,
    broken.the_policy_is_not_woken,
    broken.long_messages_go_where_least_waits,
    broken.the_ledger_forgets_its_floor,
    broken.failed_rails_are_not_resent,
    broken.the_last_rail_is_left_for_being_slow,
]


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Noisy if rule is broken.another_switch_at_once else PathWorld
    noticed_by(rule, monkeypatch, lambda seed: world(seed).run(), range(NOTICED_WITHIN), Violation)
