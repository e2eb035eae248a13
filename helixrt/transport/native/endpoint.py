"""An `Endpoint` (`contract.py`) over the native engine: single messages between ranks, over TCP rails and shared memory.

In: the run's secret and this host's rails. Out: what the contract says. Collectives hand plans to the engine and do not use
this.

The engine writes what it was given until the message's event, and cannot forget one. So messages are received in memory of this
endpoint and sent from a copy: the caller's memory is touched in `send`, in `progress` and nowhere else.

One difference to other endpoints: a peer that is lost, or aborts, ends the generation for all of its links, as a collective
would end for all its ranks anyway. The outcome names the first cause; the other peers get it as well.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress

from helixrt.errors import Cause, Retryable
from helixrt.native.engine import EngineEvent
from helixrt.native.library import EventKind
from helixrt.native.library import Failure as NativeFailure
from helixrt.protocol.link.messages import Failure, RailBack, RailLeft
from helixrt.record import FlightRecord
from helixrt.transport import path_history
from helixrt.transport.contract import Buffer, Endpoint, Lost, Outcome, PeerAborted, Received, Refused, Sent, Sink
from helixrt.transport.forking import disown_in_children
from helixrt.transport.native.causes import parse_cause
from helixrt.transport.native.links import Links, LinksOptions, new_engine
from helixrt.transport.native.meeting import with_own_trouble
from helixrt.transport.tcp.rails import TcpRail

Name = tuple[int, int, int]  # peer, op, index


class NativeEndpoint(Endpoint):
    """`rails`: this host's; see `Links`. Raises ConfigError when a rail's address is not this host's."""

    def __init__(
        self,
        secret: bytes,
        rails: Sequence[TcpRail] = (TcpRail(),),
        options: LinksOptions | None = None,
        record: FlightRecord | None = None,
    ) -> None:
        options = options or LinksOptions()
        self._record = record
        self._last_rails: dict[int, EngineEvent] = {}  # the last rail to a peer was left, and none is back
        self._events: deque[EngineEvent] = deque()  # filled by the thread of the links
        self._heard: Callable[[EngineEvent], None] = self._queue  # who gets the events
        self._peers: frozenset[int] = frozenset()
        self._over = True  # there is no generation, or it ended
        self._closed = False
        self._sending: set[Name] = set()
        self._receiving: dict[Name, tuple[bytearray, Buffer | Sink | None]] = {}  # None: it was forgotten
        self._forgotten: set[Name] = set()  # of what is sent
        self._engine = new_engine(options)
        try:
            self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable while there are events
            try:
                self._links = Links(self._engine, secret, rails, options, self._hear)
            except BaseException:
                os.close(self._news)
                raise
        except BaseException:
            self._engine.close()
            raise
        disown_in_children(self)

    def hand_over(self, heard: Callable[[EngineEvent], None]) -> None:
        """From now on `heard` gets the engine's events, in the thread of the links, and uses `links`; this object gives the
        address, records rails that fail and return, and closes."""
        self._heard = heard

    def _hear(self, event: EngineEvent) -> None:
        self._write(event)
        self._heard(event)

    def _queue(self, event: EngineEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._news, 1)

    def _write(self, event: EngineEvent) -> None:
        """For the flight record."""
        if self._record is None:
            return
        if event.kind is EventKind.RAIL_LEFT:
            if event.b:
                path_history.write(self._record, event.peer, _left(event))
            else:  # the peer may have ended: that is no rail that was left
                self._last_rails[event.peer] = event
        elif event.kind is EventKind.RAIL_BACK:
            if (last := self._last_rails.pop(event.peer, None)) is not None:
                path_history.write(self._record, event.peer, _left(last))
            path_history.write(self._record, event.peer, RailBack(event.a, event.b))
        elif event.kind is EventKind.ENDED:
            self._last_rails.clear()

    @property
    def links(self) -> Links:
        return self._links

    # ---------------------------------------------------------------- generations

    def address(self) -> bytes:
        return self._links.address.pack()

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        if self._closed:
            raise Retryable("this endpoint was closed")
        self._leave(Cause("it went on to another generation", f"rank {me}"))
        try:
            self._links.connect(generation, me, peers, deadline_s, stopped)
        except BaseException:
            self._events.clear()
            raise
        self._peers, self._over = frozenset(peers), False

    def abort(self, cause: Cause) -> None:
        if not self._closed:
            self._leave(cause)

    def _leave(self, cause: Cause) -> None:
        self._links.leave(cause)  # no memory of ours is touched from here on
        self._over = True
        self._events.clear()
        self._sending.clear()
        self._receiving.clear()
        self._forgotten.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._over = True
        self._links.close()
        self._engine.close()
        os.close(self._news)
        self._events.clear()

    def disown(self) -> None:
        if not self._closed:
            self._closed = self._over = True
            self._links.disown()
            self._engine.close()
            os.close(self._news)
            self._events.clear()

    def refused(self) -> Refused:
        return self._links.refused()

    # ---------------------------------------------------------------- messages

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        name = self._name(peer, op, index, self._sending)
        if self._over:
            return
        self._sending.add(name)
        with suppress(Retryable):  # the generation has ended; the event is on its way
            self._engine.send(peer, op, index, bytes(data))

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        name = self._name(peer, op, index, self._receiving)
        if self._over:
            return
        own = bytearray(len(into))
        self._receiving[name] = own, into
        with suppress(Retryable):
            self._engine.receive(peer, op, index, memoryview(own))

    def _name(self, peer: int, op: int, index: int, begun: Container[Name]) -> Name:
        if not self._closed and peer not in self._peers:
            raise ValueError(f"rank {peer} is no peer of this generation, or there is none")
        if (peer, op, index) in begun:
            raise ValueError(f"message {(op, index)} with rank {peer} was begun before")
        return peer, op, index

    def forget(self, op: int) -> None:
        for name, (own, _) in self._receiving.items():
            if name[1] == op:
                self._receiving[name] = own, None
        self._forgotten.update(name for name in self._sending if name[1] == op)

    # ---------------------------------------------------------------- what came

    def descriptors(self) -> Mapping[int, int]:
        return {} if self._closed else {self._news: select.EPOLLIN}

    def next_deadline(self) -> float | None:
        return 0.0 if self._events else None

    def progress(self, now: float) -> Sequence[Outcome]:
        if not self._events or self._closed:
            return ()
        try:
            os.eventfd_read(self._news)
        except BlockingIOError:
            pass  # it is about to be written
        outcomes: list[Outcome] = []
        while self._events:
            outcome = self._outcome(self._events.popleft())
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes

    def _outcome(self, event: EngineEvent) -> Outcome | None:
        kind, peer = event.kind, event.peer
        if kind is EventKind.SENT:
            name = (peer, event.op, event.a)
            self._sending.discard(name)
            if name in self._forgotten:
                self._forgotten.discard(name)
                return None
            return Sent(peer, event.op, event.a)
        if kind is EventKind.RECEIVED:
            return self._received(peer, event.op, event.a)
        if kind is EventKind.ENDED:
            return self._ended(peer, event.text)
        return None

    def _received(self, peer: int, op: int, index: int) -> Outcome | None:
        own, into = self._receiving.pop((peer, op, index))
        if into is None:
            return None
        if isinstance(into, memoryview):
            into[:] = own
        else:
            into.take(0, memoryview(own))
        return Received(peer, op, index)

    def _ended(self, peer: int, text: str) -> Outcome:
        self._over = True
        said = parse_cause(text)
        cause = said or Cause(text, f"rank {peer}" if peer >= 0 else "")
        if peer >= 0 and (own := self._links.own_trouble(peer)):  # the peer may have noticed it first
            cause = with_own_trouble(cause, own)
        if said is None and (peer < 0 or text.startswith(f"lost rank {peer}:")):
            return Lost(peer if peer >= 0 else min(self._peers), cause)
        return PeerAborted(peer, cause)


def _left(event: EngineEvent) -> RailLeft:
    failure = None if event.op < 0 else Failure[NativeFailure(event.op).name]
    return RailLeft(event.a, failure, event.text, event.b)
