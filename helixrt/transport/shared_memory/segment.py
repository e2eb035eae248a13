"""The memory two processes share: one segment per direction of a link, and a ring of frames in it.

Each end makes one segment and is the only one that ever writes it; the peer maps it read-only, and the
kernel's seals hold both to that: no end can shrink the file under the other (a fault), grow it, or write
in the other's. So what a dying or corrupt peer leaves behind are wrong numbers at worst, and every number
read from its segment is checked here (`SegmentError`).

In a segment: words (`Word`), the cause of an abort, the table of offers, and a ring of frames. A frame is a
header of 64 bytes and a payload that is contiguous in the ring, all in multiples of 64 bytes. The ring has
one writer and one reader: the writer's `WRITTEN` and the reader's `READ` (in the reader's own segment) only
grow; there is no lock that a dead process could hold. The memory is an unnamed file (memfd), which
disappears with its last mapping. A ring gets its memory as its writer first comes by (`OwnSegment.allocate`):
clearing all of it for every link took a third of the time of a reconfiguration, and most links of a generation
carry little. A reader sees only what was written, so it touches no page that is not there.

Ordering. A word is stored and loaded by one aligned 8-byte access: `memoryview` items of format "Q" are
copied by a memcpy of constant size 8, which compilers make one instruction. Between the access to a word
and the accesses to what it announces stands a `Fence`: it releases and takes a lock of its own, an atomic
read-modify-write with release and then one with acquire semantics, which on x86 and ARM lets no
access pass in either direction. So positions are never seen before the bytes they stand for, memory
is never reused before it was read, and of two ends that go to sleep one sees the other's last write.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from enum import IntEnum

from helixrt.errors import Cause, HelixError
from helixrt.protocol.link import frames
from helixrt.protocol.shared_memory.frames import HEADER_BYTES, LINE_BYTES, OFFERS, Frame, Kind, SegmentError, charge

# Values of <linux/fcntl.h>; Python names some of them only from 3.12 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_SEALS = _SEAL_SHRINK | _SEAL_GROW

_MAGIC = 0x686C6978_00000003  # the layout's version is in it
_CAUSE_AT, _OFFERS_AT, _RING_AT = 4096, 8192, 8192 + 8 * OFFERS
MAX_RING_BYTES = 1 << 30
_FIRST_RING_BYTES = 32 << 10  # there from the beginning; it doubles from then on

_HEADER = struct.Struct("<IIqQQQQ")


class NoMemory(HelixError):
    """There is none on this host for more of the own ring."""


class Word(IntEnum):
    """Words of a segment, each on a cache line of its own, all written by its owner."""

    MAGIC = 0
    RING_BYTES = 1
    WRITTEN = 2  # bytes of frames in this ring, since the beginning
    READ = 3  # bytes read of the peer's ring, since the beginning
    ASLEEP = 4  # odd: the owner sleeps and must be woken by a byte on the socket; each sleep has a number of its own
    EAGER_FREED = 5  # bytes of eager messages whose memory the owner gave back, since the beginning
    STATE = 6  # a `State`
    AWAITED = 7  # the oldest operation that the owner waits for (`protocol.calls.awaited`); 0: none


class State(IntEnum):
    OPEN = 0
    CLOSED = 1  # in order
    ABORTED = 2  # the generation is over; the cause is in its place
    REFUSED = 3  # the owner gave this link up; the cause is in its place


class Fence:
    """Orders memory accesses before a call against those after it, see the module's text. Calls from one thread at a time."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release, self._acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        try:
            self._release()
        except RuntimeError:  # an interrupt came between the two last time
            pass
        self._acquire(False)


class _Mapping:
    """A mapped segment's parts."""

    def __init__(self, memory: mmap.mmap, ring_bytes: int) -> None:
        self._memory: mmap.mmap | None = memory
        view = memoryview(memory)
        words = view[: LINE_BYTES * len(Word)].cast("Q")
        cause, offers, ring = view[_CAUSE_AT:_OFFERS_AT], view[_OFFERS_AT:_RING_AT].cast("Q"), view[_RING_AT:]
        self.words, self.cause, self.offers, self.ring = words, cause, offers, ring
        self.ring_bytes = ring_bytes
        self._views = [words, cause, offers, ring, view]

    def load(self, word: Word) -> int:
        return self.words[word * 8]

    def close(self) -> None:
        """Give the memory up; idempotent. Where an error's traceback still holds a view of it, it goes with that."""
        for view in self._views:
            view.release()
        self._views.clear()
        if self._memory is not None:
            try:
                self._memory.close()
            except BufferError:
                pass
            self._memory = None


class OwnSegment(_Mapping):
    """The segment this end writes. `descriptor` is for the peer; it is -1 once there is no more memory to come."""

    def __init__(self, ring_bytes: int) -> None:
        assert ring_bytes % mmap.PAGESIZE == 0 and 0 < ring_bytes <= MAX_RING_BYTES
        self.descriptor = os.memfd_create("helixrt-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _RING_AT + ring_bytes)
            self.allocated = min(ring_bytes, _FIRST_RING_BYTES)  # bytes of the ring that may be written
            os.posix_fallocate(self.descriptor, 0, _RING_AT + self.allocated)
            memory = mmap.mmap(self.descriptor, _RING_AT + ring_bytes)
            try:  # FUTURE_WRITE came with Linux 5.1; without it the peer is not held to reading
                fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE | _SEAL_SEAL)
            except OSError:
                fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEALS | _SEAL_SEAL)
        except BaseException:
            self._close_descriptor()
            raise
        super().__init__(memory, ring_bytes)
        self.store(Word.RING_BYTES, ring_bytes)
        self.store(Word.MAGIC, _MAGIC)

    def store(self, word: Word, value: int) -> None:
        self.words[word * 8] = value

    def allocate(self, ring_bytes: int) -> None:
        """Have memory for at least so many bytes of the ring. Raises NoMemory: an error now, not a fault at the first write."""
        if ring_bytes > self.allocated:
            more = min(max(ring_bytes, 2 * self.allocated), self.ring_bytes)
            try:
                os.posix_fallocate(self.descriptor, _RING_AT + self.allocated, more - self.allocated)
            except OSError as error:
                raise NoMemory(f"{more - self.allocated} bytes for a ring in shared memory: {error.strerror}") from None
            self.allocated = more
            if more == self.ring_bytes:
                self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        self._close_descriptor()
        super().close()

    def put_cause(self, cause: Cause) -> None:
        body = frames.cause_body(cause)[: frames.MAX_BODY_BYTES - 4]
        self.cause[:4] = len(body).to_bytes(4, "little")
        self.cause[4 : 4 + len(body)] = body


class PeerSegment(_Mapping):
    """The peer's segment, read-only. Takes over `descriptor`. Raises SegmentError if it is none."""

    def __init__(self, descriptor: int) -> None:
        try:
            try:
                seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
            except OSError as error:
                raise SegmentError(f"the peer's descriptor is no sealed memory ({error.strerror})") from None
            if seals & _SEALS != _SEALS:
                raise SegmentError(f"the peer's memory has seals {seals:#x}: it could be shrunk under this process")
            size = os.fstat(descriptor).st_size
            ring_bytes = size - _RING_AT
            if not 0 < ring_bytes <= MAX_RING_BYTES or ring_bytes % mmap.PAGESIZE:
                raise SegmentError(f"the peer's memory has {size} bytes: no segment has")
            memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        super().__init__(memory, ring_bytes)
        if self.load(Word.MAGIC) != _MAGIC or self.load(Word.RING_BYTES) != ring_bytes:
            self.close()
            raise SegmentError("the peer's memory is no segment of this version")

    def read_cause(self) -> Cause:
        """Why the peer aborted. Raises SegmentError."""
        size = int.from_bytes(self.cause[:4], "little")
        if size > frames.MAX_BODY_BYTES - 4:
            raise SegmentError(f"a cause of {size} bytes: at most {frames.MAX_BODY_BYTES - 4}")
        body = bytes(self.cause[4 : 4 + size])
        try:
            return frames.cause(frames.Frame(frames.Kind.ABORT, 0, length=size, body=body))
        except frames.FrameError as error:
            raise SegmentError(str(error)) from None


class RingWriter:
    """Puts frames in the own segment's ring; they are the reader's from `publish` on."""

    def __init__(self, own: OwnSegment, peer: PeerSegment, fence: Fence) -> None:
        self._own, self._peer, self._fence = own, peer, fence
        self._ring, self._capacity = own.ring, own.ring_bytes
        self.largest = self._capacity // 4  # of a payload that always finds room in the end
        self._end, self._published, self._read = 0, 0, 0

    def moved(self) -> bool:
        """Whether the reader has read more since `put` looked last."""
        return self._peer.load(Word.READ) != self._read

    def _refresh(self) -> int:
        read = self._peer.load(Word.READ)
        if not self._read <= read <= self._published or read % LINE_BYTES:
            raise SegmentError(f"the peer has read {read} bytes: must be {self._read} to {self._published}")
        if read != self._read:
            self._fence()  # its reads of that memory are done before we write there
            self._read = read
        return read

    def room(self) -> int:
        """How large a payload `put` can take now; below 0 if none."""
        at = self._end % self._capacity
        free = self._capacity - (self._end - self._refresh())
        to_end = self._capacity - at
        if free <= to_end:
            return free - HEADER_BYTES
        return max(to_end, free - to_end) - HEADER_BYTES

    def put(self, frame: Frame) -> memoryview | None:
        """Append `frame`; the place for its payload of `frame.size` bytes, or None if there is no room now.

        Raises NoMemory where there is none for it.
        """
        need = charge(frame.size)
        if need - HEADER_BYTES > self.room():
            return None
        at = self._end % self._capacity
        if at + need > self._own.allocated:
            self._own.allocate(min(at + need, self._capacity))
        if need > self._capacity - at:
            rest = self._capacity - at
            _HEADER.pack_into(self._ring, at, Kind.PAD, 0, 0, 0, 0, 0, rest - HEADER_BYTES)
            self._end += rest
            at = 0
        kind, index, op, length, where, ticket, size = frame
        _HEADER.pack_into(self._ring, at, kind, index, op, length, where, ticket, size)
        self._end += need
        return self._ring[at + HEADER_BYTES : at + HEADER_BYTES + size]

    def publish(self) -> bool:
        """Whether there was anything to publish. The caller rings the doorbell of a reader that sleeps."""
        if self._end == self._published:
            return False
        self._fence()
        self._own.store(Word.WRITTEN, self._end)
        self._published = self._end
        return True


class RingReader:
    """Takes frames from the peer's ring; their memory is the writer's again from `release` on."""

    def __init__(self, own: OwnSegment, peer: PeerSegment, fence: Fence) -> None:
        self._own, self._peer, self._fence = own, peer, fence
        self._ring, self._capacity = peer.ring, peer.ring_bytes
        self._at, self._written, self._released = 0, 0, 0

    def stirs(self) -> bool:
        """Whether `more` has something to look at."""
        return self._peer.load(Word.WRITTEN) != self._at

    def more(self) -> bool:
        """Whether there are frames that were not taken yet."""
        if self._at < self._written:
            return True
        written = self._peer.load(Word.WRITTEN)
        if written == self._written:
            return False
        if not self._written < written <= self._released + self._capacity or written % LINE_BYTES:
            raise SegmentError(
                f"the peer has written {written} bytes: must be {self._written} to {self._released + self._capacity}"
            )
        self._fence()
        self._written = written
        return True

    def take(self) -> tuple[Frame, memoryview]:
        """The next frame (after `more`) and its payload, which stays until `release`. Nothing but its extent is checked."""
        while True:
            at = self._at % self._capacity
            kind, index, op, length, where, ticket, size = _HEADER.unpack_from(self._ring, at)
            need = charge(size)
            if need > self._written - self._at or need > self._capacity - at:
                raise SegmentError(f"a frame of {size} bytes at {at}: beyond what the peer has written")
            self._at += need
            if kind != Kind.PAD:
                return Frame(kind, index, op, length, where, ticket, size), self._ring[
                    at + HEADER_BYTES : at + HEADER_BYTES + size
                ]
            if not self._at < self._written:
                raise SegmentError(f"padding at {at} with nothing behind it")

    def release(self) -> bool:
        """Give the memory of all frames taken back. Whether there was any."""
        if self._at == self._released:
            return False
        self._fence()  # our reads of that memory are done before the writer may write there
        self._own.store(Word.READ, self._at)
        self._released = self._at
        return True
