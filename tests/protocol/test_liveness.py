"""Liveness: a dead peer is declared in time, a living one never, however late both ends' threads run."""

from __future__ import annotations

import random
from collections import deque

import pytest

from helixrt.errors import Cause
from helixrt.protocol import liveness
from helixrt.protocol.liveness import FirstReason, Liveness

PERIOD = 1.0


def watch(live: Liveness, beats: list[float], lateness: random.Random, most_s: float, until: float) -> float | None:
    """Wake when a beat comes or `live` asks for it, up to `most_s` late, read, then look. The time of the verdict."""
    now, waiting = 0.0, deque(sorted(beats))
    while now < until:
        wake = min(live.deadline_s, waiting[0]) if waiting else live.deadline_s
        now = max(now, wake) + lateness.uniform(0.0, most_s)
        while waiting and waiting[0] <= now:
            waiting.popleft()
            live.heard(now)
        if live.silent(now):
            return now
    return None


@pytest.mark.parametrize("period", [0.1, 1.0, 7.0])
def test_a_silent_peer_is_declared_within_one_and_a_half_periods(period: float) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        last = rng.uniform(0, 5) * period
        beats = [last * part / 40 for part in range(41)]
        verdict = watch(Liveness(period, 0.0), beats, rng, 0.05 * period, 100 * period)
        assert verdict is not None, f"seed {seed}: never declared"
        # the last beat may have been read 0.05 periods after it came
        assert last + 1.3 * period < verdict <= last + 1.5 * period, f"seed {seed}: last heard {last}, declared {verdict}"


def test_a_living_peer_is_never_declared_dead_though_both_ends_are_late() -> None:
    """The sender is up to a second late with each beat of 0.25 s, the watcher up to 0.15 s with each look: an hour."""
    for seed in range(3):
        rng = random.Random(seed)
        beats, now = [], 0.0
        while now < 3600:
            now += liveness.BEAT * PERIOD + rng.choice((0.0, 0.05, 0.2, 1.0)) * rng.random()
            beats.append(now)
        assert watch(Liveness(PERIOD, 0.0), beats, rng, 0.15, 3600) is None, f"seed {seed}"


def test_a_stall_of_ours_blames_nobody_before_we_have_read_what_came() -> None:
    """We stop for a minute, and so does the whole machine: the peer's next beat comes only after we woke."""
    live = Liveness(PERIOD, 0.0)
    live.heard(0.2)
    assert not live.silent(0.25)
    woke = 60.0
    assert not live.silent(woke)
    assert live.deadline_s <= woke + liveness.BEAT * PERIOD
    live.heard(woke + 0.1)
    assert not live.silent(woke + 0.25)
    # It dies then, and that is still noticed in time.
    verdict = watch(live, [], random.Random(0), 0.05, 100)
    assert verdict is not None and woke + 1.5 <= verdict <= woke + 0.1 + 1.5


@pytest.mark.parametrize(("stall", "grace"), [(60.0, 1.0), (1.45, 1.0), (0.45, 0.45)])
def test_a_dead_peer_is_declared_a_grace_after_our_stall(stall: float, grace: float) -> None:
    """As long as the stall was, at most a period; and not declared by looks in between."""
    live = Liveness(PERIOD, 0.0)
    for look in (0.25, 0.5, 0.75, 1.0) if stall < 1.0 else ():
        assert not live.silent(look)
    woke = stall if stall > 1.0 else 1.0 + stall
    for part in (0.0, 0.3, 0.6, 0.9):
        assert not live.silent(woke + part * grace)
    assert live.silent(woke + grace)


def test_stalls_without_end_do_not_hide_a_death() -> None:
    """Every look is half a period late: one grace per silence, not one per look."""
    live = Liveness(PERIOD, 0.0)
    verdict, now = None, 0.0
    while verdict is None and now < 100:
        now += 0.75
        verdict = now if live.silent(now) else None
    assert verdict is not None and verdict <= 3.0


def test_beats_leave_a_late_sender_more_than_a_period() -> None:
    assert (liveness.SILENCE - liveness.BEAT) * PERIOD > 1.1
    assert liveness.SILENCE <= 1.4  # the rest of 1.5 is for a late look


def test_the_first_reason_stands() -> None:
    first = FirstReason()
    assert first.cause is None
    assert first.settle(Cause("disk full", "rank 3")) == Cause("disk full", "rank 3")
    assert first.settle(Cause("connection reset", "rank 4")) == Cause("disk full", "rank 3")
    assert first.cause == Cause("disk full", "rank 3")
