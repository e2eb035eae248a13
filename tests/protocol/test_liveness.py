"""Liveness: a dead peer is declared in time, a living one never, however late both ends' threads run."""

from __future__ import annotations

import random
from collections import deque

import pytest

from helixrt.errors import Cause
from helixrt.protocol import liveness
from helixrt.protocol.liveness import Acknowledgements, FirstReason, Liveness, Stopped, acknowledged_s

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


# ---------------------------------------------------------------- a process that is stopped


def test_a_process_that_is_stopped_is_dead_within_one_and_a_quarter_periods() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        stopped, since, now = Stopped(PERIOD), rng.uniform(0, 3), 0.0
        while not stopped.look(now >= since, now):
            now += stopped.look_s * rng.uniform(0.9, 1.1)
        assert since + 0.8 <= now <= since + 1.3, f"seed {seed}: stopped at {since}, declared at {now}"


def test_short_stops_are_no_death_however_many_there_are() -> None:
    """Each shorter than 0.8 periods, with one look between two of them that finds the process running."""
    for seed in range(20):
        rng = random.Random(seed)
        stopped, now = Stopped(PERIOD), 0.0
        for _ in range(200):
            until = now + rng.uniform(0, 0.8)
            while now < until:
                assert not stopped.look(True, now), f"seed {seed}"
                now += stopped.look_s
            assert not stopped.look(False, now)
            now += stopped.look_s


def test_two_late_looks_of_ours_are_no_proof_that_it_was_stopped_between_them() -> None:
    stopped = Stopped(PERIOD)
    assert not stopped.look(True, 0.0) and not stopped.look(True, 5.0)
    assert stopped.for_s <= 2 * stopped.look_s


# ---------------------------------------------------------------- acknowledgements


def test_a_rail_that_the_peer_does_not_read_lives_by_the_control_connection() -> None:
    full, silent = Acknowledgements(10.0, full=True), Acknowledgements(10.0)
    control = Acknowledgements(12.0)
    assert acknowledged_s(full, control) == 12.0
    assert acknowledged_s(Acknowledgements(13.0, full=True), control) == 13.0
    assert acknowledged_s(silent, control) == 10.0, "nothing is full: its own path fails"
    assert acknowledged_s(Acknowledgements(10.0, full=True, unanswered=2), control) == 10.0, "its window probes are lost"
    assert acknowledged_s(full, None) == 10.0


@pytest.mark.parametrize("lock_held_s", [0.0, 5.0, 60.0])
def test_a_peer_lives_by_its_kernels_acknowledgements_whatever_its_process_does(lock_held_s: float) -> None:
    """Our probes are acknowledged within 0.3 periods until its host fails; from its process nothing comes."""
    for seed in range(50):
        rng = random.Random(seed)
        fails = 1.0 + lock_held_s
        live, now, probed = Liveness(PERIOD, 0.0), 0.0, 0.0
        while True:
            now = max(now, live.deadline_s) + rng.uniform(0, 0.05)
            if probed + 0.3 < fails:
                live.heard(min(now, probed + rng.uniform(0, 0.3)))
            if live.silent(now):
                break
            probed = now
        assert fails < now < fails + 1.8, f"seed {seed}: its host failed at {fails}, declared at {now}"


def test_an_old_sign_of_life_changes_nothing() -> None:
    live = Liveness(PERIOD, 0.0)
    live.heard(2.0)
    live.heard(1.0)
    assert live.heard_s == 2.0


# ---------------------------------------------------------------- the first reason


def test_the_first_reason_stands() -> None:
    first = FirstReason()
    assert first.cause is None
    assert first.settle(Cause("disk full", "rank 3")) == Cause("disk full", "rank 3")
    assert first.settle(Cause("connection reset", "rank 4")) == Cause("disk full", "rank 3")
    assert first.cause == Cause("disk full", "rank 3")
