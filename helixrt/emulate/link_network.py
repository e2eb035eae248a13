"""The rails between the two ends of a simulated link: they delay, reorder, double, lose, fall silent, break and return.

In: frames, and which ends want a rail restored. Out: events of both ends, each at its own time. A rail has one
connection after the other, counted by incarnation; each end may close it or lose it in its own time. Every frame
goes through bytes and back. What is for a process that stands still waits until it goes on.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helixrt.emulate.link_end import End, Name, Surroundings, check
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m

LONG_BYTES = 1000  # a longer payload takes its time
MISHAPS = (m.Failure.PATH, m.Failure.PATH, m.Failure.DEVICE, m.Failure.CASCADE)


@dataclass(eq=False)
class Connection:
    """One incarnation of a rail."""

    rail: int
    incarnation: int
    open: list[bool] = field(default_factory=lambda: [False, False])  # per end: it uses this connection
    joined: list[bool] = field(default_factory=lambda: [False, False])  # it has begun to
    dead: bool = False  # nothing sent from now on arrives
    last: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when the newest frame towards an end arrives
    behind: tuple[deque[frames.Frame], ...] = field(default_factory=lambda: (deque(), deque()))  # cannot be read yet


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
        self.incarnations = [0] * rails
        self.cable = [True] * rails  # a connection can be made, and carries
        self.mute = [[False, False] for _ in range(rails)]  # towards an end nothing arrives, and nobody is told
        self.reorders, self.doubles, self.loses = False, 0.0, 0.0
        self.kernels = False  # they acknowledge what comes for a process that is stopped
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

    def acknowledged(self, me: int) -> list[int]:
        if not self.kernels or self.ends[1 - me].dead:
            return []
        found = []
        for rail, connection in self.ends[me].connections.items():
            open_there = connection.open[1 - me] or not connection.joined[1 - me]
            if connection.open[me] and open_there and not connection.dead and not any(self.mute[rail]):
                found.append(rail)
        return found

    def note(self, end: int, *what: object) -> None:
        if self.trace is not None:
            who = "both " if end > 1 else f"end {end}"
            self.trace.append(f"{self.now * 1e3:10.3f} ms  {who}  {' '.join(map(_words, what))}")

    # ---- connections

    def connect(self, rail: int) -> None:
        if self.stopped(0, self.connect, rail):
            return
        self._dialing[rail] = False
        if not self.cable[rail] or any(end.dead for end in self.ends):
            self.ends[0].tell(m.RailDown(rail, m.Failure.PATH, "cannot connect"))
            return
        self.incarnations[rail] += 1
        connection = Connection(rail, self.incarnations[rail])
        for end in self.ends:
            self.later(0, 0.003, self.connected, end.me, connection)

    def connected(self, me: int, connection: Connection) -> None:
        if self.stopped(me, self.connected, me, connection):
            return
        end = self.ends[me]
        old = end.connections.get(connection.rail)
        if end.dead or (old is not None and old.incarnation > connection.incarnation):
            return
        end.connections[connection.rail] = connection
        end.landing.pop(connection.rail, None)
        connection.open[me] = connection.joined[me] = True
        self.note(me, f"rail {connection.rail} connected, incarnation {connection.incarnation}")
        end.tell(m.RailUp(connection.rail, connection.incarnation))
        self._read_on(me, connection)

    def restore(self, me: int, rail: int) -> None:
        if me == 0 and not self._dialing[rail]:
            self._dialing[rail] = True
            self.later(0.001, 0.02, self.connect, rail)

    def close(self, me: int, rail: int) -> None:
        """`me` closed its end; the other one sees the end of the stream after what is under way, unless the rail is mute."""
        end = self.ends[me]
        connection = end.connections.pop(rail, None)
        end.landing.pop(rail, None)
        if connection is not None and connection.open[me]:
            connection.open[me] = False
            self.at(max(connection.last[1 - me], self.now + 0.001), self.ended, 1 - me, connection, m.Failure.PATH)

    def ended(self, me: int, connection: Connection, failure: m.Failure) -> None:
        if self.stopped(me, self.ended, me, connection, failure):
            return
        end = self.ends[me]
        if not connection.open[me] or end.connections.get(connection.rail) is not connection or self.mute[connection.rail][me]:
            return
        connection.open[me] = False
        del end.connections[connection.rail]
        end.landing.pop(connection.rail, None)
        self.note(me, f"rail {connection.rail} ended: {failure.value}")
        end.tell(m.RailDown(connection.rail, failure, "end of stream"))

    # ---- frames

    def transmit(self, me: int, action: m.SendFrame | m.SendData) -> None:
        frame = action.frame
        connection = self.ends[me].connections.get(action.rail)
        if connection is None or not connection.open[me]:
            return
        wire = frames.pack(frame)
        parsed = frames.parse(wire[: frames.HEADER_BYTES])
        if frame.kind is not frames.Kind.DATA:
            parsed = frames.with_body(parsed, wire[frames.HEADER_BYTES :])
        check(parsed == frame, f"{frame} came out as {parsed}")
        for _ in range(1 + (self.random.random() < self.doubles)):
            lost = connection.dead or self.random.random() < self.loses
            when = self.now + self.header_s(me, connection, frame)
            if not self.reorders:
                when = max(when, connection.last[1 - me])
            connection.last[1 - me] = max(when, connection.last[1 - me])
            if not lost:
                self.at(when, self._arrive, 1 - me, connection, frame)

    def header_s(self, me: int, connection: Connection, frame: frames.Frame) -> float:
        """How long until the header that `me` sends now is at the other end, if nothing before it takes longer."""
        return self.random.uniform(0.0005, 0.02)

    def payload_s(self, connection: Connection, frame: frames.Frame) -> float:
        """How long until the payload is there too."""
        return self.random.uniform(0.0, 0.03 if frame.length > LONG_BYTES else 0.001)

    def _arrive(self, me: int, connection: Connection, frame: frames.Frame) -> None:
        if self.stopped(me, self._arrive, me, connection, frame):
            return
        end = self.ends[me]
        rail = connection.rail
        if not connection.joined[me]:
            connection.behind[me].append(frame)
            return
        if end.dead or not connection.open[me] or connection.dead or self.mute[rail][me]:
            return
        if end.connections.get(rail) is not connection:
            return
        if rail in end.landing:
            connection.behind[me].append(frame)
            return
        self.note(me, "rail", rail, "brings", frame)
        end.tell(m.FrameArrived(rail, frame))
        if frame.kind is frames.Kind.DATA and rail in end.landing:
            self.at(self.now + self.payload_s(connection, frame), self._payload, me, connection, frame.sequence)

    def _payload(self, me: int, connection: Connection, sequence: int) -> None:
        if self.stopped(me, self._payload, me, connection, sequence):
            return
        end = self.ends[me]
        rail = connection.rail
        mine = end.connections.get(rail) is connection and connection.open[me] and not connection.dead
        if not end.dead and mine and not self.mute[rail][me] and end.landing.get(rail, (0,))[0] == sequence:
            end.payload(rail, sequence)
            self._read_on(me, connection)

    def _read_on(self, me: int, connection: Connection) -> None:
        while connection.behind[me] and connection.rail not in self.ends[me].landing:
            self._arrive(me, connection, connection.behind[me].popleft())

    # ---- faults

    def cut(self, rail: int) -> None:
        """The connection dies; each end hears of it in its own time, or not at all."""
        connection = self.ends[0].connections.get(rail) or self.ends[1].connections.get(rail)
        if connection is None:
            return
        connection.dead = True
        self.note(2, f"rail {rail} is cut")
        failure, deaf = self.random.choice(MISHAPS), self.random.choice((None, None, 0, 1))
        for end in self.ends:
            if end.me != deaf:
                self.later(0, 0.05, self.ended, end.me, connection, failure)

    def set_cable(self, rail: int, works: bool) -> None:
        self.cable[rail] = works
        if not works:
            self.cut(rail)

    def set_mute(self, rail: int, me: int, mute: bool) -> None:
        self.note(2, f"rail {rail} towards end {me} {'falls silent' if mute else 'speaks again'}")
        self.mute[rail][me] = mute

    def stop(self, me: int, seconds: float) -> None:
        self.note(me, f"stands still for {seconds} s")
        self.ends[me].stopped_until = self.now + seconds

    def kill(self, me: int) -> None:
        self.note(me, "is killed")
        self.ends[me].dead = True
        survivor = self.ends[1 - me]
        for rail in range(self.rails):
            self.cable[rail] = False
            connection = survivor.connections.get(rail)
            if connection is not None:
                self.later(0.001, 0.02, self.ended, survivor.me, connection, m.Failure.PEER_GONE)
