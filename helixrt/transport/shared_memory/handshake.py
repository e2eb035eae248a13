"""How two endpoints on one host meet: a Unix socket, a mutual proof, and a segment of memory each way.

In: a connection and the terms (`Terms`) this end stands by. Out: `Joined`, or the reason why not
(`Stranger`, `Stale`). A handshake is a generator that is sent each message of the other end as it comes, so
one thread has many under way.

    dialler                                     answerer
    HELLO generation, from, to, nonce   ->      waits here if it is not yet in that generation
                                        <-      CHALLENGE nonce
    PROOF                               ->
                                        <-      VERDICT proof, welcome or stale
    SEGMENT descriptor, proof of memory <->     SEGMENT
    READY                               <->     READY

The socket is named in the abstract space of the network namespace: it has no file, vanishes with its owner, and
a process that can connect to it is on this machine and in this namespace, which proves a shared host.
Both ends must belong to one user, by the kernel's word (SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

from helixrt.errors import HelixError
from helixrt.protocol.shared_memory.frames import SegmentError
from helixrt.transport.authentication import NONCE_BYTES, PROOF_BYTES, Meeting, agrees, nonce
from helixrt.transport.process_memory import Probe, ProcessMemory, Proof
from helixrt.transport.shared_memory.segment import OwnSegment, PeerSegment

_HELLO = struct.Struct(f"<8sQii{NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"<{NONCE_BYTES}s")
_PROOF = struct.Struct(f"<{PROOF_BYTES}s")
_VERDICT = struct.Struct(f"<{PROOF_BYTES}sBQ")
_SEGMENT = struct.Struct("<QQ32s")
_MAGIC = b"hlxshm\0\1"
_WELCOME, _STALE = 0, 1
_READY = b"ready"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)

Message = tuple[bytes, list[int]]  # bytes, and descriptors that came with them
_GO: Message = (b"", [])  # from this process; nothing empty comes from the other


class HandshakeError(HelixError):
    """No link comes of this connection."""


class Stranger(HandshakeError):
    """The other end does not prove the run's secret, or breaks the protocol."""


class Stale(HandshakeError):
    """The two ends are of different generations, or do not expect each other in this one."""


class HungUp(HandshakeError):
    """The other end left."""


@dataclass(frozen=True, slots=True)
class Hello:
    generation: int
    dialler: int
    answerer: int
    nonce: bytes

    def context(self) -> bytes:
        return struct.pack("<8sQii", b"shm", self.generation, self.dialler, self.answerer)


@dataclass(frozen=True, slots=True)
class Terms:
    """What this end brings: the run's secret, the size of its ring, whether it reads the peer's memory directly."""

    secret: bytes
    ring_bytes: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Joined:
    own: OwnSegment
    theirs: PeerSegment
    memory: ProcessMemory | None
    process: int  # pidfd, or -1
    pid: int  # of the peer, as the kernel reports it; 0: not visible here

    def close(self) -> None:
        self.own.close()
        self.theirs.close()
        if self.process >= 0:
            os.close(self.process)


Steps = Generator[None, Message, Joined]


class Handshake:
    """One under way on `connection` (non-blocking), which is its own until `joined` is taken."""

    def __init__(self, connection: socket.socket, steps: Callable[[socket.socket], Steps], until_s: float) -> None:
        self.connection, self.until_s = connection, until_s
        self.joined: Joined | None = None
        self._steps = steps(connection)

    def begin(self) -> None:
        """Raises HandshakeError."""
        self._guard(lambda: next(self._steps))

    def resume(self) -> None:
        """Let an answerer go on that waits for this end's generation. Raises HandshakeError."""
        self._guard(lambda: self._steps.send(_GO))

    def go_on(self) -> None:
        """Take the message that came. Raises HandshakeError; the connection is then to be closed."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(self.connection, 512, 4, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            raise HungUp(str(error)) from None
        if not data or flags & _CUT:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Stranger("a message too long") if data else HungUp("the other end left")
        self._guard(partial(self._steps.send, (data, descriptors)))

    def _guard(self, step: Callable[[], object]) -> None:
        try:
            step()
        except StopIteration as end:
            self.joined = end.value
        except (SegmentError, struct.error) as error:
            raise Stranger(str(error)) from None
        except OSError as error:
            raise HungUp(str(error)) from None

    def close(self) -> None:
        self._steps.close()
        if self.joined is not None:
            self.joined.close()
        self.connection.close()


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, by the kernel's word; pid 0 where this process cannot see it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def dial(terms: Terms, generation: int, me: int, peer: int) -> Callable[[socket.socket], Steps]:
    """The dialling end, rank `me`, of a link with `peer`."""

    def steps(connection: socket.socket) -> Steps:
        _same_user(connection)
        hello = Hello(generation, me, peer, nonce())
        connection.send(_HELLO.pack(_MAGIC, generation, me, peer, hello.nonce))
        (theirs,) = _CHALLENGE.unpack(_only_bytes((yield)))
        meeting = Meeting(terms.secret, hello.context(), hello.nonce, theirs)
        connection.send(_PROOF.pack(meeting.dialler_proof()))
        proof, verdict, their_generation = _VERDICT.unpack(_only_bytes((yield)))
        if not agrees(proof, meeting.answerer_proof()):
            raise Stranger(f"rank {peer} does not prove the run's secret")
        if verdict != _WELCOME:
            raise Stale(f"rank {peer} is in generation {their_generation} and does not expect rank {me} in {generation}")
        return (yield from _join(connection, terms))

    return steps


def answer(
    terms: Terms, heard: Callable[[Hello], None], expected: Callable[[Hello], tuple[bool, int]]
) -> Callable[[socket.socket], Steps]:
    """The answering end. `heard` gets the HELLO; from then on it waits for `Handshake.resume`, to be called when
    this end is in that generation or beyond. `expected` returns whether to accept, and the generation of this end."""

    def steps(connection: socket.socket) -> Steps:
        _same_user(connection)
        magic, generation, dialler, answerer, their_nonce = _HELLO.unpack(_only_bytes((yield)))
        if magic != _MAGIC:
            raise Stranger("it uses another version of the protocol")
        hello = Hello(generation, dialler, answerer, their_nonce)
        heard(hello)
        if (yield) != _GO:
            raise Stranger("it sent a message out of turn")
        meeting = Meeting(terms.secret, hello.context(), their_nonce, nonce())
        connection.send(_CHALLENGE.pack(meeting.answerer_nonce))
        (proof,) = _PROOF.unpack(_only_bytes((yield)))
        if not agrees(proof, meeting.dialler_proof()):
            raise Stranger("it does not prove the run's secret")
        welcome, mine = expected(hello)
        connection.send(_VERDICT.pack(meeting.answerer_proof(), _WELCOME if welcome else _STALE, mine))
        if not welcome:
            raise Stale(f"rank {dialler} came for generation {generation}, this is {mine}")
        return (yield from _join(connection, terms))

    return steps


def _same_user(connection: socket.socket) -> None:
    uid = credentials(connection)[1]
    if uid != os.geteuid():
        raise Stranger(f"it belongs to user {uid}, this process to {os.geteuid()}")


def _only_bytes(message: Message) -> bytes:
    data, descriptors = message
    if descriptors:
        for descriptor in descriptors:
            os.close(descriptor)
        raise Stranger("descriptors that were not requested")
    return data


def _join(connection: socket.socket, terms: Terms) -> Steps:
    """The same at both ends: give a segment, get one, test what else is permitted."""
    with contextlib.ExitStack() as undo:
        own = OwnSegment(terms.ring_bytes)
        undo.callback(own.close)
        probe = Probe()
        hint = _SEGMENT.pack(probe.proof.pid, probe.proof.address, probe.proof.nonce)
        socket.send_fds(connection, [hint], [own.descriptor])
        data, descriptors = yield
        if len(descriptors) != 1:
            _only_bytes((data, descriptors))
            raise Stranger("no segment")
        theirs = PeerSegment(descriptors[0])
        undo.callback(theirs.close)
        proof = Proof(*_SEGMENT.unpack(data))
        pid = credentials(connection)[0]
        process = -1
        if pid and pid == proof.pid:  # else it has forked since, or is in another pid namespace
            with contextlib.suppress(OSError, AttributeError):  # an old kernel; a Python built on one
                process = os.pidfd_open(pid)
                undo.callback(os.close, process)
        memory = None
        if terms.direct and process >= 0:
            memory = ProcessMemory(pid, process, connection.fileno())
            if not memory.proves(proof):
                memory = None
        connection.send(_READY)
        if _only_bytes((yield)) != _READY:
            raise Stranger("it is not ready")
        del probe  # the peer has tried to read it
        undo.pop_all()
    return Joined(own, theirs, memory, process, pid)
