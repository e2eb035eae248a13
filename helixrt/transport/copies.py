"""Memory for copies of short messages, which is used again: new memory costs as much as the copy that goes into it.

In: sizes. Out: views to fill, of memory with whatever is in it; the owner returns them when they are not read any more.
"""

from __future__ import annotations

LEAST_BYTES = 16 << 10  # the allocator reuses shorter ones itself
FREE_BYTES = 8 << 20  # kept at most while they are unused


class CopyMemory:
    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}  # by size, a power of two
        self._free_bytes = 0

    def take(self, size: int) -> memoryview:
        """`size` bytes."""
        if size < LEAST_BYTES:
            return memoryview(bytearray(size))
        whole = 1 << (size - 1).bit_length()
        free = self._free.get(whole)
        if free:
            self._free_bytes -= whole
            return memoryview(free.pop())[:size]
        return memoryview(bytearray(whole))[:size]

    def copy(self, data: memoryview) -> memoryview:
        """The bytes of `data` as they are now."""
        taken = self.take(len(data))
        taken[:] = data
        return taken

    def give(self, taken: memoryview) -> None:
        """What `take` or `copy` returned is free again."""
        memory = taken.obj
        assert isinstance(memory, bytearray)
        whole = len(memory)
        if LEAST_BYTES <= whole <= FREE_BYTES - self._free_bytes:
            self._free_bytes += whole
            self._free.setdefault(whole, []).append(memory)
