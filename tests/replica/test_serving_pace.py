"""Serving sleeps as much as its limit asks for: fixed, or after what the machine has to spare."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from helixrt.protocol.serving import ServeRules
from helixrt.replica.serving_pace import IdleProcessors, Pace, ProcessorTimes, idle_processors


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Machine(IdleProcessors):
    """Of which `idle` cores are idle, and whose training is `delayed`."""

    cores = 4.0

    def __init__(self) -> None:
        self.idle, self.delayed = 4.0, 0.0

    def since_last(self, now: float) -> tuple[float, float]:
        return self.idle, self.delayed


def serve(pace: Pace, clock: Clock, seconds: float, piece_s: float = 0.002) -> float:
    """Serve without a pause for so long; the cores that serving used in the last half."""
    begin, spent = clock.now, 0.0
    while clock.now < begin + seconds:
        clock.now += piece_s
        clock.now += pace.spent(piece_s)
        spent += piece_s if clock.now > begin + seconds / 2 else 0.0
    return spent / (seconds / 2)


def test_a_fixed_limit_is_kept_to() -> None:
    clock = Clock()
    assert serve(Pace(0.25, clock=clock), clock, 20.0) == pytest.approx(0.25, rel=0.1)
    assert serve(Pace(math.inf, clock=clock), clock, 1.0) == pytest.approx(1.0, rel=0.1), "no limit"


def test_an_idle_machine_serves_at_full_speed_and_a_busy_one_its_share() -> None:
    clock, machine = Clock(), Machine()
    pace = Pace(idle=machine, clock=clock)
    assert serve(pace, clock, 30.0) == pytest.approx(1.0, rel=0.1), "one thread can use no more"
    machine.idle = 0.0
    assert serve(pace, clock, 30.0) == pytest.approx(4.0 * ServeRules().share, rel=0.1)
    machine.idle, machine.delayed = 4.0, 0.5
    assert serve(pace, clock, 30.0) == pytest.approx(2.0 * ServeRules().share, rel=0.1), "of what training gets"
    machine.delayed = 0.0
    assert serve(pace, clock, 30.0) == pytest.approx(1.0, rel=0.1)


def test_after_a_pause_in_serving_it_begins_with_the_share() -> None:
    clock, machine = Clock(), Machine()
    pace = Pace(idle=machine, clock=clock)
    serve(pace, clock, 30.0)
    assert pace.limit > 3.0
    clock.now += 60.0
    pace.spent(0.001)
    assert pace.limit == 4.0 * ServeRules().share


def test_without_word_of_idle_time_the_share_is_the_limit() -> None:
    assert Pace(idle=None).limit == ServeRules().share * (os.cpu_count() or 1)


def test_this_machine_tells_its_idle_time() -> None:
    found = idle_processors()
    assert isinstance(found, ProcessorTimes) and found.cores > 0
    for _ in range(5):
        time.sleep(0.05)
        then, now = found._last[0], time.monotonic()
        idle, delayed = found.since_last(now)
        longer = (time.monotonic() - then) / (now - then)  # it reads a little later than `now`, or much
        assert 0.0 <= idle <= (found.cores * 1.5 + 1.0) * longer and 0.0 <= delayed <= 1.5 * longer


def test_a_quota_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 1000000\nuser_usec 1\n")
    monkeypatch.setattr(ProcessorTimes, "CGROUP", group)
    found = ProcessorTimes()
    assert found.cores == 1.5 or found.cores == len(found._names)
    (group / "cpu.stat").write_text("usage_usec 3000000\n")
    then = found._last[0]
    assert found.since_last(then + 2.0)[0] <= 0.5, "two of the three core seconds of the quota were used"
