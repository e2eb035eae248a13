"""One end of a simulated link: a driver on memory that remembers whose it is, and the caller above it.

In: what the network brings and what the world lets the caller do. Out: calls of the network for what the link asks
for; `Wrong` as soon as a promise of the link is broken: a message handed on twice or before it is whole, memory
written or read that is its owner's again, what must not be repeated sent twice, bounds overrun, a busy loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Kind
from helixrt.protocol.link.machine import Link

if TYPE_CHECKING:
    from helixrt.emulate.link_network import Connection

Name = tuple[int, int]  # op, index


class Wrong(AssertionError):
    """A promise of the link, or of its world, was broken."""


def check(rule: bool, what: str) -> None:
    if not rule:
        raise Wrong(what)


class Surroundings(ABC):
    """What an end needs of its world."""

    now: float
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
    def acknowledged(self, me: int) -> Sequence[int]:
        """Rails whose other end's kernel acknowledges what `me` sends, also while the process there is stopped."""

    @abstractmethod
    def note(self, end: int, *what: object) -> None:
        """For whoever reads the run."""

    @abstractmethod
    def transmit(self, me: int, action: m.SendFrame | m.SendData) -> None: ...

    @abstractmethod
    def restore(self, me: int, rail: int) -> None: ...

    @abstractmethod
    def close(self, me: int, rail: int) -> None: ...


def content(end: int, name: Name) -> str:
    """What `end` sends as message `name`."""
    return f"{name} of {end}"


class End:
    def __init__(self, world: Surroundings, me: int, link: Link) -> None:
        self.world, self.me, self.link = world, me, link
        self.lent: dict[Name, str] = {}  # receive memory: name -> what stands in it
        self.submitted: dict[Name, m.Submit] = {}
        self.sent: set[Name] = set()
        self.received: list[Name] = []
        self.failed: set[tuple[Name, bool]] = set()
        self.forgotten: set[int] = set()
        self.copies: set[Name] = set()
        self.held: dict[Name, str] = {}
        self.landing: dict[int, tuple[int, Name, m.Landing]] = {}  # rail -> sequence, name, where
        self.connections: dict[int, Connection] = {}
        self.usable: set[int] = set()  # rails, by what the link reported
        self.used: set[int] = set()  # rails that have been usable
        self.ended: m.Lost | m.PeerAborted | m.PeerClosed | None = None
        self.dead = False
        self.next_tick = 0.0
        self.ticked_s = -1.0
        self.newest = 0  # sequence number that came
        self.stopped_until = 0.0  # its process stands still, and what is for it waits

    # ---- events

    def tell(self, event: m.Event) -> None:
        if self.dead:
            return
        before = self._usable()
        actions = self.link.on(event, self.world.now)
        if isinstance(event, m.FrameArrived) and event.frame.kind is Kind.DATA and not self.ended:
            accepts = sum(isinstance(action, m.Accept) for action in actions)
            check(accepts == 1 or self.link.closed, f"{accepts} Accepts for {event}")
        if isinstance(event, m.RailUp) and event.rail in self._usable() - self.used:
            self.usable.add(event.rail)  # a first connection is used without a report
        for action in actions:
            self.do(action)
        self._check_bounds(event)
        self._check_reports(event, before)
        self.schedule_tick()

    def _usable(self) -> set[int]:
        return {rail.number for rail in self.link.rails if rail.usable}

    def _check_bounds(self, event: m.Event) -> None:
        box, options = self.link._outbox, self.link.options
        check(self.link._inbox.held_bytes <= options.eager_memory_bytes, "eager memory overrun")
        check(box.bytes <= options.window_bytes or sum(f.bytes > 0 for f in box.flights.values()) == 1, "window overrun")
        if isinstance(event, m.Tick) and self.ended is None:
            again = self.link.deadline <= self.world.now
            check(not again or self.ticked_s < self.world.now, f"a busy loop: {self.link.deadline} after two Ticks")
            self.ticked_s = self.world.now

    def _check_reports(self, event: m.Event, before: set[int]) -> None:
        """What was reported of rails is what they are."""
        if self.link.closed:
            return
        after = self._usable()
        self.used |= after
        check(self.usable == after, f"rails {after} are usable, reported were {self.usable}")
        check(not isinstance(event, m.RailSlow) or not before or bool(after), "the last rail was left for being slow")

    def schedule_tick(self) -> None:
        due = self.link.deadline
        if due < float("inf") and (self.next_tick <= self.world.now or due < self.next_tick):
            self.next_tick = due = max(due, self.world.now)
            self.world.at(due, self.tick)

    def tick(self) -> None:
        if self.dead or self.world.stopped(self.me, self.tick, behind_s=1e-6):  # a Tick comes after all that could be read
            return
        if self.world.now >= self.link.deadline:
            for rail in self.world.acknowledged(self.me):
                self.tell(m.Acknowledged(rail, self.world.now))
            self.tell(m.Tick())
        else:
            self.schedule_tick()

    # ---- actions

    def do(self, action: m.Action) -> None:
        self.world.note(self.me, action)
        match action:
            case m.SendFrame():
                self.world.transmit(self.me, action)
            case m.SendData():
                self._send(action)
            case m.Keep(op, index):
                self.copies.add((op, index))
            case m.Release(op, index):
                self.copies.remove((op, index))
            case m.Detach(op, index):
                check((op, index) not in self.sent, "Detach of what was sent")
            case m.Sent(op, index):
                self._sent((op, index))
            case m.Received(op, index):
                name = (op, index)
                check(name not in self.received, f"Received {name} twice")
                check(self.lent.pop(name) == content(1 - self.me, name), f"{name} handed on before it was whole")
                self.received.append(name)
            case m.Failed(op, index, sending, _):
                check(((op, index), sending) not in self.failed, f"Failed {op, index} twice")
                self.failed.add(((op, index), sending))
                if not sending:
                    del self.lent[op, index]
            case m.Accept(rail, sequence, op, index, landing):
                check(rail not in self.landing, f"Accept on rail {rail} before the last payload's end")
                self.landing[rail] = (sequence, (op, index), landing)
                if landing is m.Landing.PLACE:
                    self._write((op, index), "half")
            case m.Discard(rail):
                sequence, name, landing = self.landing[rail]
                self.landing[rail] = (sequence, name, m.Landing.DROP)
            case m.Deliver(op, index):
                self._write((op, index), self.held.pop((op, index)))
            case m.Free(op, index):
                del self.held[op, index]
            case _:
                self._do_rare(action)

    def _do_rare(self, action: m.Action) -> None:
        match action:
            case m.RestoreRail(rail):
                self.world.restore(self.me, rail)
            case m.ResetRail(rail):
                self.world.close(self.me, rail)
            case m.RailLeft(rail, _, _, usable):
                check(rail in self.usable, f"rail {rail} was left, and had not been in use")
                self.usable.remove(rail)
                check(usable == len(self.usable), f"{usable} rails are said to be usable: {self.usable}")
            case m.RailBack(rail, usable):
                check(rail not in self.usable, f"rail {rail} is back, and had not been left")
                self.usable.add(rail)
                check(usable == len(self.usable), f"{usable} rails are said to be usable: {self.usable}")
            case m.Lost() | m.PeerAborted() | m.PeerClosed():
                check(self.ended is None, "ended twice")
                self.ended = action
            case _:
                raise Wrong(f"an unknown action: {action}")

    def _send(self, action: m.SendData) -> None:
        frame, world = action.frame, self.world
        name = (frame.op, frame.index)
        mine = self.submitted[name]
        check(mine.length == frame.length, f"{name} with a wrong length")
        given_back = name in self.sent or mine.op in self.forgotten or (name, True) in self.failed
        check(not given_back or name in self.copies, f"{name} sent from memory that was given back")
        world.sends[self.me, name] = world.sends.get((self.me, name), 0) + 1
        check(mine.repeatable or world.sends[self.me, name] == 1, f"{name} must not be sent twice")
        world.transmit(self.me, action)

    def _sent(self, name: Name) -> None:
        check(name in self.submitted and name not in self.sent, f"Sent {name} twice")
        if name not in self.copies:
            peer = self.world.ends[1 - self.me]
            whole = name in self.world.arrived[peer.me] or name[0] in peer.forgotten or (name, False) in peer.failed
            check(whole, f"Sent {name}, which has not arrived")
        self.sent.add(name)

    def _write(self, name: Name, what: str) -> None:
        check(name in self.lent, f"{what!r} written into memory of {name}, which is its owner's again")
        self.lent[name] = what

    def payload(self, rail: int, sequence: int) -> None:
        """The rest of the payload under way came in."""
        number, name, landing = self.landing.pop(rail)
        check(number == sequence, f"payload {sequence} came, {number} is under way")
        what = content(1 - self.me, name)
        if landing is m.Landing.PLACE:
            self._write(name, what)
        elif landing is m.Landing.HOLD:
            self.held[name] = what
        if landing is not m.Landing.DROP:
            self.world.arrived[self.me].add(name)
            check(sequence > self.newest or not self.world.ordered, f"{name}, number {sequence}, after {self.newest}")
            self.newest = sequence
        self.tell(m.PayloadArrived(rail, sequence))

    # ---- the caller

    def submit(self, event: m.Submit) -> None:
        if self.world.stopped(self.me, self.submit, event):
            return
        if event.op not in self.forgotten and not self.ended:
            self.submitted[event.op, event.index] = event
            self.tell(event)

    def post(self, event: m.Post) -> None:
        if self.world.stopped(self.me, self.post, event):
            return
        if event.op not in self.forgotten and not self.ended:
            self.lent[event.op, event.index] = "nothing"
            self.tell(event)

    def forget(self, op: int) -> None:
        if self.world.stopped(self.me, self.forget, op):
            return
        self.forgotten.add(op)
        for name in [name for name in self.lent if name[0] == op]:
            del self.lent[name]
        self.tell(m.Forget(op))

    def slow(self, rail: int) -> None:
        if not self.world.stopped(self.me, self.slow, rail):
            self.tell(m.RailSlow(rail))

    def mended(self, rail: int) -> None:
        if not self.world.stopped(self.me, self.mended, rail):
            self.tell(m.RailMended(rail))
