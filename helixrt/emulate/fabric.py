"""A simulated network: rails between ranks, as ordered streams that break, stall, slow down, lose and double.

In: frames to carry, and faults with their spans. Out: what arrives where and when, as calls into the world
(`Receiver`). A rail between two ranks has connections, one after the other, counted by incarnation. Within a
connection frames keep their order; between rails nothing does. Times are virtual seconds.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.messages import Failure

DELAY_S = (0.0002, 0.002)
RECONNECT_S = (0.001, 0.008)


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
class Payload:
    """A message's bytes on their way: memory of the sender until somebody takes a copy, as in a real driver."""

    data: memoryview | bytes


@dataclass(slots=True, eq=False)
class Connection:
    """One connection of one rail. `ends` are (rank, its incarnation) and index 0 or 1 names an end."""

    generation: int
    rail: int
    number: int  # incarnation of the rail
    ranks: tuple[int, int]
    open: list[bool] = field(default_factory=lambda: [True, True])
    free: list[float] = field(default_factory=lambda: [0.0, 0.0])  # [from] when the last thing sent arrives
    cut: list[float] = field(default_factory=lambda: [float("inf")] * 2)  # [from] what arrives later is lost


class Receiver(ABC):
    """What the fabric tells the world. `end` is the receiving end of the connection."""

    @abstractmethod
    def up(self, connection: Connection, end: int) -> None:
        """The connection is there for this end."""

    @abstractmethod
    def down(self, connection: Connection, end: int, failure: Failure, reason: str) -> None:
        """This end learns that the connection is gone."""

    @abstractmethod
    def header(self, connection: Connection, end: int, frame: Frame) -> None:
        """A frame, or the header of a DATA frame."""

    @abstractmethod
    def payload(self, connection: Connection, end: int, frame: Frame, payload: Payload) -> None:
        """What followed the header."""

    @abstractmethod
    def garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        """Bytes that no correct peer sends."""


@dataclass(slots=True)
class Weather:
    """What ails one rail between two ranks, until when."""

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
        self.memory: dict[tuple[int, int], list[Frame]] = {}  # (from, to) -> frames of ended generations
        self.lost = self.doubled = 0

    def of(self, a: int, b: int, rail: int) -> Weather:
        return self.weather.setdefault((min(a, b), max(a, b), rail), Weather())

    # ---- connections

    def connect(self, generation: int, rail: int, number: int, a: int, b: int) -> Connection:
        """Both ends learn of it, each at its time; what one sends never overtakes that."""
        connection = Connection(generation, rail, number, (a, b))
        for end in (0, 1):
            when = self.clock.now + self.random.uniform(*DELAY_S)
            connection.free[1 - end] = when
            self.clock.at(when, self.receiver.up, connection, end)
        return connection

    def connectable(self, a: int, b: int, rail: int) -> bool:
        weather = self.weather.get((min(a, b), max(a, b), rail))
        now = self.clock.now
        return weather is None or max(weather.broken, *weather.silent) <= now

    def close(self, connection: Connection, end: int, flush: bool = False) -> None:
        """This end gives the connection up: what it has under way may be lost from some point on, and the peer
        learns of it when nothing comes in between. With `flush` nothing is lost."""
        if not connection.open[end]:
            return
        connection.open[end] = False
        if not flush and self.random.random() < 0.6:
            self._cut(connection, end)
        when = self._arrival(connection, end)
        self.clock.at(when, self._told, connection, 1 - end, Failure.PATH, "closed by the peer")

    def crash(self, connection: Connection, end: int, silent: bool) -> None:
        """The process at this end is gone; a silent one leaves no host that would tell."""
        connection.open[end] = False
        self._cut(connection, end)
        if not silent:
            when = self._arrival(connection, end)
            self.clock.at(when, self._told, connection, 1 - end, Failure.PEER_GONE, "closed, its process is gone")

    def break_(self, connection: Connection, ends: tuple[int, ...]) -> None:
        """The connection fails; only `ends` learn of it from their drivers."""
        for end in ends:
            self._cut(connection, end)
            self.clock.after((0.0, 0.004), self._told, connection, end, Failure.PATH, "link down")
        if len(ends) == 1:  # half-open: what the other end sends goes nowhere
            other = 1 - ends[0]
            connection.cut[other] = min(connection.cut[other], self.clock.now)

    def _cut(self, connection: Connection, end: int) -> None:
        """What this end has sent is lost from some point on; what was lost before does not come back."""
        connection.cut[end] = min(connection.cut[end], self.clock.now + self.random.uniform(0.0, DELAY_S[1]))

    def _told(self, connection: Connection, end: int, failure: Failure, reason: str) -> None:
        if connection.open[end]:
            connection.open[end] = False
            self.receiver.down(connection, end, failure, reason)

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

    def send(self, connection: Connection, end: int, frame: Frame, payload: Payload | None) -> None:
        if not connection.open[end]:
            return
        times = 1
        a, b = connection.ranks
        weather = self.weather.get((min(a, b), max(a, b), connection.rail))
        if weather is not None and weather.ails > self.clock.now:
            if weather.losing > self.clock.now and self.random.random() < 0.15:
                self.lost += 1
                return
            if weather.doubling > self.clock.now and self.random.random() < 0.3:
                self.doubled += 1
                times = 2
        for _ in range(times):
            self.clock.at(self._arrival(connection, end), self._header, connection, 1 - end, frame)
            if payload is not None:
                self.clock.at(self._arrival(connection, end), self._payload, connection, 1 - end, frame, payload)

    def inject(self, connection: Connection, end: int, wire: bytes) -> None:
        """This end sends `wire`, in its turn, whatever it is."""
        if connection.open[end]:
            self.clock.at(self._arrival(connection, end), self._garbage, connection, 1 - end, wire)

    def _garbage(self, connection: Connection, end: int, wire: bytes) -> None:
        if connection.open[end] and self.clock.now < connection.cut[1 - end]:
            self.receiver.garbage(connection, end, wire)

    def _header(self, connection: Connection, end: int, frame: Frame) -> None:
        if connection.open[end] and self.clock.now < connection.cut[1 - end]:
            self.receiver.header(connection, end, frame)

    def _payload(self, connection: Connection, end: int, frame: Frame, payload: Payload) -> None:
        if connection.open[end] and self.clock.now < connection.cut[1 - end]:
            self.receiver.payload(connection, end, frame, payload)

    # ---- what an ended generation leaves behind

    def remember(self, sender: int, receiver: int, frame: Frame) -> None:
        kept = self.memory.setdefault((sender, receiver), [])
        if len(kept) < 6 and self.random.random() < 0.2:
            kept.append(frame)

    def haunt(self, connection: Connection, end: int) -> None:
        """Frames of older generations arrive at this end on the new connection, before anything else."""
        for frame in self.memory.get((connection.ranks[1 - end], connection.ranks[end]), ()):
            if frame.generation < connection.generation:
                self.clock.at(self._arrival(connection, 1 - end), self._header, connection, end, frame)
                if frame.kind is Kind.DATA:
                    what = Payload(b"\xcc" * frame.length)
                    self.clock.at(self._arrival(connection, 1 - end), self._payload, connection, end, frame, what)
