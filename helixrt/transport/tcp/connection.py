"""A connection that carries a rail's frames: bytes to frames and back, without blocking and without copies.

In: frames to write, a socket that is ready. Out: calls of its `Carrier`: a frame came, a payload is whole, the
connection broke. A long payload is read from the socket straight into the memory the carrier names, and written
straight from the caller's; header and payload leave in one call. Small frames are read ahead together, into a
buffer that shrinks while long payloads come, so that little of those passes through it.
"""

from __future__ import annotations

import socket
from collections import deque

from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameError, Kind
from helixrt.protocol.link.messages import Failure
from helixrt.protocol.liveness import Acknowledgements
from helixrt.transport.intake import Intake
from helixrt.transport.rail_connection import Carrier
from helixrt.transport.tcp.kernel_view import acknowledgements, bytes_in_kernel
from helixrt.transport.tcp.rails import failure_of

_AHEAD_BYTES = 128 << 10
_LITTLE_AHEAD_BYTES = HEADER_BYTES + MAX_BODY_BYTES  # holds any frame that is not DATA
_LONG_BYTES = 64 << 10  # payloads beyond this are read one by one
_GATHER_BYTES = 256 << 10  # written in one call, and the frame that goes beyond it
_GATHER_FRAMES = 16
_SINK_BYTES = 256 << 10
_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT


class _Out:
    """A frame to write: what is left of its header and of its payload."""

    __slots__ = ("header", "left", "name", "payload", "sequence")

    def __init__(self, header: bytes | memoryview, payload: memoryview | None, name: tuple[int, int] | None, sequence: int):
        self.header, self.payload, self.name, self.sequence = header, payload, name, sequence
        self.left = len(header) + (len(payload) if payload is not None else 0)


class Connection:
    """Owns `sock`, which is connected, proved and does not block. `number` is the rail's."""

    def __init__(self, sock: socket.socket, carrier: Carrier, peer: int, number: int) -> None:
        self.sock, self.peer, self.number = sock, peer, number
        self.descriptor = sock.fileno()
        self.landing: memoryview | Intake | None = None  # of the payload under way; None: nowhere
        self.closed = self.blocked = False  # blocked: the kernel takes no more for now
        self.watches_writing = False  # of the carrier: what its epoll was set to
        self._carrier = carrier
        self._queue: deque[_Out] = deque()
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._begin = self._end = 0  # of what was read ahead and not used
        self._limit = _AHEAD_BYTES
        self._missing = 0  # bytes of the payload under way that have not come
        self._at = 0  # where they go in `landing`
        self._sequence = 0  # of the payload under way
        self.length = 0  # of all of it
        self._sink: memoryview | None = None

    # ---------------------------------------------------------------- writing

    def put(
        self, header: bytes, payload: memoryview | None = None, name: tuple[int, int] | None = None, sequence: int = 0
    ) -> None:
        """Queue a frame; `name` and `sequence` of DATA."""
        self._queue.append(_Out(header, payload, name, sequence))

    @property
    def idle(self) -> bool:
        """Nothing waits to be written."""
        return not self._queue

    def write(self, budget: int) -> None:
        """As much as the kernel takes, about `budget` bytes at most."""
        queue = self._queue
        while queue and budget > 0 and not self.closed:
            first = queue[0]
            if len(queue) == 1 or first.left >= _GATHER_BYTES:
                buffers: list[bytes | memoryview] = [first.header] if first.header else []
                if first.payload is not None:
                    buffers.append(first.payload)
            else:
                buffers = self._gather()
            try:
                count = self.sock.sendmsg(buffers, (), _FLAGS)
            except BlockingIOError:
                self.blocked = True
                return
            except OSError as error:
                self._carrier.broke(self, failure_of(error.errno or 0), f"writing failed: {error.strerror}")
                return
            budget -= count
            self._advance(count)
        self.blocked = False

    def _gather(self) -> list[bytes | memoryview]:
        buffers: list[bytes | memoryview] = []
        total = 0
        for number, out in enumerate(self._queue):
            if number >= _GATHER_FRAMES or total >= _GATHER_BYTES:
                break
            if out.header:
                buffers.append(out.header)
            if out.payload is not None:
                buffers.append(out.payload)
            total += out.left
        return buffers

    def _advance(self, count: int) -> None:
        while count or (self._queue and not self._queue[0].left):
            out = self._queue[0]
            if count >= out.left:
                count -= out.left
                self._queue.popleft()
                if out.sequence:
                    self._carrier.frame_left(self, out.sequence)
                    if self.closed:
                        return
                continue
            out.left -= count
            if count >= len(out.header):
                count -= len(out.header)
                out.header = b""
                assert out.payload is not None
                out.payload = out.payload[count:]
            else:
                out.header = memoryview(out.header)[count:]
            return

    def detach(self, name: tuple[int, int]) -> None:
        """What is still to be written of the message comes from a copy from now on."""
        for out in self._queue:
            if out.name == name and out.payload is not None:
                out.payload = memoryview(bytes(out.payload))

    def say_last(self, word: bytes) -> None:
        """Before it is closed: a last frame, as far as that goes without blocking."""
        if not self.closed and self.idle:
            try:
                self.sock.send(word, _FLAGS)
            except OSError:
                pass  # the peer detects it by another connection, or by a timeout

    # ---------------------------------------------------------------- reading

    def read(self, budget: int) -> bool:
        """What has come, about `budget` bytes at most; whether anything had."""
        came = False
        while budget > 0 and not self.closed:
            into = self._target()
            try:
                count = self.sock.recv_into(into)
            except BlockingIOError:
                return came
            except OSError as error:
                self._carrier.broke(self, failure_of(error.errno or 0), f"reading failed: {error.strerror}")
                return came
            if count == 0:
                self._carrier.broke(self, Failure.PATH, "the peer's end was closed")
                return came
            came = True
            budget -= count
            if self._missing:
                if isinstance(self.landing, Intake):
                    self.landing.came(count)
                self._at += count
                self._missing -= count
                if not self._missing:
                    self._whole()
            else:
                self._end += count
                try:
                    self._use()
                except FrameError as error:
                    self._carrier.broke(self, Failure.PROGRAM, str(error))
                    return came
            if count < len(into):
                return came  # the socket is empty, or will say that it is not
        return came

    def _target(self) -> memoryview:
        if self._missing:
            if isinstance(self.landing, Intake):
                return self.landing.room()
            if self.landing is not None:
                return self.landing[self._at :]
            if self._sink is None:
                self._sink = memoryview(bytearray(_SINK_BYTES))
            return self._sink[: self._missing]
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin and self._limit - self._end < _LITTLE_AHEAD_BYTES:
            left = self._end - self._begin  # a part of a header or a body
            self._ahead[:left] = bytes(self._ahead[self._begin : self._end])
            self._begin, self._end = 0, left
        return self._ahead[self._end : max(self._limit, self._end + _LITTLE_AHEAD_BYTES)]

    def _use(self) -> None:
        """Take the frames out of what was read ahead."""
        ahead = self._ahead
        while self._end - self._begin >= HEADER_BYTES and not self.closed:
            begin = self._begin
            frame = frames.parse(ahead[begin : begin + HEADER_BYTES])
            after = begin + HEADER_BYTES
            if frame.kind is not Kind.DATA:
                if self._end - after < frame.length:
                    return
                self._begin = after + frame.length
                self._carrier.frame_came(self, frames.with_body(frame, ahead[after : self._begin]))
                continue
            self._begin = after
            self._sequence, self.length, self._at, self.landing = frame.sequence, frame.length, 0, None
            self._limit = _LITTLE_AHEAD_BYTES if frame.length > _LONG_BYTES else _AHEAD_BYTES
            self._carrier.frame_came(self, frame)
            if self.closed:
                return
            here = min(frame.length, self._end - after)
            if here and self.landing is not None:
                if isinstance(self.landing, Intake):
                    self.landing.put(ahead[after : after + here])
                else:
                    self.landing[:here] = ahead[after : after + here]
            self._begin += here
            self._at, self._missing = here, frame.length - here
            if self._missing:
                return
            self._whole()

    def _whole(self) -> None:
        self.landing = None
        self._carrier.payload_came(self, self._sequence)

    # ---------------------------------------------------------------- the end

    def emptied(self) -> bool:
        """Everything was written, and the peer's kernel has it."""
        return self.closed or (self.idle and bytes_in_kernel(self.sock) == 0)

    def acknowledgements(self, now: float) -> Acknowledgements | None:
        return None if self.closed else acknowledgements(self.sock, now)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.landing = None
            self._queue.clear()
            self.sock.close()
