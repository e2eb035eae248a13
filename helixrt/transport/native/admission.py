"""Incoming connections until they are authenticated, and those of later generations until they are wanted.

In: listening sockets. Out: connections whose other end proved the run's secret and said what they are for; others are closed
and counted. A connection has `HANDSHAKE_S` for its proof, and at most `MAX_HALF_OPEN` are open at once; a further one closes
the oldest. So unauthenticated connections cost little and block no peer: nothing else is kept of them, whatever generation they
name, and a peer whose connection was closed for one of them dials again at once.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from helixrt.transport import authentication
from helixrt.transport.native import handshake
from helixrt.transport.native.handshake import HandshakeError, Hello, OtherProtocol, Proofs, Verdict
from helixrt.transport.shared_memory.handshake import credentials
from helixrt.transport.tcp.watch import READ, Timer, Watch

HANDSHAKE_S = 2.0
MAX_HALF_OPEN = 64
MAX_PARKED = 1024
_ACCEPTED_AT_ONCE = 32
_NO_DESCRIPTORS_S = 0.1

_log = logging.getLogger("helixrt.transport")


class ConnectionClosed(Exception):
    """By the other end."""


class Words:
    """Words of a known size from a socket, as they come; never a byte more than asked for, nor a descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.got = b""

    def take(self, size: int) -> bytes | None:
        """The next word when it is whole. Raises ConnectionClosed, OSError."""
        while len(self.got) < size:
            try:
                more = self._receive(size - len(self.got))
            except BlockingIOError:
                return None
            if not more:
                raise ConnectionClosed
            self.got += more
        word, self.got = self.got, b""
        return word

    def _receive(self, size: int) -> bytes:
        return self._sock.recv(size)


def say(sock: socket.socket, word: bytes, descriptors: Sequence[int] = ()) -> None:
    """A word fits the empty buffer of a new connection, or the connection is no good. Raises OSError."""
    flags = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
    sent = socket.send_fds(sock, [word], list(descriptors), flags) if descriptors else sock.send(word, flags)
    if sent != len(word):
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))


class Accepted:
    """The listener's half of a handshake."""

    def __init__(self, sock: socket.socket, secret: bytes, protocol: int) -> None:
        self.sock = sock
        self.local = sock.family == socket.AF_UNIX
        self.hello: Hello | None = None
        self.timer: Timer | None = None
        self.refused: OtherProtocol | None = None  # it was told, and what it says is thrown away until it closes
        self._secret, self._protocol = secret, protocol
        self._greeted, self._proofs = False, Proofs(secret, protocol, b"", b"")
        self._words = Words(sock)

    def step(self) -> bool:
        """Go on; whether the other end has proved itself. Raises HandshakeError, OtherProtocol, ConnectionClosed, OSError."""
        while self.refused is not None:
            self._words.take(handshake.HELLO_BYTES)
            if self._words.got:
                return False
        if not self._greeted:
            word = self._words.take(handshake.GREETING_BYTES)
            if word is None:
                return False
            handshake.check_greeting(word, self._protocol)
            self._greeted = True
        if self.hello is None:
            word = self._words.take(handshake.HELLO_BYTES)
            if word is None:
                return False
            self.hello = handshake.parse_hello(word)
            if self.hello.memory != self.local:
                raise HandshakeError("a greeting for another kind of socket")
            self._proofs = Proofs(self._secret, self._protocol, word, authentication.nonce())
            say(self.sock, handshake.pack_greeting(self._protocol) + self._proofs.nonce)
        proof = self._words.take(handshake.PROOF_BYTES)
        if proof is None:
            return False
        self._proofs.check_connector(proof)
        return True

    def refuse(self, error: OtherProtocol) -> None:
        """Tell the other end this end's number. Raises OSError."""
        self.refused = error
        say(self.sock, handshake.pack_greeting(self._protocol) + bytes(handshake.CHALLENGE_BYTES))

    def may_go(self) -> bool:
        """It has sent a valid message or nothing yet: if it closes now, it was a peer that cancelled its attempt."""
        return not self._words.got and self.refused is None

    def verdict(self, verdict: Verdict, generation: int, memory: int = -1) -> bool:
        """Send the verdict, and the descriptor of memory if there is one; False if the connection is closed."""
        try:
            say(self.sock, self._proofs.verdict(verdict, generation), () if memory < 0 else (memory,))
        except OSError:
            return False
        return True


class Listener:
    """The listening sockets, and accepted connections until they are authenticated: then `proved` has them."""

    def __init__(
        self,
        watch: Watch,
        listeners: Sequence[socket.socket],
        secret: bytes,
        protocol: int,
        proved: Callable[[Accepted], None],
    ) -> None:
        self.strangers = 0
        self._watch, self._secret, self._protocol, self._proved = watch, secret, protocol, proved
        self._half_open: dict[int, Accepted] = {}  # oldest first
        self._listeners = list(listeners)
        self._told: set[int] = set()  # protocol numbers that the log has
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
            if sock.family == socket.AF_UNIX and credentials(sock)[1] != os.geteuid():
                self.strangers += 1
                sock.close()
                continue
            if len(self._half_open) >= MAX_HALF_OPEN:
                self._reject(next(iter(self._half_open.values())))
            accepted = Accepted(sock, self._secret, self._protocol)
            self._half_open[sock.fileno()] = accepted
            accepted.timer = self._watch.at(time.monotonic() + HANDSHAKE_S, functools.partial(self._reject, accepted))
            self._watch.add(sock, READ, functools.partial(self._step, accepted))

    def _step(self, accepted: Accepted, mask: int) -> None:
        try:
            proved = accepted.step()
        except HandshakeError:
            self._reject(accepted)
        except OtherProtocol as error:
            self._tell_protocol(accepted, error)
        except (ConnectionClosed, OSError):
            if accepted.may_go():
                self._release(accepted)  # it is gone
                accepted.sock.close()
            else:
                self._reject(accepted)
        else:
            if proved:
                self._release(accepted)
                self._proved(accepted)

    def _tell_protocol(self, accepted: Accepted, error: OtherProtocol) -> None:
        """It stays half open until it closes, since closing at once could take back what was told."""
        if error.theirs not in self._told and len(self._told) < MAX_HALF_OPEN:
            self._told.add(error.theirs)
            _log.warning("a connection was refused: %s", error)
        try:
            accepted.refuse(error)
        except OSError:
            self._reject(accepted)

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


class Parked:
    """Authenticated connections of newer generations. They wait for a verdict until this end is in their generation."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._inside: dict[tuple[int, int], Accepted] = {}  # (sender, rail), the oldest first

    def enter(self, accepted: Accepted) -> None:
        """Add it. It replaces one of the same sender and rail, or the oldest if there is no room."""
        hello = accepted.hello
        assert hello is not None
        key = (hello.sender, hello.rail)
        if key not in self._inside and len(self._inside) >= MAX_PARKED:
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

    def _turn_out(self, key: tuple[int, int]) -> None:
        accepted = self._inside.pop(key)
        self._watch.remove(accepted.sock)
        accepted.sock.close()
