"""One end of a simulated link: production's `Peer` and its `Link`, and a caller above them that checks every promise.

In: what the network brings and what the world lets the caller do. Out: calls of the network; `Wrong` as soon as a promise
of the link is broken. The caller's memory is real: what it lends has the bytes of its message, and is overwritten at the
moment it is the caller's again. So a message that is handed on before it is whole, sent from memory that was given back, or
written into such memory, shows in its bytes.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from helixrt.emulate.seeded import check, content
from helixrt.emulate.streams import SimulatedConnection, SimulatedHost
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.transport.contract import Lost, Outcome, PeerAborted, Received, Sent
from helixrt.transport.intake import Stage
from helixrt.transport.tcp.peer import Peer

Name = tuple[int, int]  # op, index


class Surroundings(ABC):
    """What an end needs of its world."""

    now: float
    random: random.Random
    stage: Stage
    ends: list[End]
    ordered: bool  # no rail reorders, doubles or loses, and the link is not striped: messages come in their order
    sends: dict[tuple[int, Name], int]  # (end, message) -> how often it was handed to a rail
    arrived: tuple[set[Name], set[Name]]  # [end] messages that were whole here

    @abstractmethod
    def at(self, when: float, what: Callable[..., None], *args: Any) -> None: ...

    @abstractmethod
    def stopped(self, me: int, what: Callable[..., None], *args: Any, behind_s: float = 0.0) -> bool:
        """Whether the process of `me` is stopped: then `what` comes when it goes on."""

    @abstractmethod
    def note(self, end: int, *what: object) -> None:
        """A line of the run's trace."""

    @abstractmethod
    def restore(self, me: int, rail: int) -> None: ...

    @abstractmethod
    def look_for(self, me: int, rail: int) -> None: ...


class Inbox:
    """Memory that the caller lends for a message, or a sink that takes it piece by piece."""

    def __init__(self, name: Name, length: int) -> None:
        self.name, self.memory = name, memoryview(bytearray(b"\xaa" * length))
        self.ended = False  # it is the caller's again
        self._at = 0

    def __len__(self) -> int:
        return len(self.memory)

    def take(self, at: int, piece: memoryview) -> None:
        check(not self.ended, f"a piece of {self.name}, which is its owner's again")
        check(at == self._at, f"bytes of {self.name} from {at} on: {self._at} is the next")
        self._at += len(piece)
        self.memory[at : at + len(piece)] = piece

    def end(self) -> None:
        self.ended = True
        self.memory[:] = b"\xbb" * len(self.memory)

    def check_untouched(self) -> None:
        check(self.memory == b"\xbb" * len(self.memory), f"memory of {self.name} was written, which is its owner's again")


class End(SimulatedHost):
    def __init__(self, world: Surroundings, me: int, link: Link) -> None:
        super().__init__(world.random, world.stage)
        self.world, self.me, self.link = world, me, link
        self._on, link.on = link.on, self._observed  # type: ignore[method-assign]
        self.peer = Peer(self, 1 - me, link, [], ())
        self.lent: dict[Name, Inbox] = {}
        self.returned: list[Inbox] = []
        self.sources: dict[Name, memoryview] = {}
        self.submitted: dict[Name, m.Submit] = {}
        self.sent: set[Name] = set()
        self.received: list[Name] = []
        self.failures: set[tuple[Name, bool]] = set()
        self.forgotten: set[int] = set()
        self.copies_of: set[Name] = set()
        self.usable: set[int] = set()  # rails, by what the link reported
        self.used: set[int] = set()  # rails that have been usable
        self.noted, self.to_note = 0, 0  # what was said for the record
        self.ended: Lost | PeerAborted | None = None
        self.failure: m.Failure | None = None  # why its link was lost
        self.dead = False
        self.next_tick = 0.0
        self.ticked_s = -1.0
        self.newest = 0  # sequence number that came
        self.stopped_until = 0.0  # its process is stopped, and its events wait

    # ---- what its peer asks for

    @property
    def now(self) -> float:
        return self.world.now

    def restore(self, peer: Peer, rail: int) -> None:
        self.world.restore(self.me, rail)

    def look_for(self, peer: Peer, rail: int) -> None:
        self.world.look_for(self.me, rail)

    def note(self, peer: Peer, event: m.ForTheRecord) -> None:
        self.noted += 1

    def failed(self, peer: Peer, event: m.Failed) -> None:
        name = (event.op, event.index)
        check((name, event.sending) not in self.failures, f"Failed {name} twice")
        self.failures.add((name, event.sending))
        if event.sending:
            self._take_source_back(name)
        else:
            self._take_back(name)

    # ---- turns

    def turn(self, what: Callable[..., None], *args: Any) -> None:
        """Pass an event to this end; then it writes what it can, and its caller gets the outcomes."""
        if self.dead:
            return
        what(*args)
        self.write()
        outcomes, self.outcomes = self.outcomes, []
        for outcome in outcomes:
            self._outcome(outcome)
        if self.settled():
            self.schedule_tick()

    def tell(self, event: m.Event) -> None:
        self.turn(self.peer.tell, event)

    def ready(self, connection: SimulatedConnection) -> None:
        self.turn(self.read, self.peer, connection)

    def go_on(self, connection: SimulatedConnection) -> None:
        self.turn(self.writable, connection)

    def schedule_tick(self) -> None:
        due = self.link.deadline
        if due < float("inf") and (self.next_tick <= self.world.now or due < self.next_tick):
            self.next_tick = due = max(due, self.world.now)
            self.world.at(due, self.tick)

    def tick(self) -> None:
        if self.dead or self.world.stopped(self.me, self.tick, behind_s=1e-6):  # a Tick comes after all that could be read
            return
        if self.world.now >= self.link.deadline:
            self.turn(self.peer.tick)
        else:
            self.schedule_tick()

    # ---- events and actions of the machine

    def _observed(self, event: m.Event, now: float) -> list[m.Action]:
        before = self._usable()
        if isinstance(event, m.FrameArrived):
            self.world.note(self.me, "rail", event.rail, "brings", event.frame)
        elif isinstance(event, m.PayloadArrived):
            self._whole(event)
        actions = self._on(event, now)
        if isinstance(event, m.FrameArrived) and event.frame.kind is Kind.DATA and not self.ended:
            accepts = sum(isinstance(action, m.Accept) for action in actions)
            check(accepts == 1 or self.link.closed, f"{accepts} Accepts for {event}")
        if isinstance(event, m.RailUp) and event.rail in self._usable() - self.used:
            self.usable.add(event.rail)  # a first connection is used without a report
        for action in actions:
            self.world.note(self.me, action)
            self.said(action)
        self._check_bounds(event)
        self.check_reports(event, before)
        return actions

    def said(self, action: m.Action) -> None:
        match action:
            case m.SendData(rail, frame):
                self.begins(rail, frame)
            case m.Keep(op, index):
                self.copies_of.add((op, index))
            case m.Release(op, index):
                self.copies_of.remove((op, index))
            case m.Sent(op, index):
                check((op, index) in self.copies_of or self._is_over((op, index)), f"Sent {op, index}, which has not arrived")
            case m.Detach(op, index):
                check((op, index) not in self.sent, "Detach of what was sent")
            case m.RailLeft(rail, _, _, usable):
                self.to_note += 1
                check(rail in self.usable, f"rail {rail} was left, and had not been in use")
                self.usable.remove(rail)
                check(usable == len(self.usable), f"{usable} rails are said to be usable: {self.usable}")
            case m.RailBack(rail, usable):
                self.to_note += 1
                check(rail not in self.usable, f"rail {rail} is back, and had not been left")
                self.usable.add(rail)
                check(usable == len(self.usable), f"{usable} rails are said to be usable: {self.usable}")
            case m.Lost(_, failure):
                self.failure = failure

    def _usable(self) -> set[int]:
        return {rail.number for rail in self.link.rails if rail.usable}

    def _whole(self, event: m.PayloadArrived) -> None:
        arrival = self.link.rails[event.rail].arrival
        if arrival is None or arrival.landing is m.Landing.DROP:
            return
        name = (arrival.frame.op, arrival.frame.index)
        self.world.arrived[self.me].add(name)
        check(
            event.sequence > self.newest or not self.world.ordered, f"{name}, number {event.sequence}, after {self.newest}"
        )
        self.newest = event.sequence

    def begins(self, rail: int, frame: Frame) -> None:
        """A message is handed to a rail."""
        name, world = (frame.op, frame.index), self.world
        mine = self.submitted[name]
        check(mine.length == frame.length, f"{name} with a wrong length")
        world.sends[self.me, name] = world.sends.get((self.me, name), 0) + 1
        check(mine.repeatable or world.sends[self.me, name] == 1, f"{name} must not be sent twice")

    def _is_over(self, name: Name) -> bool:
        """The other end has received a message of this one completely, or does not need it any more."""
        peer = self.world.ends[1 - self.me]
        return name in self.world.arrived[peer.me] or name[0] in peer.forgotten or (name, False) in peer.failures

    def _check_bounds(self, event: m.Event) -> None:
        box, options = self.link._outbox, self.link.options
        check(self.link._inbox.held_bytes <= options.eager_memory_bytes, "eager memory overrun")
        check(box.bytes <= options.window_bytes or sum(f.bytes > 0 for f in box.flights.values()) == 1, "window overrun")
        if isinstance(event, m.Tick) and self.ended is None:
            again = self.link.deadline <= self.world.now
            check(not again or self.ticked_s < self.world.now, f"a busy loop: {self.link.deadline} after two Ticks")
            self.ticked_s = self.world.now

    def check_reports(self, event: m.Event, before: set[int]) -> None:
        """What was reported of rails is what they are."""
        if self.link.closed:
            return
        after = self._usable()
        self.used |= after
        check(self.usable == after, f"rails {after} are usable, reported were {self.usable}")
        check(not isinstance(event, m.RailSlow) or not before or bool(after), "the last rail was left for being slow")

    # ---- the caller

    def _outcome(self, outcome: Outcome) -> None:
        match outcome:
            case Sent(_, op, index):
                if op not in self.forgotten:
                    self._sent((op, index))
            case Received(_, op, index):
                if op not in self.forgotten:
                    self._received((op, index))
            case Lost() | PeerAborted():
                check(self.ended is None, "ended twice")
                self.ended = outcome
                for name in list(self.lent):
                    self._take_back(name)
                for name in self.sources:
                    self._take_source_back(name)

    def _sent(self, name: Name) -> None:
        check(name in self.submitted and name not in self.sent, f"Sent {name} twice")
        self.sent.add(name)
        self._take_source_back(name)

    def _received(self, name: Name) -> None:
        check(name not in self.received, f"Received {name} twice")
        inbox = self.lent[name]
        check(inbox.memory == content(1 - self.me, name, len(inbox)), f"{name} handed on with other bytes than were sent")
        self.received.append(name)
        self._take_back(name)

    def _take_back(self, name: Name) -> None:
        inbox = self.lent.pop(name)
        inbox.end()
        self.returned.append(inbox)

    def _take_source_back(self, name: Name) -> None:
        source = self.sources[name]
        source[:] = b"\xcc" * len(source)

    def submit(self, event: m.Submit) -> None:
        if self.dead or self.world.stopped(self.me, self.submit, event) or event.op in self.forgotten or self.ended:
            return
        name = (event.op, event.index)
        self.submitted[name] = event
        self.sources[name] = memoryview(bytearray(content(self.me, name, event.length)))
        self.turn(self.peer.submit, event, self.sources[name])

    def post(self, event: m.Post, sink: bool) -> None:
        if self.dead or self.world.stopped(self.me, self.post, event, sink) or event.op in self.forgotten or self.ended:
            return
        name = (event.op, event.index)
        inbox = self.lent[name] = Inbox(name, event.length)
        self.turn(self.peer.post, event, inbox if sink else inbox.memory)

    def forget(self, op: int) -> None:
        if self.dead or self.world.stopped(self.me, self.forget, op):
            return
        self.forgotten.add(op)
        self.peer.forget(op)
        for name in [name for name in self.lent if name[0] == op]:
            self._take_back(name)
        for name in [name for name in self.sources if name[0] == op]:
            self._take_source_back(name)
        self.turn(lambda: None)

    def slow(self, rail: int) -> None:
        if not self.world.stopped(self.me, self.slow, rail):
            self.tell(m.RailSlow(rail))

    def mended(self, rail: int) -> None:
        if not self.world.stopped(self.me, self.mended, rail):
            self.tell(m.RailMended(rail))

    def judge(self) -> None:
        """Whatever came of it."""
        for inbox in self.returned:
            inbox.check_untouched()
        check(self.noted == self.to_note, f"{self.to_note} reports for the record, {self.noted} came")
