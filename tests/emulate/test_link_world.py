"""Links under seeded faults: every message arrives once, whole, or its link is lost for a reason; rules broken on purpose.

A failing seed prints the line that replays it (`python -m helixrt.emulate.link_world --seed …`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from helixrt.emulate import link_world
from helixrt.emulate.link_world import LinkWorld, Verdict, Violation
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link import send as link_send
from helixrt.protocol.link.failover import Failover
from helixrt.protocol.link.ledger import Ledger
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.rails import Rail
from helixrt.protocol.link.receive import Inbox
from helixrt.protocol.link.send import Outbox
from helixrt.protocol.link.wire import Wire
from tests.emulate.break_line import break_line
from tests.emulate.sweeps import SWEEP_LIMIT_S, sweep_all

SEEDS = 1_000
SLOW_SEEDS, PARTS = 20_000, 8
HARD_CASES = tuple(f.name for f in fields(Verdict)[4:])


def sweep(seeds: range) -> tuple[Counter[str], list[str]]:
    totals: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            verdict = LinkWorld(seed).run()
        except Violation as broken:
            violations.append(str(broken))
        else:
            totals.update({what: getattr(verdict, what) for what in HARD_CASES})
    return totals, violations


def test_every_message_arrives_once_whatever_rails_do(seed: int) -> None:
    sweep_all(sweep, seed, SEEDS, HARD_CASES)


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_LIMIT_S)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_message_arrives_once_in_twenty_thousand_worlds(part: int, seed: int) -> None:
    sweep_all(sweep, seed, SLOW_SEEDS // PARTS, HARD_CASES)


def test_a_seed_replays_exactly_and_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    link_world.main(["--seed", "7", "--text"])
    first = capsys.readouterr().out
    link_world.main(["--seed", "7", "--text"])
    assert capsys.readouterr().out == first
    assert re.search(r"^ +\d+\.\d{3} ms  end [01]  rail \d takes DATA \d+ \(\d, \d\) \d+ B$", first, re.MULTILINE)
    assert re.search(r"end [01]  rail \d brings \w+", first)


def test_a_violation_prints_the_line_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_world, "END_S", 0.01)
    with pytest.raises(Violation) as broken:
        LinkWorld(3).run()
    line = str(broken.value).split("; replay: ")[1]
    assert line == "python -m helixrt.emulate.link_world --seed 3 --text"
    with pytest.raises(Violation) as again:
        link_world.main(line.split()[3:])
    assert str(again.value) == str(broken.value)


# ---------------------------------------------------------------- rules broken on purpose

Patch = pytest.MonkeyPatch


def no_ledger(patch: Patch) -> None:
    """The receiver takes whatever comes, however often."""
    patch.setattr(Ledger, "__contains__", lambda self, sequence: False)


def counted_before_it_is_whole(patch: Patch) -> None:
    """A message enters the ledger with its header."""
    announce = Inbox.announce

    def early(self: Inbox, rail: Rail, frame: frames.Frame, current: bool, out: list[m.Action]) -> None:
        announce(self, rail, frame, current, out)
        if current:
            self.ledger.take(frame.sequence)

    patch.setattr(Inbox, "announce", early)


def older_copies_keep_writing(patch: Patch) -> None:
    """Nobody tells the rail whose copy was superseded, or whose operation was forgotten, to let go of the memory."""
    patch.setattr(Inbox, "_let_go", lambda self, rail, out: None)


def sent_without_credit(patch: Patch) -> None:
    """Long messages do not wait for their receiver."""
    submit = Outbox.submit

    def eager(self: Outbox, event: m.Submit, out: list[m.Action]) -> None:
        self.credits.setdefault((event.op, event.index), event.length)
        submit(self, event, out)

    patch.setattr(Outbox, "submit", eager)


def eager_memory_without_end(patch: Patch) -> None:
    """The sender does not count what waits at the receiver."""
    patch.setattr(link_send, "eager_charge", lambda length: 0)


def failed_rails_are_not_resent(patch: Patch) -> None:
    """What was on a failed rail is given up."""
    resolve = Outbox.resolve

    def forgetful(self: Outbox, rail: Rail, why: Any, out: list[m.Action]) -> None:
        resolve(self, rail, why, out)
        self.again.clear()

    patch.setattr(Outbox, "resolve", forgetful)


def what_must_not_be_repeated_is(patch: Patch) -> None:
    """Everything is resent."""
    resolve = Outbox.resolve

    def careless(self: Outbox, rail: Rail, why: Any, out: list[m.Action]) -> None:
        for flight in rail.flights.values():
            if flight.message is not None:
                flight.message.repeatable = True
        resolve(self, rail, why, out)

    patch.setattr(Outbox, "resolve", careless)


def handshakes_are_asked_once(patch: Patch) -> None:
    """A RESUME that was lost with the rail it was on is not repeated."""
    handshake = Failover._handshake

    def once(self: Failover, rail: Rail, now: float, out: list[m.Action]) -> None:
        if rail.via[0] < 0:
            handshake(self, rail, now, out)

    patch.setattr(Failover, "_handshake", once)


def probes_wait_for_ever(patch: Patch) -> None:
    """A probe or a switch that is not answered in time does not fail its rail."""
    leave = Failover.leave

    def patient(self: Failover, rail: Rail, reason: str, now: float, out: list[m.Action]) -> None:
        if reason.startswith("no answer"):
            rail.wake_s = float("inf")
        else:
            leave(self, rail, reason, now, out)

    patch.setattr(Failover, "leave", patient)


def acknowledged_with_its_header(patch: Patch) -> None:
    """The receiver acknowledges a message whose header it has seen."""
    counters = Wire.counters

    def hasty(self: Wire) -> bytes:
        floor = self.inbox.ledger.floor
        arriving = [rail.arrival.frame.sequence for rail in self.rails if rail.arrival is not None and rail.arrival.counts]
        if floor + 1 in arriving:
            return frames.counters_body(frames.Counters(floor + 1, self.inbox.consumed))
        return counters(self)

    patch.setattr(Wire, "counters", hasty)


def no_gaps_in_acknowledgements(patch: Patch) -> None:
    """The newest number received counts as if all before it had come."""
    take = Ledger.take

    def leap(self: Ledger, sequence: int) -> bool:
        new = take(self, sequence)
        self.floor = max(self.floor, sequence)
        self.above = {number for number in self.above if number > self.floor}
        return new

    patch.setattr(Ledger, "take", leap)


def the_last_rail_is_left_for_being_slow(patch: Patch) -> None:
    """A slow rail is left though there is no other."""
    break_line(patch, (Failover, "slow", "if others and rail.usable and", "if rail.usable and"))


def nobody_is_told_of_rails_that_return(patch: Patch) -> None:
    """A rail is in use again, and its return is not reported."""
    break_line(patch, (Failover, "acknowledged", "out.append(RailBack(rail.number, self._usable()))", "pass"))


def acknowledgements_have_no_deadline(patch: Patch) -> None:
    """A rail that swallows a frame, and speaks otherwise, is kept."""
    break_line(patch, (Link, "_tick", "> options.attempt_s:", "> 1e9:"))


def what_a_kernel_acknowledges_is_no_sign_of_life(patch: Patch) -> None:
    """A peer whose process does not run is lost although its host answers."""
    break_line(patch, (Link, "_acknowledged_by_kernel", "if rail.up and event.at_s > rail.heard_s:", "if False:"))


BROKEN = [
    no_ledger,
    counted_before_it_is_whole,
    older_copies_keep_writing,
    sent_without_credit,
    eager_memory_without_end,
    failed_rails_are_not_resent,
    what_must_not_be_repeated_is,
    handshakes_are_asked_once,
    probes_wait_for_ever,
    acknowledged_with_its_header,
    no_gaps_in_acknowledgements,
    the_last_rail_is_left_for_being_slow,
    nobody_is_told_of_rails_that_return,
    acknowledgements_have_no_deadline,
    what_a_kernel_acknowledges_is_no_sign_of_life,
]


# The others are noticed among the first fifty from 0 on.
FIRST_SEEDS = {older_copies_keep_writing: 900, what_a_kernel_acknowledges_is_no_sign_of_life: 140}


@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Callable[[Patch], None], monkeypatch: Patch) -> None:
    rule(monkeypatch)
    first = FIRST_SEEDS.get(rule, 0)
    for seed in range(first, first + 3000):
        try:
            LinkWorld(seed).run()
        except Violation as found:
            print(f"{rule.__name__}: seed {seed}: {found}")
            return
    pytest.fail(f"3000 seeds did not notice: {rule.__doc__}")
