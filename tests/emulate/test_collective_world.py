"""FTAR under seeded faults: every operation ends, right and bitwise equal, or fails for all; nothing comes twice.

A failing seed prints the line that replays it (`python -m helixrt.emulate.collective_world --seed …`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields

import pytest

from helixrt.emulate import collective_tasks, collective_world
from helixrt.emulate.collective_world import FAULTS, RAIL_FAULTS, CollectiveWorld, Verdict, Violation
from helixrt.protocol.collective.algorithms import choice
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.link.failover import Failover
from helixrt.protocol.link.ledger import Ledger
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.receive import Inbox
from helixrt.protocol.link.send import Outbox
from helixrt.protocol.liveness import Liveness
from tests.emulate.break_line import Line, break_line
from tests.emulate.sweeps import SWEEP_LIMIT_S, sweep_all

SEEDS = 1_000
SLOW_SEEDS, PARTS = 40_000, 16
NOTICED_WITHIN = 5_000  # seeds
# mostly few: every pair is linked, so time grows with the square
SIZES = (2, 3, 2, 3, 4, 2, 3, 5, 2, 4, 3, 2) * 3 + (6, 7, 8, 2)
SCHEDULES = (
    FAULTS,
    FAULTS,
    RAIL_FAULTS,
    RAIL_FAULTS,
    ("crash",),
    ("close",),
    ("crash", *RAIL_FAULTS),
    ("loss", "silence", "break"),
    ("close", "garbage", *RAIL_FAULTS),
)
HARD_CASES = tuple(f.name for f in fields(Verdict)[4:])


def world(seed: int) -> CollectiveWorld:
    """2 to 8 ranks, 1 to 3 rails, 1 to 4 collectives, and a mixture of faults, all from the seed."""
    faults = SCHEDULES[seed // 3 % len(SCHEDULES)]
    rails = 1 + seed % 3 if faults is not RAIL_FAULTS else 2 + seed // 7 % 2
    return CollectiveWorld(seed, SIZES[seed % len(SIZES)], rails, 1 + seed // 40 % 4, faults)


def sweep(seeds: range) -> tuple[Counter[str], list[str]]:
    totals: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            verdict = world(seed).run()
        except Violation as broken:
            violations.append(str(broken))
            continue
        totals.update({what: getattr(verdict, what) for what in HARD_CASES})
    return totals, violations


def test_many_seeds(seed: int) -> None:
    sweep_all(sweep, seed, SEEDS, HARD_CASES)


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_LIMIT_S)
@pytest.mark.parametrize("part", range(PARTS))
def test_40000_seeds(part: int, seed: int) -> None:
    sweep_all(sweep, seed, SLOW_SEEDS // PARTS, HARD_CASES)


def test_a_seed_replays_exactly() -> None:
    first, second = (CollectiveWorld(4242, 4, 2, 4, FAULTS, trace=True) for _ in range(2))
    assert first.run() == second.run()
    assert first.trace == second.trace


def test_without_faults_nothing_fails_and_nothing_is_sent_twice() -> None:
    for seed in range(20):
        verdict = CollectiveWorld(seed, 4, 2, 4, faults=()).run()
        assert verdict.generations == 1
        # a link that is not striped moves to its lowest rail when that comes up last, fenced as in fail-back
        others = [what for what in HARD_CASES if what not in ("points", "failbacks")]
        assert {what: getattr(verdict, what) for what in others} == dict.fromkeys(others, 0)


def test_a_run_can_be_read_message_by_message(capsys: pytest.CaptureFixture[str]) -> None:
    collective_world.main(["--seed", "5", "--size", "2", "--collectives", "1", "--faults", "", "--text"])
    text = capsys.readouterr().out
    assert text.startswith("Verdict(seed=5")
    assert re.search(r"^ +\d+\.\d{3} ms  0 -> 1 rail [01]: DATA 1 \(0, 0\) \d+ B$", text, re.MULTILINE)
    assert re.search(r"rank 1: \w+ 0 is done", text)


def test_a_violation_prints_the_line_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collective_world, "PATIENCE_S", 0.005)
    with pytest.raises(Violation) as broken:
        CollectiveWorld(11, 3, 1, 2, ("crash",)).run()
    line = str(broken.value).split("; replay: ")[1]
    assert line == "python -m helixrt.emulate.collective_world --seed 11 --size 3 --rails 1 --collectives 2 --faults crash"
    with pytest.raises(Violation) as again:
        collective_world.main(line.split()[3:])
    assert str(again.value) == str(broken.value)


# ---------------------------------------------------------------- the world notices a wrong protocol

BROKEN_LINES: dict[str, Line] = {
    "ring: a slot is received into before it was reduced from": (
        choice,
        "ring_all_reduce",
        "build.receive_reduced(left, source, out, waiting, [freed[lane]], last=step == size - 2)",
        "build.receive_reduced(left, source, out, waiting, [], last=step == size - 2)",
    ),
    "ring: a chunk is forwarded before it has come": (
        choice,
        "ring_all_reduce",
        "sent = build.send(right, what, ready[lane])",
        "sent = build.send(right, what)",
    ),
    "collective: what is queued at the first error is forgotten": (
        CollectiveMachine,
        "_break",
        "actions.extend(Skipped(queued.op, cause) for queued in self._queued)",
        "pass",
    ),
    "collective: a single message takes the place of a collective": (
        CollectiveMachine,
        "_start",
        "self._collectives += run.op >= 0",
        "self._collectives += 1",
    ),
    "ledger: what came before is taken again": (Ledger, "__contains__", "return sequence <= self.floor or", "return"),
    "link: frames of older generations count": (
        Link,
        "_frame_arrived",
        "if frame.generation != self.generation or not rail.up:",
        "if not rail.up:",
    ),
    "link: what a failed rail carried is not sent again": (Outbox, "resolve", "self.again.append(flight)", "pass"),
    "link: messages go without their receiver's credit": (
        Outbox,
        "submit",
        "elif length > self.options.eager_bytes:",
        "elif self.ready.append(message) is None:",
    ),
    "link: what nobody asked for is taken": (
        Inbox,
        "_landing",
        "if not frame.flags & EAGER or frame.length > self.options.eager_bytes:",
        "if False:",
    ),
    "link: a farewell is no end": (Link, "_settle", "if self._farewell is not None and self._all_came():", "if False:"),
    "failover: the last rail is left for being slow": (
        Failover,
        "slow",
        "if others and rail.usable and",
        "if rail.usable and",
    ),
    "failover: the peer's question is not answered": (
        Failover,
        "resume",
        "if not frame.flags & ANSWER:",
        "if False:",
    ),
    "liveness: silence is no death": (Liveness, "silent", "return now >= self._spared_until_s", "return False"),
}


FIRST_SEEDS = {  # the others are noticed soon from 0 on
    "link: what nobody asked for is taken": 670,
    "link: messages go without their receiver's credit": 1,
}


@pytest.mark.parametrize("what", BROKEN_LINES)
def test_the_world_notices_a_broken_line(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    collective_tasks.plan_of.cache_clear()
    break_line(monkeypatch, BROKEN_LINES[what])
    try:
        first = FIRST_SEEDS.get(what, 0)
        for seed in range(first, first + NOTICED_WITHIN):
            try:
                world(seed).run()
            except Violation as found:
                print(f"{what}: seed {seed}: {found}")
                return
        pytest.fail(f"{NOTICED_WITHIN} seeds did not notice: {what}")
    finally:
        collective_tasks.plan_of.cache_clear()
