"""A simulated network: rails between ranks, as ordered streams that break, stall, slow down, lose and double.

In: frames to carry, as sockets give them up, and faults with their spans. Out: what arrives where and when, as bytes and
errors at sockets, and calls into the world (`Receiver`). A rail between two ranks has connections, one after the other,
counted by incarnation. Within a connection frames keep their order; between rails nothing does. Times are virtual seconds.
"""

from __future__ import annotations

import errno
import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from helixrt.emulate.streams import SimulatedConnection, SimulatedSocket, join
from helixrt.protocol.link.frames import HEADER_BYTES, Frame, Kind

DELAY_S = (0.0002, 0.002)
CAPACITIES_BYTES = (300, 2000, 1 << 20)  # of a connection, each way


class Clock:
    """Virtual time, and what is to happen; things of one moment happen in a seeded order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.events = 0.0, 0
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[object, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *what: object) -> None:
        self.events += 1
        heapq.heappush(self._heap, (when, self.random.random(), self.events, call, what))

    def after(self, bounds: tuple[float, float], call: Callable[..., None], *what: object) -> None:
        self.at(self.now + self.random.uniform(*bounds), call, *what)

    def step(self) -> bool:
        """The next thing happens; False when nothing is to come."""
        if not self._heap:
            return False
        self.now, _, _, call, what = heapq.heappop(self._heap)
        call(*what)
        return True


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of one rail. `ranks` are its ends, and index 0 or 1 names an end."""

    generation: int
    rail: int
    number: int  # incarnation of the rail
    ranks: tuple[int, int]
    sockets: list[SimulatedSocket] = field(default_factory=list)
    taken: list[SimulatedConnection | None] = field(default_factory=lambda: [None, None])  # by the process at this end
    flush: list[bool] = field(default_factory=lambda: [False, False])  # what an end has sent arrives after its close
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])  # [from] when the last thing sent arrives
    cut: list[float] = field(default_factory=lambda: [float("inf")] * 2)  # [from] what arrives later is lost


class Receiver(ABC):
    """Calls of the fabric into the world. `end` is the receiving end of the connection."""

    @abstractmethod
    def up(self, connection: Connection, end: int) -> None:
        """The connection is there for this end."""

    @abstractmethod
    def readable(self, connection: Connection, end: int) -> None:
        """Bytes have come, or the connection's end."""

    @abstractmethod
    def writable(self, connection: Connection, end: int) -> None:
        """Its socket takes more."""

    @abstractmethod
    def garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        """Bytes that no correct peer sends."""

    @abstractmethod
    def note(self, what: str) -> None:
        """A line of the run's trace."""


@dataclass(slots=True)
class Weather:
    """What is wrong with one rail between two ranks, and until when."""

    broken: float = 0.0  # no connection can be made
    silent: list[float] = field(default_factory=lambda: [0.0, 0.0])  # [from the lower rank, from the higher]
    slow: float = 0.0
    losing: float = 0.0
    doubling: float = 0.0
    ails: float = 0.0  # the latest of these


class Fabric:
    def __init__(self, clock: Clock, receiver: Receiver) -> None:
        self.clock, self.receiver = clock, receiver
        self.random = clock.random
        self.weather: dict[tuple[int, int, int], Weather] = {}  # (lower rank, higher rank, rail)
        self.memory: dict[tuple[int, int], list[tuple[Frame, bytes]]] = {}  # (from, to) -> frames of ended generations
        self.lost = self.doubled = 0
        self.sockets: list[SimulatedSocket] = []

    def of(self, a: int, b: int, rail: int) -> Weather:
        return self.weather.setdefault((min(a, b), max(a, b), rail), Weather())

    # ---- connections

    def connect(self, generation: int, rail: int, number: int, a: int, b: int) -> Connection:
        """Both ends learn of it, each at its time; what one sends never overtakes that."""
        connection = Connection(generation, rail, number, (a, b))
        capacity_bytes = self.random.choice(CAPACITIES_BYTES)
        for end in (0, 1):
            made = SimulatedSocket(
                self.random,
                capacity_bytes,
                partial(self._send, connection, end),
                partial(self.clock.after, (0.0, 0.0005), self.receiver.writable, connection, end),
                partial(self._close, connection, end),
            )
            connection.sockets.append(made)
        join(*connection.sockets)
        self.sockets += connection.sockets
        for end in (0, 1):
            when = self.clock.now + self.random.uniform(*DELAY_S)
            connection.free[1 - end] = when
            self.clock.at(when, self.receiver.up, connection, end)
        return connection

    def connectable(self, a: int, b: int, rail: int) -> bool:
        weather = self.weather.get((min(a, b), max(a, b), rail))
        now = self.clock.now
        return weather is None or max(weather.broken, *weather.silent) <= now

    def _close(self, connection: Connection, end: int) -> None:
        """This end gave the connection up: what it has under way may be lost from some point on, unless it flushes; the peer
        detects it if nothing else comes before."""
        if not connection.flush[end] and self.random.random() < 0.6:
            self._cut(connection, end)
        self.clock.at(self._arrival(connection, end), self._told, connection, 1 - end, 0)

    def crash(self, connection: Connection, end: int, silent: bool) -> None:
        """The process at this end is gone; a silent one leaves no host that would tell."""
        self._cut(connection, end)
        if not silent:
            self.clock.at(self._arrival(connection, end), self._told, connection, 1 - end, 0)

    def break_(self, connection: Connection, ends: tuple[int, ...]) -> None:
        """The connection fails; only `ends` learn of it from their drivers."""
        for end in ends:
            self._cut(connection, end)
            self.clock.after((0.0, 0.004), self._told, connection, end, errno.ETIMEDOUT)
        if len(ends) == 1:  # half-open: what the other end sends goes nowhere
            other = 1 - ends[0]
            connection.cut[other] = min(connection.cut[other], self.clock.now)

    def _cut(self, connection: Connection, end: int) -> None:
        """What this end has sent is lost from some point on; what was lost before does not come back."""
        connection.cut[end] = min(connection.cut[end], self.clock.now + self.random.uniform(0.0, DELAY_S[1]))

    def _told(self, connection: Connection, end: int, code: int) -> None:
        """The connection is over for this end: with an error, or (0) because the other end was closed."""
        socket = connection.sockets[end]
        if socket.closed:
            return
        if code:
            socket.fail(code)
        else:
            socket.at_end = True
        self.receiver.readable(connection, end)

    # ---- frames

    def _arrival(self, connection: Connection, end: int) -> float:
        now = self.clock.now
        delay = self.random.uniform(*DELAY_S)
        a, b = connection.ranks
        weather = self.weather.get((min(a, b), max(a, b), connection.rail))
        if weather is not None and weather.ails > now:
            if weather.slow > now:
                delay *= 20
            silent = weather.silent[0 if connection.ranks[end] < connection.ranks[1 - end] else 1]
            if silent > now:
                delay += silent - now
        when = connection.free[end] = max(connection.free[end] + 1e-7, now + delay)  # never at once: order matters
        return when

    def _send(self, connection: Connection, end: int, frame: Frame, unit: bytes) -> None:
        """A whole frame is in the kernel of this end."""
        a, b = connection.ranks[end], connection.ranks[1 - end]
        what = f"{frame.kind.name} {frame.sequence or ''} ({frame.op}, {frame.index}) {frame.length} B"
        self.receiver.note(f"{a} -> {b} rail {connection.rail}: {what}")
        self._remember(a, b, frame, unit)
        socket, times = connection.sockets[end], 1
        weather = self.weather.get((min(a, b), max(a, b), connection.rail))
        if weather is not None and weather.ails > self.clock.now:
            if weather.losing > self.clock.now and self.random.random() < 0.15:
                self.lost += 1
                self.clock.after(DELAY_S, socket.lost, len(unit))
                return
            if weather.doubling > self.clock.now and self.random.random() < 0.3:
                self.doubled += 1
                times = 2
        for copy in range(times):
            socket.waiting += len(unit) * copy
            self._carry(connection, end, frame, unit)

    def _carry(self, connection: Connection, end: int, frame: Frame, unit: bytes) -> None:
        at = HEADER_BYTES if frame.kind is Kind.DATA and frame.length else len(unit)
        self.clock.at(self._arrival(connection, end), self._arrive, connection, 1 - end, unit[:at])
        if at < len(unit):
            self.clock.at(self._arrival(connection, end), self._arrive, connection, 1 - end, unit[at:])

    def _arrive(self, connection: Connection, end: int, part: bytes) -> None:
        if not connection.sockets[end].closed and self.clock.now < connection.cut[1 - end]:
            connection.sockets[end].arrive(part)
            self.receiver.readable(connection, end)

    def inject(self, connection: Connection, end: int, wire: bytes) -> None:
        """This end sends `wire`, in its turn, whatever it is."""
        if not connection.sockets[end].closed:
            self.clock.at(self._arrival(connection, end), self._garbage, connection, 1 - end, wire)

    def _garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        if not connection.sockets[end].closed and self.clock.now < connection.cut[1 - end]:
            self.receiver.garbage(connection, end, wire)

    # ---- what an ended generation leaves behind

    def _remember(self, sender: int, receiver: int, frame: Frame, unit: bytes) -> None:
        kept = self.memory.setdefault((sender, receiver), [])
        if len(kept) < 6 and self.random.random() < 0.2:
            if frame.kind is Kind.DATA:
                unit = unit[:HEADER_BYTES] + b"\xcc" * frame.length
            kept.append((frame, unit))

    def haunt(self, connection: Connection, end: int) -> None:
        """Frames of older generations arrive at this end on the new connection, before anything else."""
        for frame, unit in self.memory.get((connection.ranks[1 - end], connection.ranks[end]), ()):
            if frame.generation < connection.generation:
                connection.sockets[1 - end].waiting += len(unit)
                self._carry(connection, 1 - end, frame, unit)
