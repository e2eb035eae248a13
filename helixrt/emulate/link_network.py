"""The rails between the two ends of a simulated link: they delay, reorder, double, lose, fall silent, break and return.

In: frames as bytes, whole, as the ends' sockets give them up; and which ends want a rail restored. Out: bytes and errors at
the sockets of both ends, each at its own time. A rail has one connection after the other, counted by incarnation; each end
may close it or lose it in its own time. A control connection carries the reason of an end and loses nothing. Data for a
stopped process waits until the process continues, and fills its connections meanwhile.
"""

from __future__ import annotations

import errno
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from helixrt.emulate.link_end import End, Name, Surroundings
from helixrt.emulate.streams import SimulatedConnection, SimulatedSocket, join
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.liveness import Acknowledgements
from helixrt.transport.intake import Stage
from helixrt.transport.tcp.peer import CONTROL

LONG_BYTES = 1000  # a longer payload takes its time
MISHAPS = (m.Failure.PATH, m.Failure.PATH, m.Failure.DEVICE, m.Failure.CASCADE)
CAPACITIES_BYTES = (1500, 6000, 1 << 20)  # of a connection, each way
_CODES = {m.Failure.PATH: errno.ETIMEDOUT, m.Failure.DEVICE: errno.ENETDOWN}


@dataclass(eq=False)
class Incarnation:
    """One connection of a rail. What is a pair is per end."""

    rail: int
    number: int
    sockets: list[SimulatedSocket] = field(default_factory=list)
    connections: list[SimulatedConnection | None] = field(default_factory=lambda: [None, None])  # once it is used
    dead: bool = False  # nothing sent from now on arrives
    last: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when the newest frame towards an end arrives
    begun: list[bool] = field(default_factory=lambda: [False, False])  # a payload is on its way in
    blocked: list[bool] = field(default_factory=lambda: [False, False])  # for good: a part of it is missing
    behind: tuple[deque[tuple[frames.Frame, bytes]], ...] = field(default_factory=lambda: (deque(), deque()))  # that


def _words(what: object) -> str:
    if isinstance(what, m.SendFrame | m.SendData):
        return f"rail {what.rail} takes {_words(what.frame)}"
    if isinstance(what, frames.Frame):
        return f"{what.kind.name} {what.sequence or ''} ({what.op}, {what.index}) {what.length} B"
    return str(what)


class Network(Surroundings):
    """End 0 dials; end 1 waits to be reached."""

    def __init__(self, chance: random.Random, rails: int, trace: bool) -> None:
        self.random = chance
        self.rails = rails
        self.now, self.events = 0.0, 0
        self.trace: list[str] | None = [] if trace else None
        self.ends: list[End] = []
        self.arrived: tuple[set[Name], set[Name]] = (set(), set())
        self.sends: dict[tuple[int, Name], int] = {}
        self.ordered = False
        self.capacity_bytes = 1 << 20
        self.stage = Stage()
        self.incarnations = [0] * rails
        self.cable = [True] * rails  # a connection can be made, and carries
        self.mute = [[False, False] for _ in range(rails)]  # towards an end nothing arrives, without an error
        self.reorders, self.doubles, self.loses = False, 0.0, 0.0
        self.kernels = False  # they acknowledge what comes for a process that is stopped
        self.sockets: list[SimulatedSocket] = []
        self.refusals = 0  # attempts that failed while the peer carried out what asked for them
        self._newest: list[list[Incarnation | None]] = [[None, None] for _ in range(rails)]
        self._dialing = [False] * rails
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    # ---- time

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """At the same time, what was asked for first comes first."""
        self.events += 1
        heapq.heappush(self._queue, (when, self.events, what, args))

    def later(self, least: float, most: float, what: Callable[..., None], *args: Any) -> None:
        self.at(self.now + self.random.uniform(least, most), what, *args)

    def step(self, until: float) -> bool:
        """The next thing happens; False when nothing is to come before `until`."""
        if not self._queue or self._queue[0][0] >= until:
            return False
        self.now, _, what, args = heapq.heappop(self._queue)
        what(*args)
        return True

    def stopped(self, me: int, what: Callable[..., None], *args: Any, behind_s: float = 0.0) -> bool:
        until = self.ends[me].stopped_until
        if until <= self.now:
            return False
        self.at(until + behind_s, what, *args)
        return True

    def note(self, end: int, *what: object) -> None:
        if self.trace is not None:
            who = "both " if end > 1 else f"end {end}"
            self.trace.append(f"{self.now * 1e3:10.3f} ms  {who}  {' '.join(map(_words, what))}")

    # ---- connections

    def meet(self) -> None:
        """All that the ends have from the beginning: a control connection, and the first connections of the rails."""
        control = self._incarnation(CONTROL, 1)
        for end in self.ends:
            self.later(0, 0.003, self.connected, end.me, control)
        for rail in range(self.rails):
            self.connect(rail)

    def _incarnation(self, rail: int, number: int) -> Incarnation:
        made = Incarnation(rail, number)
        for me in range(2):
            made.sockets.append(
                SimulatedSocket(
                    self.random,
                    self.capacity_bytes if rail != CONTROL else 1 << 20,
                    partial(self.transmit, me, made),
                    partial(self._wake, me, made),
                    partial(self._closed, me, made),
                )
            )
        join(*made.sockets)
        self.sockets += made.sockets
        return made

    def connect(self, rail: int) -> None:
        if self.stopped(0, self.connect, rail):
            return
        self._dialing[rail] = False
        if not self.cable[rail] or any(end.dead for end in self.ends):
            self.ends[0].tell(m.RailDown(rail, m.Failure.PATH, "cannot connect"))
            return
        self.incarnations[rail] += 1
        made = self._incarnation(rail, self.incarnations[rail])
        for end in self.ends:
            self.later(0, 0.003, self.connected, end.me, made)

    def connected(self, me: int, made: Incarnation) -> None:
        if self.stopped(me, self.connected, me, made):
            return
        end, newest = self.ends[me], self.newest(made.rail, me)
        if end.dead or end.ended is not None or (newest is not None and newest.number > made.number):
            made.sockets[me].close()
            return
        connection = SimulatedConnection(made.sockets[me], end.peer, 1 - me, made.rail, partial(self._acknowledged, me, made))
        made.connections[me] = connection
        if made.rail == CONTROL:
            end.peer.control = connection
        else:
            self._newest[made.rail][me] = made
            self.note(me, f"rail {made.rail} connected, incarnation {made.number}")
            end.turn(end.peer.put_in_service, connection, made.number)
        self._ready(me, made)

    def newest(self, rail: int, me: int) -> Incarnation | None:
        """The connection that `me` has used last for this rail."""
        return None if rail == CONTROL else self._newest[rail][me]

    def restore(self, me: int, rail: int) -> None:
        if me == 0 and not self._dialing[rail]:
            if not self.cable[rail] and self.random.random() < 0.5:  # no route: that shows at once
                self.refusals += 1
                self.ends[0].peer.tell(m.RailDown(rail, m.Failure.PATH, "no route"))
                return
            self._dialing[rail] = True
            self.later(0.001, 0.02, self.connect, rail)

    def look_for(self, me: int, rail: int) -> None:
        if self.cable[rail] and not any(self.mute[rail]):
            self.later(0.001, 0.01, self._looked, me, rail)

    def _looked(self, me: int, rail: int) -> None:
        if not self.stopped(me, self._looked, me, rail) and self.ends[1 - me].dead:
            end = self.ends[me]
            end.turn(end.peer.nobody, rail, m.Failure.PEER_GONE, "no process listens there")

    def _closed(self, me: int, made: Incarnation) -> None:
        """`me` closed its end; the other one sees the end of the stream after what is under way, unless the rail is mute."""
        self.at(max(made.last[1 - me], self.now + 0.001), self.ended, 1 - me, made, None)

    def ended(self, me: int, made: Incarnation, failure: m.Failure | None) -> None:
        """A connection of `me` is over: its other end was closed, or it failed."""
        if self.stopped(me, self.ended, me, made, failure):
            return
        sock, connection = made.sockets[me], made.connections[me]
        if sock.closed or self.ends[me].dead or (made.rail != CONTROL and self.mute[made.rail][me]):
            return
        if failure is None:
            sock.at_end = True
        elif failure in _CODES:
            sock.fail(_CODES[failure])
        elif connection is not None:
            end = self.ends[me]
            end.turn(end.peer.broke, connection, failure, "flushed")
            return
        self._ready(me, made)

    def _acknowledged(self, me: int, made: Incarnation, now: float) -> Acknowledgements | None:
        """What the kernel of `me` reports about the other end's."""
        if not self.kernels or self.ends[1 - me].dead or made.dead or made.sockets[1 - me].closed:
            return None
        if made.rail != CONTROL and any(self.mute[made.rail]):
            return None
        sock = made.sockets[me]
        return Acknowledgements(sock.full_since_s if sock.full else now, sock.full)

    # ---- frames

    def transmit(self, me: int, made: Incarnation, frame: frames.Frame, unit: bytes) -> None:
        weather, sock = made.rail != CONTROL, made.sockets[me]
        if sock.full and sock.waiting - len(unit) < self.capacity_bytes:
            sock.full_since_s = self.now
        for copy in range(1 + (weather and self.random.random() < self.doubles)):
            sock.waiting += len(unit) * (copy > 0)
            lost = made.dead or sock.closed or (weather and self.random.random() < self.loses)
            when = self.now + (self.header_s(me, made, frame) if weather else 0.001)
            if not (self.reorders and weather):
                when = max(when, made.last[1 - me])
            made.last[1 - me] = max(when, made.last[1 - me])
            self.at(when, self._lost if lost else self._arrive, 1 - me, made, frame, unit)

    def header_s(self, me: int, made: Incarnation, frame: frames.Frame) -> float:
        """How long until the header that `me` sends now is at the other end, if nothing before it takes longer."""
        return self.random.uniform(0.0005, 0.02)

    def payload_s(self, made: Incarnation, frame: frames.Frame) -> float:
        """How long until the payload is there too."""
        return self.random.uniform(0.0, 0.03 if frame.length > LONG_BYTES else 0.001)

    def _lost(self, me: int, made: Incarnation, frame: frames.Frame, unit: bytes) -> None:
        made.sockets[1 - me].lost(len(unit))

    def _arrive(self, me: int, made: Incarnation, frame: frames.Frame, unit: bytes) -> None:
        if made.begun[me]:
            made.behind[me].append((frame, unit))
            return
        if self._is_cut(me, made):
            self._lost(me, made, frame, unit)
            return
        if frame.kind is not frames.Kind.DATA or not frame.length:
            made.sockets[me].arrive(unit)
        else:
            made.begun[me] = True
            made.sockets[me].arrive(unit[: frames.HEADER_BYTES])
            rest, took_s = unit[frames.HEADER_BYTES :], self.payload_s(made, frame)
            if len(rest) >= LONG_BYTES:
                at = self.random.randrange(1, len(rest))
                self.at(self.now + took_s * at / len(rest), self._payload, me, made, rest[:at], False)
                rest = rest[at:]
            self.at(self.now + took_s, self._payload, me, made, rest, True)
        self._ready(me, made)

    def _payload(self, me: int, made: Incarnation, part: bytes, last: bool) -> None:
        """A payload that was cut off blocks its connection: bytes of a stream do not go missing."""
        if self._is_cut(me, made):
            made.blocked[me] = True
        if made.blocked[me]:
            return
        made.sockets[me].arrive(part)
        self._ready(me, made)
        if not last:
            return
        made.begun[me] = False
        while made.behind[me] and not made.begun[me]:
            self._arrive(me, made, *made.behind[me].popleft())

    def _is_cut(self, me: int, made: Incarnation) -> bool:
        return made.dead or made.sockets[me].closed or (made.rail != CONTROL and self.mute[made.rail][me])

    def _ready(self, me: int, made: Incarnation) -> None:
        """Something can be read, as soon as the process runs and uses the connection."""
        connection = made.connections[me]
        if connection is not None and not connection.closed and not self.stopped(me, self._ready, me, made):
            self.ends[me].ready(connection)

    def _wake(self, me: int, made: Incarnation) -> None:
        """In a moment the socket takes more."""
        self.later(0, 0.001, self._writable, me, made)

    def _writable(self, me: int, made: Incarnation) -> None:
        connection = made.connections[me]
        if connection is not None and not self.stopped(me, self._writable, me, made):
            self.ends[me].go_on(connection)

    # ---- faults

    def cut(self, rail: int) -> None:
        """The connection dies; each end gets the error in its own time, or not at all."""
        made = self.newest(rail, 0) or self.newest(rail, 1)
        if made is None or made.dead:
            return
        made.dead = True
        self.note(2, f"rail {rail} is cut")
        failure, deaf = self.random.choice(MISHAPS), self.random.choice((None, None, 0, 1))
        for end in self.ends:
            if end.me != deaf:
                self.later(0, 0.05, self.ended, end.me, made, failure)

    def set_cable(self, rail: int, works: bool) -> None:
        self.cable[rail] = works
        if not works:
            self.cut(rail)

    def set_mute(self, rail: int, me: int, mute: bool) -> None:
        self.note(2, f"rail {rail} towards end {me} {'delivers nothing' if mute else 'delivers again'}")
        self.mute[rail][me] = mute

    def stop(self, me: int, seconds: float) -> None:
        self.note(me, f"is stopped for {seconds} s")
        self.ends[me].stopped_until = self.now + seconds

    def kill(self, me: int) -> None:
        self.note(me, "is killed")
        self.ends[me].dead = True
        survivor = self.ends[1 - me]
        for connection in (survivor.peer.control, *survivor.peer.rails):
            if isinstance(connection, SimulatedConnection):
                self.later(0.001, 0.02, self.killed_end, survivor.me, connection)

    def killed_end(self, me: int, connection: SimulatedConnection) -> None:
        """The kernel of the process that was killed closed its end of this connection."""
        if not self.stopped(me, self.killed_end, me, connection) and not connection.closed:
            if connection.number == CONTROL or not self.mute[connection.number][me]:
                connection.simulated.at_end = True
                self.ends[me].ready(connection)
