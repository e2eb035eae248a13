"""The connector's half of a handshake, from `connect` on.

In: where to connect to, and what for. Out: a socket whose other end proved the secret and accepted, with the shared memory if
it is a Unix socket; or the class of the failure, and whether the other end's kernel had taken the connection.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from helixrt.protocol.link.messages import Failure
from helixrt.transport.native import handshake
from helixrt.transport.native.address import dial_locally
from helixrt.transport.native.admission import ConnectionClosed, Words, say
from helixrt.transport.native.handshake import HandshakeError, Hello, OtherProtocol, Proofs, Purpose, Verdict
from helixrt.transport.native.memory import check_memory
from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.rails import SocketTuning, TcpRail
from helixrt.transport.tcp.watch import READ, WRITE, Watch

_DESCRIPTORS = 1  # that a verdict may carry


@dataclass(frozen=True)
class Way:
    """How a peer's rail is reached: over the Unix socket `name`, or, where that is empty, from `rail` to `host` and `port`."""

    rail: TcpRail
    host: str = ""
    port: int = 0
    name: str = ""

    @property
    def local(self) -> bool:
        return bool(self.name)

    def dial(self, tuning: SocketTuning) -> tuple[socket.socket | None, int]:
        """Begin to connect. The socket, or None and the error number."""
        return dial_locally(self.name) if self.local else tcp_rails.dial(self.rail, tuning, self.host, self.port)


class _Answers(Words):
    """Words that may come with descriptors, which are `descriptors` until they are taken."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.descriptors: list[int] = []

    def _receive(self, size: int) -> bytes:
        if self._sock.family != socket.AF_UNIX:
            return super()._receive(size)
        more, descriptors, _, _ = socket.recv_fds(self._sock, size, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        self.descriptors += descriptors
        return more

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class Dial:
    """One of `welcomed` and `failed` is called once, unless it is cancelled. `memory_bytes`: of the memory to be shared.

    `welcomed` gets the socket and the memory's descriptor (-1: none), both its own from then on.
    """

    def __init__(
        self,
        watch: Watch,
        sock: socket.socket,
        secret: bytes,
        protocol: int,
        hello: Hello,
        expires_s: float,
        memory_bytes: int,
        welcomed: Callable[[Dial, socket.socket, int], None],
        failed: Callable[[Dial, Failure, str], None],
    ) -> None:
        self.hello = hello
        self.reset = False  # it failed because the other end closed the connection
        self.open = False  # the other end's kernel has taken the connection, and neither end has closed it
        self.open_s = -math.inf  # when it did so
        self._watch, self._sock, self._secret, self._protocol = watch, sock, secret, protocol
        self._memory_bytes = memory_bytes
        self._welcomed, self._failed = welcomed, failed
        self._words = _Answers(sock)
        self._connected = self._greeted = False
        self._proofs: Proofs | None = None
        self._timer = watch.at(expires_s, lambda: self._fail(Failure.PATH, "no answer in time"))
        watch.add(sock, READ | WRITE, self._step)

    def _step(self, mask: int) -> None:
        try:
            self._go_on()
        except HandshakeError as error:
            self.open = False
            self._fail(Failure.PEER_GONE, f"another program listens there: {error}")
        except OtherProtocol as error:
            self.open = False
            self._fail(Failure.PROGRAM, str(error))
        except ConnectionClosed:
            self.reset, self.open = True, False
            self._fail(Failure.PATH, "the connection was closed before it was proved")
        except OSError as error:
            self.reset, self.open = error.errno in (errno.ECONNRESET, errno.EPIPE), False
            self._fail(tcp_rails.failure_of(error.errno or 0), f"cannot connect: {error.strerror}")

    def _go_on(self) -> None:
        if not self._connected:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            if not self.hello.memory and self._sock.getsockname() == self._sock.getpeername():
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))  # a free port can connect to itself
            self._connected = self.open = True
            self.open_s = time.monotonic()
            self._watch.change(self._sock, READ)
            say(self._sock, handshake.pack_greeting(self._protocol) + self.hello.pack())
        if not self._greeted:
            word = self._words.take(handshake.GREETING_BYTES)
            if word is None:
                return
            handshake.check_greeting(word, self._protocol)
            self._greeted = True
        if self._proofs is None:
            word = self._words.take(handshake.CHALLENGE_BYTES)
            if word is None:
                return
            self._proofs = Proofs(self._secret, self._protocol, self.hello.pack(), word)
            say(self._sock, self._proofs.connector())
        word = self._words.take(handshake.VERDICT_BYTES)
        if word is None:
            return
        verdict, generation = self._proofs.parse_verdict(word)
        if verdict is Verdict.WELCOME:
            memory = self._memory()
            self._release()
            self._welcomed(self, self._sock, memory)
            return
        what = {
            Verdict.STALE: f"it is in generation {generation} already",
            Verdict.ENDED: "its end of the link is over in this generation",
            Verdict.UNKNOWN: "it has no such rank or rail in this generation",
        }[verdict]
        self.open = False
        self._fail(Failure.PROGRAM, what)

    def _memory(self) -> int:
        """That the verdict came with. Raises HandshakeError."""
        wanted = self.hello.memory and self.hello.purpose is Purpose.RAIL
        if len(self._words.descriptors) != wanted:
            raise HandshakeError(f"{len(self._words.descriptors)} descriptors came with its verdict, {int(wanted)} should")
        if not wanted:
            return -1
        try:
            check_memory(self._words.descriptors[0], self._memory_bytes)
        except ValueError as error:
            raise HandshakeError(str(error)) from error
        return self._words.descriptors.pop()

    def _fail(self, failure: Failure, reason: str) -> None:
        self.cancel()
        self._failed(self, failure, reason)

    def _release(self) -> None:
        self._timer.cancel()
        self._watch.remove(self._sock)

    def cancel(self) -> None:
        if self._sock.fileno() >= 0:
            self._release()
            self._words.close()
            self._sock.close()
