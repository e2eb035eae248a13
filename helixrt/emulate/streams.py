"""Simulated TCP connections: production's `Connection` over sockets that live in memory, and the loop that drives a `Peer`.

In: what a peer writes, and the bytes and errors that a simulated network delivers. Out: whole frames for the network to
carry, as bytes. A socket takes a part of what it is offered, or nothing for a while; it gives a part of what has come; it is
full as long as the other end does not read; it fails between any two calls. So a peer meets the same cases as in
production: partial writes, back-pressure, and failures while it carries out actions.
"""

from __future__ import annotations

import os
import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import cast

from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import HEADER_BYTES, Frame, FrameError
from helixrt.protocol.liveness import Acknowledgements
from helixrt.transport.contract import Outcome
from helixrt.transport.copies import CopyMemory
from helixrt.transport.intake import Stage
from helixrt.transport.rail_connection import Carrier, RailConnection
from helixrt.transport.tcp.connection import Connection
from helixrt.transport.tcp.peer import Peer

PARTIAL, BUSY = 0.2, 0.04  # how often a call moves only a part of what it could; and nothing, for a moment


class SimulatedSocket:
    """One end of a connection. `transmit` takes each frame that is whole here; `writable` is called once the socket takes
    more after it took nothing; `left` when its owner closes it."""

    def __init__(
        self,
        chance: random.Random,
        capacity_bytes: int,
        transmit: Callable[[Frame, bytes], None],
        writable: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self.other: SimulatedSocket | None = None
        self.closed = self.at_end = False  # at_end: the other end was closed, after what is still unread
        self.waiting = 0  # bytes of whole frames that the other end has not read
        self.full_since_s = 0.0  # the network's, if it is full
        self.turned_away = 0  # writes for which it had no room
        self._chance, self._capacity = chance, capacity_bytes
        self._transmit, self._writable, self._left = transmit, writable, left
        self._error = 0
        self._full = False  # it took nothing for want of room
        self._lingers = False
        self._partial = bytearray()  # of a frame
        self._unread = bytearray()

    @property
    def full(self) -> bool:
        return self.waiting >= self._capacity and not self._lingers

    @property
    def readable(self) -> bool:
        return not self.closed and bool(self._unread or self._error or self.at_end)

    # ---- what the network does

    def linger(self) -> None:
        """Its owner waits until all that it writes is out: from now on it takes everything."""
        self._lingers = True

    @property
    def failed(self) -> bool:
        return bool(self._error)

    def arrive(self, content: bytes) -> None:
        if not self._error:
            self._unread += content

    def lost(self, count: int) -> None:
        """So many bytes of what was sent are not under way any more: read by the other end, or lost."""
        self.waiting -= count
        if self._full and not self.full:
            self._full = False
            self._writable()

    def fail(self, code: int) -> None:
        """Every call raises this error from now on; what was not read is gone."""
        self._error = code
        self._unread.clear()

    # ---- what `Connection` calls

    def fileno(self) -> int:
        return -1

    def sendmsg(self, buffers: list[bytes | memoryview], ancillary: object = (), flags: int = 0) -> int:
        self._raise()
        if self.full:
            self._full = True
            self.turned_away += 1
            raise BlockingIOError
        draw = self._chance.random()
        if draw < BUSY and not self._lingers:
            self._writable()
            raise BlockingIOError
        content = b"".join(buffers)
        if draw < BUSY + PARTIAL and len(content) > 1:
            content = content[: self._chance.randint(1, len(content) - 1)]
        self._partial += content
        self._pass_on()
        return len(content)

    def send(self, content: bytes, flags: int = 0) -> int:
        return self.sendmsg([content])

    def recv_into(self, into: memoryview) -> int:
        self._raise()
        unread = self._unread
        if not unread:
            if self.at_end:
                return 0
            raise BlockingIOError
        count = min(len(into), len(unread))
        if count > 1 and self._chance.random() < PARTIAL:
            count = self._chance.randint(1, count - 1)
        into[:count] = unread[:count]
        del unread[:count]
        assert self.other is not None
        self.other.lost(count)
        return count

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._unread.clear()
            self._left()

    def _raise(self) -> None:
        assert not self.closed, "a closed socket was used"
        if self._error:
            raise OSError(self._error, os.strerror(self._error))

    def _pass_on(self) -> None:
        """What is whole is the network's."""
        partial, begin = self._partial, 0
        while len(partial) - begin >= HEADER_BYTES:
            try:
                frame = frames.parse(partial[begin : begin + HEADER_BYTES])
            except FrameError as error:
                raise AssertionError(f"what was written is no stream of frames: {error}") from error
            end = begin + HEADER_BYTES + frame.length
            if len(partial) < end:
                break
            unit = bytes(partial[begin:end])
            self.waiting += len(unit)
            begin = end
            self._transmit(frame, unit)
        del partial[:begin]


def join(one: SimulatedSocket, other: SimulatedSocket) -> None:
    one.other, other.other = other, one


class SimulatedConnection(Connection):
    """Production's; `acknowledged` gives what a kernel would report of it."""

    def __init__(
        self,
        sock: SimulatedSocket,
        carrier: Carrier,
        peer: int,
        number: int,
        acknowledged: Callable[[float], Acknowledgements | None],
    ) -> None:
        super().__init__(cast(socket.socket, sock), carrier, peer, number)
        self.simulated, self._acknowledged = sock, acknowledged

    def acknowledgements(self, now: float) -> Acknowledgements | None:
        return None if self.closed else self._acknowledged(now)


class SimulatedHost(ABC):
    """A `peer.Host`: does for the peers of one process what an endpoint's loop does. `outcomes` are the caller's to take."""

    def __init__(self, chance: random.Random, stage: Stage) -> None:
        self.stage, self.copies = stage, CopyMemory()
        self.outcomes: list[Outcome] = []
        self._chance = chance
        self._writers: dict[RailConnection, None] = {}
        self._touched: list[Peer] = []

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def restore(self, peer: Peer, rail: int) -> None: ...

    @abstractmethod
    def look_for(self, peer: Peer, rail: int) -> None: ...

    @abstractmethod
    def note(self, peer: Peer, event: m.ForTheRecord) -> None: ...

    @abstractmethod
    def failed(self, peer: Peer, event: m.Failed) -> None: ...

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def has_frames(self, connection: RailConnection) -> None:
        if not connection.blocked:
            self._writers[connection] = None

    def watch(self, connection: RailConnection) -> None:
        """Nothing to do: the network has each delivery read."""
        assert not connection.closed

    def unwatch(self, connection: RailConnection) -> None:
        self._writers.pop(connection, None)

    def touched(self, peer: Peer) -> None:
        self._touched.append(peer)

    # ---- the loop

    def read(self, peer: Peer, connection: SimulatedConnection) -> None:
        """All that has come; a turn at a time, some of which are short."""
        while connection.simulated.readable and not connection.closed:
            peer.read(connection, 200 if self._chance.random() < 0.1 else 1 << 20)

    def writable(self, connection: SimulatedConnection) -> None:
        if not connection.closed:
            connection.blocked = False
            self._writers[connection] = None

    def writes(self) -> bool:
        """Write until nothing may be written now; whether there was anything to write."""
        self._settle()
        busy = bool(self._writers)
        self.write()
        return busy

    def _settle(self) -> None:
        for peer in list(self._touched):
            peer.settle()

    def write(self) -> None:
        self._settle()
        while self._writers:
            connection = next(iter(self._writers))
            del self._writers[connection]
            connection.write(1 << 20)
            assert connection.closed or connection.idle or connection.blocked, "a turn that ended for no reason"

    def settled(self) -> list[Peer]:
        """Peers that had an event since the last call: their deadlines may have changed."""
        touched, self._touched = self._touched, []
        for peer in touched:
            peer.is_touched = False
        return touched
