"""One rank's memory for one collective of a simulated world, and the work of plans on it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import add

from helixrt.protocol.collective.messages import Await
from helixrt.protocol.collective.plan import Copy, Reduce, Region, Space

ELEMENT = 8  # bytes


class Memory:
    """One rank's memory for one collective, of elements of array type `code` ("q", "d" or "f").

    With `shift`, OUT begins `shift` bytes after the beginning of SOURCE in the same memory.
    """

    def __init__(self, source: Sequence[float], out_bytes: int, scratch_bytes: int, shift: int | None, code: str = "q") -> None:
        self.code = code
        given = array(code, source).tobytes()
        self.scratch = bytearray(b"\xee" * scratch_bytes)
        if shift is None:
            self.source, self.out = memoryview(bytearray(given)), memoryview(bytearray(b"\xdd" * out_bytes))
        else:
            begin, end = min(0, shift), max(len(given), shift + out_bytes)
            shared = memoryview(bytearray(b"\xdd" * (end - begin)))
            self.source = shared[-begin : len(given) - begin]
            self.out = shared[shift - begin : shift - begin + out_bytes]
            self.source[:] = given
        self.given = given
        self._of = {Space.SOURCE: self.source, Space.OUT: self.out, Space.SCRATCH: memoryview(self.scratch)}

    def view(self, region: Region) -> memoryview:
        return self._of[region.space][region.offset : region.offset + region.length]

    def carry_out(self, work: Reduce | Copy) -> None:
        if isinstance(work, Copy):
            self.view(work.into)[:] = bytes(self.view(work.source))
            return
        left, right = (array(self.code, bytes(self.view(term))) for term in (work.left, work.right))
        total = array(self.code, map(add, left, right)).tobytes()
        for region in work.into:
            self.view(region)[:] = total

    def arrived(self, content: memoryview, where: Await) -> None:
        """A message is whole."""
        if where.left is None:
            self.view(where.region)[:] = content
        else:
            left, right = (array(self.code, bytes(term)) for term in (self.view(where.left), content))
            self.view(where.region)[:] = array(self.code, map(add, left, right)).tobytes()

    def numbers(self) -> list[float]:
        return list(array(self.code, bytes(self.out)))
