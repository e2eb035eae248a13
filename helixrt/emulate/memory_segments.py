"""Simulated shared memory: two segments, a doorbell and the reading of another process's memory, all in one process.

In: what production's `SharedMemoryLink` stores, loads, rings and reads. Out: the same to the other end, at once. There is no
kernel: a segment is a byte array that its owner writes and the peer reads, a process's memory is this process's.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

from helixrt.errors import Cause
from helixrt.protocol.shared_memory.frames import LINE_BYTES, OFFERS
from helixrt.transport.shared_memory.segment import Word


class Segment:
    """One end's, as its owner and as its peer see it."""

    def __init__(self, ring_bytes: int, meanwhile: Callable[[], None]) -> None:
        """`meanwhile` is called before every access to a word: the other process may go on there."""
        self._meanwhile = meanwhile
        self.words = memoryview(bytearray(LINE_BYTES * len(Word))).cast("Q")
        self.offers = memoryview(bytearray(8 * OFFERS)).cast("Q")
        self.ring = memoryview(bytearray(ring_bytes))
        self.ring_bytes = self.allocated = ring_bytes
        self.cause: Cause | None = None
        self.ends = 0  # that have let go of it

    def load(self, word: Word) -> int:
        self._meanwhile()
        return self.words[word * 8]

    def store(self, word: Word, value: int) -> None:
        self._meanwhile()
        self.words[word * 8] = value

    def allocate(self, ring_bytes: int) -> None:
        assert ring_bytes <= self.allocated, f"{ring_bytes} bytes of a ring of {self.allocated}"

    def put_cause(self, cause: Cause) -> None:
        self.cause = cause

    def read_cause(self) -> Cause:
        assert self.cause is not None
        return self.cause

    def close(self) -> None:
        self.ends += 1


class Doorbell:
    """One end's connection: bells that were not received yet, and whether the other end is there."""

    def __init__(self) -> None:
        self.other: Doorbell = self
        self.bells, self.rung, self.closed = 0, 0, False

    @property
    def readable(self) -> bool:
        return not self.closed and (self.bells > 0 or self.other.closed)

    def fileno(self) -> int:
        return -1 if self.closed else 1

    def send(self, content: bytes) -> int:
        if self.other.closed:
            raise BrokenPipeError
        self.other.bells += 1
        self.rung += 1
        return 1

    def recv(self, size: int) -> bytes:
        if self.bells:
            self.bells -= 1
            return b"\0"
        if self.other.closed:
            return b""
        raise BlockingIOError

    def close(self) -> None:
        self.closed = True


class NeighbourMemory:
    """The memory of the process at the other end. `meanwhile` is what that process does while it is read."""

    def __init__(self, chance: random.Random, denied: float, other: Doorbell, meanwhile: Callable[[], None]) -> None:
        self._chance, self._denied, self._other, self._meanwhile = chance, denied, other, meanwhile

    def read(self, address: int, into: int, size: int) -> int:
        """A part of what is asked for; the other process goes on before and after."""
        self._meanwhile()
        if self._chance.random() < self._denied:
            raise PermissionError
        if size > 1 and self._chance.random() < 0.3:
            size = self._chance.randint(1, size - 1)
        ctypes.memmove(into, address, size)
        self._meanwhile()
        return size

    def alive(self) -> bool:
        return not self._other.closed


class Watched:
    """Stands in for an endpoint's epoll."""

    def add(self, descriptor: int, link: Any, process: bool) -> None:
        assert descriptor >= 0 and not process

    def remove(self, descriptor: int) -> None:
        assert descriptor >= 0
