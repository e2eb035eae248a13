"""Hopper whatever it hears: properties over random histories, and noise that must not make a flow oscillate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.protocol.hopping import messages as h
from helixrt.protocol.hopping.messages import PolicyName, Reason
from tests.protocol.path_sender import PATHS, Sender

# ---------------------------------------------------------------- properties


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float, str, int, float]]:
    """(seconds later, what, path or probe, RTT)."""
    what = st.sampled_from([*["message"] * 3, *["answer"] * 2, "other", "pending", "lose", "back", "tick", "miss"])
    rtt = st.one_of(st.floats(1.0, 4.0), st.floats(0.0, 60.0))
    return draw(st.lists(st.tuples(st.floats(0.0, 3.0), what, st.integers(0, PATHS - 1), rtt), max_size=120))


@settings(max_examples=150)
@given(histories(), st.integers(0, 2**32), st.sampled_from([0.1, 0.2, 1.0]), st.booleans())
def test_whatever_happens_the_rules_hold(
    history: Sequence[tuple[float, str, int, float]], seed: int, alpha: float, look_first: bool
) -> None:
    sender = Sender(seed, alpha=alpha, look_first=look_first)
    usable = set(range(PATHS))
    if look_first:
        sender.tell(h.Starting())
        sender.probes.clear()
    congested_at = -math.inf
    for later_s, what, path, rtt_s in history:
        sender.now += later_s
        before = sender.policy.path
        event: h.Event = h.Tick()
        match what:
            case "message":
                event = h.Measured(before, rtt_s)
            case "other":
                event = h.Measured(path, rtt_s)
            case "pending":
                event = h.Pending(before, rtt_s)
            case "answer" if sender.asked:
                event = h.Answered(sender.asked.pop(path % len(sender.asked)), rtt_s)
            case "miss" if sender.asked:
                event = h.Unanswered(sender.asked.pop(path % len(sender.asked)))
            case "lose":
                usable.discard(path)
                event = h.PathLost(path)
            case "back":
                usable.add(path)
                event = h.PathBack(path)
        for action in sender.tell(event):
            if isinstance(action, h.Probe):
                assert len(set(action.paths)) == len(action.paths) and set(action.paths) <= usable
                assert len(action.paths) <= 2 + sender.policy.looking
                assert sender.policy.looking == (sender.policy.path in action.paths)
                continue
            assert action.path in usable and action.at_s == sender.now
            if action.reason is Reason.CONGESTED:
                assert sender.now >= congested_at + 4.0
                congested_at = sender.now
        assert sender.policy.path in usable or not usable or before == sender.policy.path
        assert not sender.policy.looking or sender.policy.deadline < math.inf


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 2.5), max_size=200), st.integers(0, 2**32))
def test_without_congestion_no_noise_makes_it_switch(rtts_s: list[float], seed: int) -> None:
    sender = Sender(seed, alpha=1.0)
    for rtt_s in rtts_s:
        sender.message(rtt_s)
        if sender.asked:
            sender.answer(*(1.0 for _ in sender.asked))
            sender.asked = []
    assert not sender.switches


def test_the_same_seed_gives_the_same_history() -> None:
    def history(seed: int) -> list[Any]:
        rng, sender = random.Random(5), Sender(seed)
        for _ in range(300):
            sender.message(rng.choice((1.0, 1.0, 4.0, 30.0)))
            if sender.asked:
                sender.answer(*(rng.uniform(1, 4) for _ in sender.asked))
                sender.asked = []
        return [*sender.probes, *sender.switches]

    assert history(3) == history(3) != history(4)


# ---------------------------------------------------------------- noise


def jitter(rng: random.Random) -> float:
    """An idle path as software measures it: a spread of a fifth, and one message in fifty four times as late."""
    return rng.lognormvariate(0.0, 0.2) * (4.0 if rng.random() < 0.02 else 1.0)


def stalls(rng: random.Random) -> float:
    """Worse: a spread of half, and one message in a hundred up to thirty times as late."""
    return rng.lognormvariate(0.0, 0.5) * (rng.uniform(5, 30) if rng.random() < 0.01 else 1.0)


def shared(rng: random.Random) -> float:
    """Busy, all paths alike: between the thresholds on average, and often above both."""
    return 2.0 * rng.lognormvariate(0.0, 0.4)


def switches(noise: Callable[[random.Random], float], seed: int, messages: int, **changes: Any) -> tuple[int, float]:
    """How many there are, and in how many seconds, when all paths have the same noise."""
    rng, sender = random.Random(seed), Sender(seed, **changes)
    for _ in range(messages):
        sender.message(max(1.0, noise(rng)))
        if sender.asked:
            sender.answer(*(max(1.0, noise(rng)) for _ in sender.asked))
            sender.asked = []
    return len(sender.switches), sender.now - 100.0


def total(noise: Callable[[random.Random], float], **changes: Any) -> int:
    return sum(switches(noise, seed, 1000, **changes)[0] for seed in range(20))


def test_jitter_moves_nothing_with_our_alpha_and_much_with_the_papers() -> None:
    assert total(jitter) == 0
    assert total(jitter, alpha=1.0) > 200


def test_stalls_move_it_at_most_once_each() -> None:
    assert total(stalls) < 200, "a message in a hundred"
    assert total(stalls) < total(stalls, alpha=1.0) / 4 and total(stalls) < total(stalls, policy=PolicyName.FLOWBENDER)


def test_paths_that_are_all_busy_are_not_tried_in_turn() -> None:
    assert total(shared) < 0.04 * 20_000
    assert total(shared) < total(shared, alpha=1.0) / 5 and total(shared) < total(shared, policy=PolicyName.FLOWBENDER)


@pytest.mark.parametrize("noise", [jitter, stalls, shared, lambda rng: rng.uniform(0, 100)])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_switches_are_bounded_in_time_whatever_the_noise(noise: Callable[[random.Random], float], alpha: float) -> None:
    for seed in range(20):
        count, seconds = switches(noise, seed, 500, alpha=alpha)
        assert count <= 1 + seconds / 4.0
