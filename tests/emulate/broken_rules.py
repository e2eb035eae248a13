"""Rules of the protocols, broken on purpose at a seam: one method does something else. A world must notice each.

A rule is a function of a `MonkeyPatch`; its docstring says what is wrong then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from helixrt.protocol.hopping.hopper import Hopper, Policy
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link import send as link_send
from helixrt.protocol.link.failover import Failover
from helixrt.protocol.link.ledger import Ledger
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.paths import Paths
from helixrt.protocol.link.rails import Flight, Rail
from helixrt.protocol.link.receive import Inbox
from helixrt.protocol.link.send import Outbox
from helixrt.protocol.link.wire import Wire
from helixrt.protocol.liveness import Acknowledgements, Liveness
from helixrt.transport.copies import CopyMemory
from helixrt.transport.intake import Intake
from helixrt.transport.tcp import peer as tcp_peer
from helixrt.transport.tcp.connection import Connection

Patch = pytest.MonkeyPatch
Rule = Callable[[Patch], None]


def noticed_by(
    rule: Rule,
    patch: Patch,
    run: Callable[[int], object],
    seeds: Iterable[int],
    violation: type[Exception],
    known: Mapping[Rule, int] | None = None,
) -> None:
    """Fails unless one of the worlds `run(seed)` raises `violation` with the rule broken.

    `known` names a seed that noticed the rule when it was written; it is tried first, because a search can be long. Where
    the world draws otherwise since, the search finds another one.
    """
    rule(patch)
    tried = 0
    first = [known[rule]] if known and rule in known else []
    for seed in itertools.chain(first, seeds):
        tried += 1
        try:
            run(seed)
        except violation as found:
            print(f"{rule.__name__}: seed {seed}: {found}")
            return
    pytest.fail(f"{tried} seeds did not notice: {rule.__doc__}")


# ---------------------------------------------------------------- the link


def no_ledger(patch: Patch) -> None:
    """The receiver takes whatever comes, however often."""
    patch.setattr(Ledger, "__contains__", lambda self, sequence: False)


def the_ledger_forgets_its_floor(patch: Patch) -> None:
    """What came before everything missing is taken again."""
    patch.setattr(Ledger, "__contains__", lambda self, sequence: sequence in self.above)


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


def handshakes_are_not_answered(patch: Patch) -> None:
    """The peer's question what was received is heard, and not answered."""
    resume = Failover.resume

    def silent(self: Failover, rail: Rail, frame: frames.Frame, now: float, out: list[m.Action]) -> None:
        resume(self, rail, frame._replace(flags=frame.flags | frames.ANSWER), now, out)

    patch.setattr(Failover, "resume", silent)


def probes_wait_for_ever(patch: Patch) -> None:
    """A probe or a switch that is not answered in time does not fail its rail."""
    leave = Failover.leave

    def patient(self: Failover, rail: Rail, reason: str, now: float, out: list[m.Action]) -> None:
        if reason.startswith("no answer"):
            rail.wake_s = float("inf")
        else:
            leave(self, rail, reason, now, out)

    patch.setattr(Failover, "leave", patient)


def a_rail_is_given_up_while_its_peer_stands_still(patch: Patch) -> None:
    """A probe or a switch that is not answered fails its rail, also while the peer's kernel acknowledges."""
    patch.setattr(Failover, "_unanswered", lambda self, rail, now: now >= rail.wake_s)


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
    patch.setattr(Failover, "_may_leave", lambda self, rail: rail.usable)


def nobody_is_told_of_rails_that_return(patch: Patch) -> None:
    """A rail is in use again, and its return is not reported."""
    acknowledged = Failover.acknowledged

    def silent(self: Failover, now: float, out: list[m.Action]) -> None:
        mine: list[m.Action] = []
        acknowledged(self, now, mine)
        out += [action for action in mine if not isinstance(action, m.RailBack)]

    patch.setattr(Failover, "acknowledged", silent)


def acknowledgements_have_no_deadline(patch: Patch) -> None:
    """A rail that swallows a frame, and speaks otherwise, is kept."""
    begin = Link.__init__

    def patient(self: Link, generation: int, peer: int, rails: int, options: LinkOptions, draw: Any = None) -> None:
        begin(self, generation, peer, rails, replace(options, attempt_s=1e9), draw)

    patch.setattr(Link, "__init__", patient)


def what_a_kernel_acknowledges_is_no_sign_of_life(patch: Patch) -> None:
    """A peer whose process does not run is lost although its host answers."""
    patch.setattr(Link, "_acknowledged_by_kernel", lambda self, event, now, out: None)


def frames_of_older_generations_count(patch: Patch) -> None:
    """What an older generation sent is taken for this one's."""
    arrived = Link._frame_arrived

    def careless(self: Link, event: m.FrameArrived, now: float, out: list[m.Action]) -> None:
        if event.frame.generation < self.generation:
            event = replace(event, frame=event.frame._replace(generation=self.generation))
        arrived(self, event, now, out)

    patch.setattr(Link, "_frame_arrived", careless)


def what_nobody_asked_for_is_taken(patch: Patch) -> None:
    """A message without credit, and not a short one, finds memory."""
    landing = Inbox._landing

    def generous(self: Inbox, name: tuple[int, int], frame: frames.Frame) -> m.Landing:
        known = name in self.posted or name[0] in self.forgotten or name in self.abandoned
        return landing(self, name, frame) if known else m.Landing.HOLD

    patch.setattr(Inbox, "_landing", generous)


def a_farewell_is_no_end(patch: Patch) -> None:
    """A peer that closes on purpose is waited for."""
    patch.setattr(Link, "_all_came", lambda self: False)


def silence_is_no_death(patch: Patch) -> None:
    """A peer that says nothing more lives for ever."""
    silent = Liveness.silent

    def deaf(self: Liveness, now: float) -> bool:
        silent(self, now)
        return False

    patch.setattr(Liveness, "silent", deaf)


# ---------------------------------------------------------------- what carries out the link's actions


def kept_without_a_copy(patch: Patch) -> None:
    """A short message that counts as sent is sent from its caller's memory."""
    patch.setattr(CopyMemory, "copy", lambda self, data: data)
    patch.setattr(CopyMemory, "give", lambda self, data: None)


def what_is_held_is_given_back_at_once(patch: Patch) -> None:
    """Memory of a short message that waits for its receiver is used for the next one."""
    taken: dict[int, memoryview] = {}
    patch.setattr(CopyMemory, "take", lambda self, size: taken.setdefault(size, memoryview(bytearray(size))))
    patch.setattr(CopyMemory, "give", lambda self, data: None)


def detached_without_a_copy(patch: Patch) -> None:
    """What a rail has yet to write of a forgotten message stays in its caller's memory."""
    patch.setattr(Connection, "detach", lambda self, name: None)


def a_frame_that_was_written_in_part_is_written(patch: Patch) -> None:
    """What the kernel did not take of a frame is dropped."""
    advance = Connection._advance

    def generous(self: Connection, count: int) -> None:
        whole = 0
        for out in self._queue:
            whole += out.left
            if whole >= count:
                break
        advance(self, whole)

    patch.setattr(Connection, "_advance", generous)


def a_copy_begins_where_the_last_one_broke_off(patch: Patch) -> None:
    """A message that comes a second time is put behind what came of it before."""
    patch.setattr(Intake, "restart", lambda self: None)


def a_full_connection_is_silence(patch: Patch) -> None:
    """A rail that is full, because its peer is stopped, counts as silent although the peer's kernel answers elsewhere."""

    def alone(rail: Acknowledgements, control: Acknowledgements | None) -> float:
        return rail.last_s

    patch.setattr(tcp_peer, "acknowledged_s", alone)


# ---------------------------------------------------------------- paths


def another_switch_at_once(patch: Patch) -> None:
    """After a hop nothing holds the next one back."""
    go = Hopper._go

    def restless(self: Hopper, *what: Any) -> None:
        go(self, *what)
        self._hold_until_s = -math.inf

    patch.setattr(Hopper, "_go", restless)


def a_path_that_failed_is_taken(patch: Patch) -> None:
    """The policy chooses among all paths."""
    patch.setattr(Policy, "_others", lambda self: sorted(set(range(len(self.under_way))) - {self.path}))


def a_path_that_failed_is_kept(patch: Patch) -> None:
    """The policy does not leave a path that is lost."""
    patch.setattr(Policy, "_leave_lost", lambda self, now, out: None)


def a_path_gets_all_there_is(patch: Patch) -> None:
    """No bound of what is under way on a path."""
    patch.setattr(Paths, "room", lambda self, length: not self.policy.looking and self._now >= self._from_s)


def the_policy_is_not_woken(patch: Patch) -> None:
    """Its deadlines pass, and it does not hear of it."""
    patch.setattr(Hopper, "deadline", math.inf)


def long_messages_go_where_least_waits(patch: Patch) -> None:
    """The path that the policy chose is not asked for."""

    def least(self: Paths, flight: Flight, carriers: list[Rail], now: float, out: list[m.Action]) -> Rail:
        return min(carriers, key=lambda rail: rail.bytes)

    patch.setattr(Paths, "rail_for", least)
