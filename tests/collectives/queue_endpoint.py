"""Endpoints of one process: queues in memory that keep the contract's rules, with faults at a test's command.

A long message waits at the sender until its receiver has posted; a short one travels at once.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helixrt.errors import Cause, Retryable
from helixrt.transport.contract import Buffer, Endpoint, Lost, Outcome, PeerAborted, Received, Refused, Sent, Sink

EAGER_BYTES = 1 << 12
PIECE_BYTES = 192  # that a sink takes at once


class Hub:
    """All endpoints of one test; they find each other by number."""

    def __init__(self) -> None:
        self.endpoints: dict[bytes, QueueEndpoint] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()

    def endpoint(self) -> QueueEndpoint:
        made = QueueEndpoint(self, str(next(self.numbers)).encode())
        self.endpoints[made.address()] = made
        return made


class QueueEndpoint(Endpoint):
    def __init__(self, hub: Hub, name: bytes) -> None:
        self._hub, self._name = hub, name
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._closing = threading.Lock()  # of the event
        self._inbox: deque[tuple[Any, ...]] = deque()
        self.generation = -1
        self.open = False
        self.stale = 0
        self.silent = False  # a test's: takes no part any more, as if its process were stopped
        self.rung_when_asked = False  # peers wake it only after `next_deadline`, until it looks, as over shared memory
        self.asked, self.rings = False, True
        self._reset()

    def _reset(self) -> None:
        self._peers: dict[int, QueueEndpoint] = {}
        self._posted: dict[tuple[int, int, int], Buffer] = {}
        self._here: dict[tuple[int, int, int], bytes] = {}
        self._waiting: dict[tuple[int, int, int], Buffer] = {}
        self._granted: set[tuple[int, int, int]] = set()
        self._outcomes: list[Outcome] = []

    def address(self) -> bytes:
        return self._name

    def connect(
        self,
        generation: int,
        me: int,
        peers: Mapping[int, bytes],
        deadline_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reset()
        self._me, self.generation, self.open = me, generation, True
        until = time.monotonic() + deadline_s
        others = {rank: self._hub.endpoints[address] for rank, address in peers.items()}
        while missing := [r for r, o in others.items() if not (o.open and o.generation == generation)]:
            if time.monotonic() > until or not self.open:
                raise Retryable(f"ranks {missing} did not come within {deadline_s:g} s")
            if stopped():
                raise Retryable("connecting was stopped")
            time.sleep(0.001)
        self._peers = others

    def _post(self, peer: int, *message: Any) -> None:
        self._peers[peer]._take(self.generation, self._me, *message)

    def _take(self, *message: Any) -> None:
        self._inbox.append(message)
        if self.rings and (self.asked or not self.rung_when_asked):
            self._ring()

    def _ready(self) -> None:
        if not self.rung_when_asked:  # else `next_deadline` tells
            self._ring()

    def _ring(self) -> None:
        with self._closing:  # a peer rings from a thread of its own
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def send(self, peer: int, op: int, index: int, data: Buffer) -> None:
        assert self.open and data.contiguous and data.format == "B"
        if data.nbytes <= EAGER_BYTES:
            self._post(peer, "data", op, index, bytes(data))
            self._outcomes.append(Sent(peer, op, index))
            self._ready()
        elif (peer, op, index) in self._granted:
            self._granted.remove((peer, op, index))
            self._transfer(peer, op, index, data)
        else:
            self._waiting[peer, op, index] = data

    def _transfer(self, peer: int, op: int, index: int, data: Buffer) -> None:
        self._post(peer, "data", op, index, bytes(data))
        self._outcomes.append(Sent(peer, op, index))
        self._ready()

    def receive(self, peer: int, op: int, index: int, into: Buffer | Sink) -> None:
        assert self.open and (not isinstance(into, memoryview) or (into.contiguous and not into.readonly))
        key = (peer, op, index)
        assert key not in self._posted
        if key in self._here:
            self._deliver(key, into)
        else:
            self._posted[key] = into
            if len(into) > EAGER_BYTES:
                self._post(peer, "credit", op, index)

    def _deliver(self, key: tuple[int, int, int], into: Buffer | Sink) -> None:
        data = self._here.pop(key)
        assert len(data) == len(into), f"message {key} has {len(data)} bytes, not {len(into)}"
        if isinstance(into, memoryview):
            into[:] = data
        else:
            for at in range(0, len(data), PIECE_BYTES):
                into.take(at, memoryview(bytearray(data[at : at + PIECE_BYTES])))
        self._outcomes.append(Received(*key))
        self._ready()

    def forget(self, op: int) -> None:
        for table in (self._posted, self._here, self._waiting):
            for key in [k for k in table if k[1] == op]:
                del table[key]  # type: ignore[attr-defined]

    def descriptors(self) -> Mapping[int, int]:
        return {self._event: select.EPOLLIN} if self._event >= 0 else {}

    def progress(self, now: float) -> Sequence[Outcome]:
        self.asked = False
        try:
            os.eventfd_read(self._event)
        except (BlockingIOError, OSError):
            pass
        if self.silent:
            return ()
        while self._inbox:
            generation, peer, what, *rest = self._inbox.popleft()
            if generation != self.generation or not self.open:
                self.stale += 1
            elif what == "data":
                op, index, data = rest
                key = (peer, op, index)
                self._here[key] = data
                if key in self._posted:
                    self._deliver(key, self._posted.pop(key))
            elif what == "credit":
                key = (peer, *rest)
                if key in self._waiting:
                    self._transfer(*key, self._waiting.pop(key))
                else:
                    self._granted.add(key)
            elif what == "abort":
                self._outcomes.append(PeerAborted(peer, rest[0]))
            else:
                self._outcomes.append(Lost(peer, rest[0]))
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_deadline(self) -> float | None:
        self.asked = True
        return 0.0 if self.rung_when_asked and (self._outcomes or (self._inbox and self.rings)) else None

    def _leave(self, what: str, cause: Cause) -> None:
        if self.open:
            for peer in list(self._peers.values()):  # a peer's abort may come meanwhile, in another thread
                peer._take(self.generation, self._me, what, cause)
        self.open = False
        self._reset()

    def abort(self, cause: Cause) -> None:
        self._leave("abort", cause)

    def die(self) -> None:
        """As if its process were killed."""
        self._leave("lost", Cause("the connection was reset"))

    def close(self) -> None:
        self._leave("lost", Cause("the peer said farewell"))
        with self._closing:
            if self._event >= 0:
                os.close(self._event)
                self._event = -1

    def refused(self) -> Refused:
        return Refused(stale=self.stale)
