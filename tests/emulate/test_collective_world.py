"""FTAR under seeded faults: every operation ends, right and bitwise equal, or fails for all; nothing comes twice.

A failing seed prints the line that replays it (`python -m helixrt.emulate.collective_world --seed …`).
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from helixrt.emulate import collective_tasks, collective_world
from helixrt.emulate.collective_world import FAULTS, RAIL_FAULTS, CollectiveWorld, Verdict
from helixrt.emulate.seeded import Violation
from helixrt.errors import Cause
from helixrt.protocol.collective import messages as c
from helixrt.protocol.collective.algorithms.layout import Builder
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.plan import Region
from tests.emulate import broken_rules as broken
from tests.emulate.broken_rules import Patch, Rule, noticed_by

NOTICED_WITHIN = 5_000  # seeds
HARD_CASES = tuple(f.name for f in fields(Verdict)[4:])
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


def world(seed: int) -> CollectiveWorld:
    """2 to 8 ranks, 1 to 3 rails, 1 to 4 collectives, and a mixture of faults, all from the seed."""
    faults = SCHEDULES[seed // 3 % len(SCHEDULES)]
    rails = 1 + seed % 3 if faults is not RAIL_FAULTS else 2 + seed // 7 % 2
    return CollectiveWorld(seed, SIZES[seed % len(SIZES)], rails, 1 + seed // 40 % 4, faults)


def test_a_seed_replays_exactly() -> None:
    first, second = (CollectiveWorld(4242, 4, 2, 4, FAULTS, trace=True) for _ in range(2))
    assert first.run() == second.run()
    assert first.trace == second.trace


def test_what_comes_to_a_paused_rank_is_gone_when_its_connection_breaks_meanwhile() -> None:
    """Found by a run of many seeds: the world asked a rank to notice garbage that it could not read any more."""
    found = CollectiveWorld(4090645827, 3, 1, 2, FAULTS).run()
    assert (found.refused, found.points) == (0, 2)


def test_without_faults_nothing_fails_and_nothing_is_sent_twice() -> None:
    for seed in range(20):
        verdict = CollectiveWorld(seed, 4, 2, 4, faults=()).run()
        assert verdict.generations == 1
        # a link that is not striped moves to its lowest rail when that comes up last, fenced as in fail-back
        others = [what for what in HARD_CASES if what not in ("points", "failbacks", "blocked")]
        assert {what: getattr(verdict, what) for what in others} == dict.fromkeys(others, 0)


def test_a_run_can_be_read_message_by_message(capsys: pytest.CaptureFixture[str]) -> None:
    collective_world.main(["--seed", "5", "--size", "2", "--collectives", "1", "--faults", "", "--text"])
    text = capsys.readouterr().out
    assert text.startswith("Verdict(seed=5")
    assert re.search(r"^ +\d+\.\d{3} ms  0 -> 1 rail [01]: DATA \d+ \(0, 0\) \d+ B$", text, re.MULTILINE)
    assert re.search(r"rank 1: \w+ 0 is done", text)


def test_a_violation_prints_the_line_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collective_world, "PATIENCE_S", 0.005)
    with pytest.raises(Violation) as first:
        CollectiveWorld(11, 3, 1, 2, ("crash",)).run()
    line = str(first.value).split("; replay: ")[1]
    assert line == "python -m helixrt.emulate.collective_world --seed 11 --size 3 --rails 1 --collectives 2 --faults crash"
    with pytest.raises(Violation) as again:
        collective_world.main(line.split()[3:])
    assert str(again.value) == str(first.value)


# ---------------------------------------------------------------- rules broken on purpose


def received_before_it_was_reduced_from(patch: Patch) -> None:
    """A slot is received into while a reduction still reads it."""
    receive = Builder.receive_reduced

    def hasty(
        self: Builder, peer: int, left: Region, into: Region, waiting: Region, emptied: Any, ready: Any = (), last: bool = False
    ) -> int | None:
        return receive(self, peer, left, into, waiting, [], ready, last)

    patch.setattr(Builder, "receive_reduced", hasty)


def forwarded_before_it_has_come(patch: Patch) -> None:
    """A chunk is sent on without waiting for what puts it in its place."""
    send = Builder.send
    patch.setattr(Builder, "send", lambda self, peer, region, *after, empty=False: send(self, peer, region, empty=empty))


def what_is_queued_at_the_first_error_is_forgotten(patch: Patch) -> None:
    """Collectives that had not begun are neither failed nor skipped."""
    break_ = CollectiveMachine._break

    def forgetful(self: CollectiveMachine, cause: Cause, actions: list[c.Action]) -> None:
        mine: list[c.Action] = []
        break_(self, cause, mine)
        actions += [action for action in mine if not isinstance(action, c.Skipped)]

    patch.setattr(CollectiveMachine, "_break", forgetful)


def a_message_takes_the_place_of_a_collective(patch: Patch) -> None:
    """A point-to-point message counts as a collective, which may begin only when another has ended."""
    start = CollectiveMachine._start

    def counting(self: CollectiveMachine, event: c.Submitted, actions: list[c.Action]) -> None:
        start(self, event, actions)
        self._collectives += event.op < 0 and bool(event.plan.nodes)

    patch.setattr(CollectiveMachine, "_start", counting)


BROKEN = [
    received_before_it_was_reduced_from,
    forwarded_before_it_has_come,
    what_is_queued_at_the_first_error_is_forgotten,
    a_message_takes_the_place_of_a_collective,
    broken.the_ledger_forgets_its_floor,
    broken.frames_of_older_generations_count,
    broken.failed_rails_are_not_resent,
    broken.sent_without_credit,
    broken.what_nobody_asked_for_is_taken,
    broken.a_farewell_is_no_end,
    broken.the_last_rail_is_left_for_being_slow,
    broken.handshakes_are_not_answered,
    broken.silence_is_no_death,
    broken.kept_without_a_copy,
    broken.a_frame_that_was_written_in_part_is_written,
]


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: Patch) -> None:
    collective_tasks.plan_of.cache_clear()
    try:
        noticed_by(rule, monkeypatch, lambda seed: world(seed).run(), range(NOTICED_WITHIN), Violation)
    finally:
        collective_tasks.plan_of.cache_clear()
