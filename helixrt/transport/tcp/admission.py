"""Connections until they are authenticated: dialled ones, accepted ones, and their handshake.

In: listening sockets, addresses to dial. Out: sockets whose other end proved the run's secret and sent the purpose of
the connection; others are closed and counted. A connection has `HANDSHAKE_S` for its proof and at most `MAX_HALF_OPEN`
are open at once; a further one closes the oldest. So unauthenticated connections cost little and block no peer.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import socket
import time
from collections.abc import Callable, Sequence

from helixrt.protocol.link.messages import Failure
from helixrt.transport import authentication
from helixrt.transport.tcp.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    VERDICT_BYTES,
    HandshakeError,
    Hello,
    Proofs,
    Verdict,
    pack_challenge,
    parse_challenge,
    parse_hello,
)
from helixrt.transport.tcp.rails import failure_of
from helixrt.transport.tcp.watch import READ, WRITE, Timer, Watch

HANDSHAKE_S = 2.0
MAX_HALF_OPEN = 64
MAX_WAITING = 1024
_ACCEPTED_AT_ONCE = 32
_NO_DESCRIPTORS_S = 0.1


class _Ended(Exception):
    """The other end closed the connection."""


class _Words:
    """Words of a known size from a socket, as they come; never a byte more than asked for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.got = b""

    def take(self, size: int) -> bytes | None:
        """The next word when it is whole. Raises _Ended, OSError."""
        while len(self.got) < size:
            try:
                more = self._sock.recv(size - len(self.got))
            except BlockingIOError:
                return None
            if not more:
                raise _Ended
            self.got += more
        word, self.got = self.got, b""
        return word


def _say(sock: socket.socket, word: bytes) -> None:
    """A word fits the empty buffer of a new connection, or the connection is no good. Raises OSError."""
    if sock.send(word, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) != len(word):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


class Accepted:
    """The listener's half of a handshake; `proved` gets the result and must answer with `verdict`."""

    def __init__(self, sock: socket.socket, secret: bytes) -> None:
        self.sock, self._secret = sock, secret
        self.hello: Hello | None = None
        self.proofs: Proofs | None = None
        self._words = _Words(sock)
        self.timer: Timer | None = None

    def step(self) -> bool:
        """Go on; whether the other end has proved itself. Raises HandshakeError, _Ended, OSError."""
        if self.proofs is None:
            word = self._words.take(HELLO_BYTES)
            if word is None:
                return False
            self.hello = parse_hello(word)
            self.proofs = Proofs(self._secret, word, authentication.nonce())
            _say(self.sock, pack_challenge(self.proofs.nonce))
        proof = self._words.take(PROOF_BYTES)
        if proof is None:
            return False
        self.proofs.check_connector(proof)
        return True

    def may_go(self) -> bool:
        """It has sent a valid message or nothing yet: if it closes now, it was a peer that cancelled its attempt."""
        return not self._words.got

    def verdict(self, verdict: Verdict, generation: int) -> bool:
        """Send the verdict; False if the connection is closed."""
        assert self.proofs is not None
        try:
            _say(self.sock, self.proofs.verdict(verdict, generation))
        except OSError:
            return False
        return True


class Listener:
    """The listening sockets, and accepted connections until they are authenticated."""

    def __init__(
        self, watch: Watch, listeners: Sequence[socket.socket], secret: bytes, proved: Callable[[Accepted], None]
    ) -> None:
        self.strangers = 0
        self._watch, self._secret, self._proved = watch, secret, proved
        self._half_open: dict[int, Accepted] = {}  # oldest first
        self._listeners = list(listeners)
        for listener in self._listeners:
            self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        self._watch.add(listener, READ, lambda mask: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be ready again at once, in vain
                    self._watch.remove(listener)
                    self._watch.at(time.monotonic() + _NO_DESCRIPTORS_S, lambda: self._listen(listener))
                return
            sock.setblocking(False)
            if len(self._half_open) >= MAX_HALF_OPEN:
                self._reject(next(iter(self._half_open.values())))
            accepted = Accepted(sock, self._secret)
            self._half_open[sock.fileno()] = accepted
            accepted.timer = self._watch.at(time.monotonic() + HANDSHAKE_S, functools.partial(self._reject, accepted))
            self._watch.add(sock, READ, functools.partial(self._step, accepted))

    def _step(self, accepted: Accepted, mask: int) -> None:
        try:
            proved = accepted.step()
        except HandshakeError:
            self._reject(accepted)
        except (_Ended, OSError):
            if accepted.may_go():
                self._release(accepted)  # it is gone
                accepted.sock.close()
            else:
                self._reject(accepted)
        else:
            if proved:
                self._release(accepted)
                self._proved(accepted)

    def _reject(self, accepted: Accepted) -> None:
        self.strangers += 1
        self._release(accepted)
        accepted.sock.close()

    def _release(self, accepted: Accepted) -> None:
        del self._half_open[accepted.sock.fileno()]
        self._watch.remove(accepted.sock)
        assert accepted.timer is not None
        accepted.timer.cancel()

    def close(self) -> None:
        for accepted in list(self._half_open.values()):
            self._release(accepted)
            accepted.sock.close()
        for listener in self._listeners:
            self._watch.remove(listener)
            listener.close()


class PendingConnections:
    """Authenticated connections of newer generations. They wait for a verdict until this end is in their generation."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._inside: dict[tuple[int, int, int], Accepted] = {}  # (sender, rail, purpose), the oldest first

    def enter(self, accepted: Accepted) -> None:
        """Add it. It replaces one of the same sender and purpose, or the oldest if there is no room."""
        hello = accepted.hello
        assert hello is not None
        key = (hello.sender, hello.rail, int(hello.purpose))
        if key not in self._inside and len(self._inside) >= MAX_WAITING:
            self._turn_out(next(iter(self._inside)))
        if key in self._inside:
            self._turn_out(key)
        self._inside[key] = accepted
        # No data is expected now: it was closed, or sent too much.
        self._watch.add(accepted.sock, READ, lambda mask: self._turn_out(key))

    def leave(self, generation: int) -> list[Accepted]:
        """Those of `generation` and older ones; they are the caller's now."""
        keys = [key for key, each in self._inside.items() if each.hello and each.hello.generation <= generation]
        left = [self._inside.pop(key) for key in keys]
        for accepted in left:
            self._watch.remove(accepted.sock)
        return left

    def close(self) -> None:
        for key in list(self._inside):
            self._turn_out(key)

    def _turn_out(self, key: tuple[int, int, int]) -> None:
        accepted = self._inside.pop(key)
        self._watch.remove(accepted.sock)
        accepted.sock.close()


class Dial:
    """The connector's half, from `connect` on. One of `welcomed` and `failed` is called once, unless it is cancelled."""

    def __init__(
        self,
        watch: Watch,
        sock: socket.socket,
        secret: bytes,
        hello: Hello,
        expires_s: float,
        welcomed: Callable[[Dial, socket.socket], None],
        failed: Callable[[Dial, Failure, str, Verdict | None], None],
    ) -> None:
        self.hello = hello
        self._watch, self._sock, self._secret = watch, sock, secret
        self._welcomed, self._failed = welcomed, failed
        self._connected = False
        self._proofs: Proofs | None = None
        self._words = _Words(sock)
        self.reset = False  # it failed because the other end closed the connection
        self.open = False  # the other end's kernel accepted the connection, and neither end has closed it
        self.open_s = -math.inf  # when it did so
        self._timer = watch.at(expires_s, lambda: self._fail(Failure.PATH, "no answer in time"))
        watch.add(sock, READ | WRITE, self._step)

    def _step(self, mask: int) -> None:
        try:
            self._go_on()
        except HandshakeError as error:
            self.open = False
            self._fail(Failure.PEER_GONE, f"another program listens there: {error}")
        except _Ended:
            self.reset, self.open = True, False
            self._fail(Failure.PATH, "the connection was closed before it was proved")
        except OSError as error:
            self.reset, self.open = error.errno in (errno.ECONNRESET, errno.EPIPE), False
            self._fail(failure_of(error.errno or 0), f"cannot connect: {error.strerror}")

    def _go_on(self) -> None:
        if not self._connected:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if self._sock.getsockname() == self._sock.getpeername():  # a free port can connect to itself
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            self._connected = self.open = True
            self.open_s = time.monotonic()
            self._watch.change(self._sock, READ)
            _say(self._sock, self.hello.pack())
        if self._proofs is None:
            word = self._words.take(CHALLENGE_BYTES)
            if word is None:
                return
            self._proofs = Proofs(self._secret, self.hello.pack(), parse_challenge(word))
            _say(self._sock, self._proofs.connector())
        word = self._words.take(VERDICT_BYTES)
        if word is None:
            return
        verdict, generation = self._proofs.parse_verdict(word)
        if verdict is Verdict.WELCOME:
            self._release()
            self._welcomed(self, self._sock)
            return
        what = {
            Verdict.STALE: f"it is in generation {generation} already",
            Verdict.ENDED: "its end of the link is over in this generation",
            Verdict.UNKNOWN: "it has no such rank or rail in this generation",
        }[verdict]
        self._fail(Failure.PROGRAM, what, verdict)

    def _fail(self, failure: Failure, reason: str, verdict: Verdict | None = None) -> None:
        self.cancel()
        self._failed(self, failure, reason, verdict)

    def _release(self) -> None:
        self._timer.cancel()
        self._watch.remove(self._sock)

    def cancel(self) -> None:
        if self._sock.fileno() >= 0:
            self._release()
            self._sock.close()
