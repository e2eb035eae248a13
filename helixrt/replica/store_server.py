"""The server of a run's durable store.

In: a listening socket, the run's secret, the store's file (`store_file`). Out: answers to `store_client`'s requests. One thread
serves all connections: it carries out what has come, writes the changes of a round to the journal at once, and only then sends
the round's answers.
"""

from __future__ import annotations

import heapq
import json
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from helixrt.protocol.store_journal import Asked, Change, apply, decide
from helixrt.protocol.store_quorum import Delete, Get, PutIfAbsent, Set
from helixrt.replica import store_wire as wire
from helixrt.replica.store_file import StoreFile
from helixrt.transport.authentication import agrees, nonce

GREETING_S = 30.0  # how long a connection may take to prove itself
_READ_BYTES = 1 << 18
_BREATH_S = 0.02


@dataclass(eq=False)
class _Client:
    """One connection. `name` is b"" until it has proved itself; `waits` is the key that it waits for."""

    socket: socket.socket
    since_s: float
    server_nonce: bytes = field(default_factory=nonce)
    client_nonce: bytes = b""
    name: bytes = b""
    waits: str | None = None
    wait: int = 0  # the number of its newest wait
    came: bytearray = field(default_factory=bytearray)
    goes: bytearray = field(default_factory=bytearray)
    writing: bool = False  # the selector tells when it takes more


class StoreServer:
    """From its construction to `close` it serves in a thread of its own; the listener and the file are its own. `failed` is
    called in that thread when it ends by an error, after the traceback was printed."""

    def __init__(
        self, listener: socket.socket, secret: str, file: StoreFile, failed: Callable[[], None] = lambda: None
    ) -> None:
        self._listener, self._secret, self._file, self._failed = listener, secret, file, failed
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._clients: dict[bytes, _Client] = {}
        self._strangers: set[_Client] = set()  # have not proved themselves yet
        self._waiting: dict[str, list[_Client]] = {}
        self._ends: list[tuple[float, int, int, _Client]] = []  # of waits: when, for order, its number, whose
        self._numbers = count()
        self._changes: list[Change] = []  # of this round
        self._answered: set[_Client] = set()  # in this round
        self._closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="helixrt-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Drop all clients, as the end of the process would. Idempotent."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # the thread has ended by an error
                self._waker.send(b"x")
            self._thread.join(10.0)

    # ---------------------------------------------------------------- rounds

    def _serve(self) -> None:
        try:
            while not self._closed:
                self._round()
        except BaseException:
            with suppress(OSError):
                traceback.print_exc()
            self._failed()
        finally:
            for client in [*self._clients.values(), *self._strangers]:
                client.socket.close()
            for each in (self._listener, self._wake, self._waker, self._selector, self._file):
                each.close()

    def _round(self) -> None:
        for key, mask in self._selector.select(self._pause_s()):
            client: _Client | None = key.data
            if client is None:
                if key.fileobj is self._listener:
                    self._accept()
                continue
            if mask & selectors.EVENT_READ and client.socket.fileno() >= 0:
                self._read(client)
            if mask & selectors.EVENT_WRITE and client.socket.fileno() >= 0:
                self._answered.add(client)
        self._end_waits()
        if self._changes:
            self._file.append(self._changes)
            self._changes = []
        answered, self._answered = self._answered, set()
        for client in answered:
            if client.socket.fileno() >= 0:
                self._send(client)

    def _pause_s(self) -> float:
        """Until something ends by itself, at most a second: strangers are looked at then."""
        return min(1.0, max(0.0, self._ends[0][0] - time.monotonic())) if self._ends else 1.0

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the system has no descriptors left, or the client has gone
                time.sleep(_BREATH_S)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = _Client(connection, time.monotonic())
            self._strangers.add(client)
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _drop(self, client: _Client) -> None:
        if client.socket.fileno() < 0:
            return
        self._selector.unregister(client.socket)
        client.socket.close()
        self._strangers.discard(client)
        self._no_wait(client)
        if self._clients.get(client.name) is client:
            del self._clients[client.name]

    def _read(self, client: _Client) -> None:
        try:
            data = client.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.came += data
        if not client.name and not self._greet(client):
            return
        while client.waits is None and (request := self._request(client)) is not None:
            self._carry_out(client, request)
            if client.socket.fileno() < 0:
                return

    def _send(self, client: _Client) -> None:
        try:
            while client.goes:
                del client.goes[: client.socket.send(client.goes)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        if bool(client.goes) != client.writing:
            client.writing = bool(client.goes)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.writing else 0)
            self._selector.modify(client.socket, events, client)

    # ---------------------------------------------------------------- who comes

    def _greet(self, client: _Client) -> bool:
        """Go on with the proof; True once it is done."""
        if not client.client_nonce:
            if len(client.came) < wire.GREETING_BYTES:
                return False
            client.client_nonce = _taken(client.came, wire.GREETING_BYTES)
            client.goes += client.server_nonce
            self._answered.add(client)
        if len(client.came) < wire.CLIENT_PROOF_BYTES:
            return False
        said = _taken(client.came, wire.CLIENT_PROOF_BYTES)
        proof, name = said[: -wire.NAME_BYTES], said[-wire.NAME_BYTES :]
        meeting = wire.meeting(self._secret, client.client_nonce, client.server_nonce, name)
        if not agrees(proof, meeting.dialler_proof()):
            self._drop(client)
            return False
        if (earlier := self._clients.get(name)) is not None:
            self._drop(earlier)
        self._strangers.discard(client)
        self._clients[name], client.name = client, name
        client.goes += meeting.answerer_proof()
        self._answered.add(client)
        return True

    # ---------------------------------------------------------------- requests

    def _request(self, client: _Client) -> list[object] | None:
        """The next whole one that has come; who sends anything else is dropped."""
        if len(client.came) < wire.LENGTH.size:
            return None
        (length,) = wire.LENGTH.unpack_from(client.came)
        if length > wire.MOST_BYTES:
            self._drop(client)
            return None
        if len(client.came) < wire.LENGTH.size + length:
            return None
        text = _taken(client.came, wire.LENGTH.size + length)[wire.LENGTH.size :]
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list):
            self._drop(client)
            return None
        return found

    def _carry_out(self, client: _Client, request: list[object]) -> None:
        match request:
            case [wire.WAIT, str(key), float() | int() as timeout_s]:
                self._begin_wait(client, key, float(timeout_s))
                return
            case [wire.GET, str(key)]:
                asked: Asked = Get(key)
            case [wire.DELETE, str(key)]:
                asked = Delete(key)
            case [wire.PUT, str(key), str(value)]:
                asked = PutIfAbsent(key, value)
            case [wire.SET, str(key), str(value)]:
                asked = Set(key, value)
            case _:
                self._drop(client)
                return
        answer, change = decide(self._file.values, asked)
        if change is not None:
            apply(self._file.values, change)
            self._changes.append(change)
            if change.value is not None:
                self._tell_waiting(change.key, change.value)
        self._answer(client, answer)

    def _answer(self, client: _Client, value: str | None) -> None:
        client.goes += wire.frame([value])
        self._answered.add(client)

    def _begin_wait(self, client: _Client, key: str, timeout_s: float) -> None:
        value = self._file.values.get(key)
        if value is not None or timeout_s <= 0.0:
            self._answer(client, value)
            return
        client.waits, client.wait = key, next(self._numbers)
        self._waiting.setdefault(key, []).append(client)
        heapq.heappush(self._ends, (time.monotonic() + timeout_s, client.wait, client.wait, client))

    def _tell_waiting(self, key: str, value: str) -> None:
        for client in self._waiting.pop(key, ()):
            client.waits = None
            self._answer(client, value)

    def _no_wait(self, client: _Client) -> None:
        if client.waits is not None:
            others = [other for other in self._waiting.pop(client.waits, ()) if other is not client]
            if others:
                self._waiting[client.waits] = others
            client.waits = None

    def _end_waits(self) -> None:
        now = time.monotonic()
        while self._ends and (self._ends[0][0] <= now or self._over(self._ends[0])):
            end = heapq.heappop(self._ends)
            if not self._over(end):
                self._no_wait(end[3])
                self._answer(end[3], None)
        for stranger in [each for each in self._strangers if now - each.since_s > GREETING_S]:
            self._drop(stranger)

    @staticmethod
    def _over(end: tuple[float, int, int, _Client]) -> bool:
        """Whether this wait was answered."""
        return end[3].waits is None or end[3].wait != end[2]


def _taken(data: bytearray, length: int) -> bytes:
    found = bytes(data[:length])
    del data[:length]
    return found
