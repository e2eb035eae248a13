"""A client of a run's durable store, which is served by `store_server` and comes back with its values when its process is lost.

In: the store's `host:port` and the run's secret. Out: `RunStore`. A call whose connection breaks connects again and asks again,
for `patience_s`: the caller sees a slow answer. To ask again is harmless: a `put_if_absent` that was carried out, and whose
answer was lost, gives what stands, which is the caller's own value if it had won; so where only one may win the value says who
wrote it. Each thread has a connection of its own, since a wait holds it up.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time

from helixrt.errors import Cause, Retryable
from helixrt.replica import store_wire as wire
from helixrt.replica.contracts import RunStore
from helixrt.replica.store import TcpRunStore, check_value, split_address
from helixrt.transport.authentication import agrees, nonce

PATIENCE_S = 60.0  # the process of a store is started again within seconds, on a busy machine
_WAIT_PATIENCE_S = 5.0  # of a `wait`, which has a limit of its own: who waits asks again
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.02, 0.5  # between two tries to connect


def run_store(address: str, durable: str, secret: str, patience_s: float = PATIENCE_S) -> RunStore:
    """The store of a run: the durable one, where it has one (`durable` is not ""), else torch's at `address`."""
    return DurableRunStore(durable, secret, patience_s) if durable else TcpRunStore(address)


class _Broken(Exception):
    """This connection cannot be used, for this reason."""


class _Connection:
    """Of one thread. Every call raises _Broken when the connection ends, or `deadline` (`time.monotonic`) is over."""

    def __init__(self, address: str, secret: str, name: bytes, deadline: float) -> None:
        self._socket = socket.create_connection(split_address(address), max(0.001, deadline - time.monotonic()))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._timeout_s = -1.0
            if self._socket.getsockname() == self._socket.getpeername():
                raise _Broken("nobody listens")  # the system has connected a free port with itself
            self._prove(secret, name, deadline)
        except BaseException:
            self._socket.close()
            raise

    def _prove(self, secret: str, name: bytes, deadline: float) -> None:
        mine = nonce()
        self._send(mine, deadline)
        meeting = wire.meeting(secret, mine, self._receive(wire.GREETING_BYTES, deadline), name)
        self._send(meeting.dialler_proof() + name, deadline)
        try:
            proof = self._receive(len(meeting.answerer_proof()), deadline)
        except _Broken as broken:
            raise _Broken(f"it has ended the connection, or the run's secret is another one there ({broken})") from broken
        if not agrees(proof, meeting.answerer_proof()):
            raise _Broken("what answers does not know the run's secret")

    def ask(self, request: bytes, deadline: float) -> str | None:
        self._send(request, deadline)
        (length,) = wire.LENGTH.unpack(self._receive(wire.LENGTH.size, deadline))
        if length > wire.MOST_BYTES:
            raise _Broken(f"its answer has {length} bytes")
        try:
            answer = json.loads(self._receive(length, deadline))
        except ValueError as error:
            raise _Broken(f"its answer is none: {error}") from error
        match answer:
            case [None]:
                return None
            case [str(value)]:
                return value
        raise _Broken("its answer is none")

    def _send(self, data: bytes, deadline: float) -> None:
        self._limit(deadline)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise _Broken(error) from error

    def _receive(self, length: int, deadline: float) -> bytes:
        parts, missing = [], length
        while missing:
            self._limit(deadline)
            try:
                part = self._socket.recv(missing)
            except OSError as error:
                raise _Broken(error) from error
            if not part:
                raise _Broken("the connection has ended")
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _limit(self, deadline: float) -> None:
        """A little coarse, so that a call changes the socket's own limit seldom."""
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise _Broken("no answer")
        if not left_s <= self._timeout_s <= left_s + 1.0:
            self._timeout_s = left_s + 0.5
            self._socket.settimeout(self._timeout_s)

    def close(self) -> None:
        self._socket.close()


class DurableRunStore(RunStore):
    """`patience_s`: so long a store that is away is tried; a `wait` takes at most a few seconds longer than it was given."""

    def __init__(self, address: str, secret: str, patience_s: float = PATIENCE_S) -> None:
        self.address = address
        self._secret, self._patience_s = secret, patience_s
        self._local = threading.local()

    def put_if_absent(self, key: str, value: str) -> str:
        check_value(key, value)
        found = self._call([wire.PUT, key, value])
        assert found is not None
        return found

    def set(self, key: str, value: str) -> None:
        check_value(key, value)
        self._call([wire.SET, key, value])

    def get(self, key: str) -> str | None:
        return self._call([wire.GET, key])

    def wait(self, key: str, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        found = self._call([wire.WAIT, key], end)
        if found is None:
            raise Retryable(f"no {key!r} in the run's store within {timeout_s:g} s")
        return found

    def delete(self, key: str) -> None:
        self._call([wire.DELETE, key])

    def _call(self, request: list[object], end: float | None = None) -> str | None:
        """The answer. `end`: until when the store may wait before it answers, when it is there."""
        begun = time.monotonic()
        deadline = begun + self._patience_s if end is None else max(end, begun) + min(self._patience_s, _WAIT_PATIENCE_S)
        pause_s = _FIRST_PAUSE_S
        while True:
            rest: list[object] = [] if end is None else [max(0.0, end - time.monotonic())]
            encoded = wire.frame([*request, *rest])
            try:
                return self._connection(deadline).ask(encoded, deadline)
            except (_Broken, OSError) as error:
                self._forget()
                if time.monotonic() + pause_s >= deadline:
                    raise Retryable(Cause(f"the run's store at {self.address} cannot be reached: {error}")) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def _connection(self, deadline: float) -> _Connection:
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None:
            if not hasattr(self._local, "name"):
                self._local.name = secrets.token_bytes(wire.NAME_BYTES)  # of this thread, for all of its connections
            found = self._local.connection = _Connection(self.address, self._secret, self._local.name, deadline)
        return found

    def _forget(self) -> None:
        found: _Connection | None = getattr(self._local, "connection", None)
        self._local.connection = None
        if found is not None:
            found.close()
