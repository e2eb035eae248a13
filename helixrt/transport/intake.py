"""A message that is used as it comes: from a rail's bytes, in whatever pieces and copies, to a `Sink`, each byte once.

In: a sink, and the bytes of a copy of its message, in order. A copy may end anywhere, when its rail fails, and the next one
begins at the first byte. Out: calls of the sink, with pieces that begin at multiples of PIECE_UNIT bytes and in their order,
so that it always has whole elements. The pieces lie in a `Stage`, which all messages of an endpoint share: it is read into
again and again, so what the sink takes is in the processor's cache.
"""

from __future__ import annotations

import mmap

from helixrt.transport.contract import Buffer, Sink
from helixrt.transport.process_memory import address_of

PIECE_UNIT = 64  # bytes; a multiple of every element's
STAGE_BYTES = 512 << 10
LITTLE_BYTES = 8 << 10  # less than that waits for what follows: a short piece costs as much as a long one


class Stage:
    """Memory for the pieces; of no page until it is used."""

    def __init__(self, size: int = STAGE_BYTES) -> None:
        assert size > PIECE_UNIT and size % PIECE_UNIT == 0
        self.memory = memoryview(mmap.mmap(-1, size))
        self.address = address_of(self.memory)


class Intake:
    __slots__ = ("_address", "_at", "_little", "_rest", "_sink", "_size", "_stage", "_taken")

    def __init__(self, sink: Sink, stage: Stage) -> None:
        self._sink, self._stage, self._address = sink, stage.memory, stage.address
        self._size, self._little = len(sink), min(LITTLE_BYTES, len(stage.memory) // 4)
        self._taken = 0  # what the sink has had, of all copies
        self._at = 0  # what has come of this copy
        self._rest = b""  # of a piece: the last bytes of those, less than a unit, or a piece that is too short

    def __len__(self) -> int:
        return self._size

    def restart(self) -> None:
        """Another copy begins."""
        self._at, self._rest = 0, b""

    def room(self) -> memoryview:
        """Where the next bytes are to be put, before anything else uses the stage; then comes `came`."""
        rest = self._put_back()
        return self._stage[rest : rest + self._size - self._at]

    def place(self) -> tuple[int, int]:
        """As `room`: its address and its bytes, for a system call."""
        rest = self._put_back()
        return self._address + rest, min(len(self._stage) - rest, self._size - self._at)

    def _put_back(self) -> int:
        """What is left of the last piece goes before the next; its bytes."""
        rest = len(self._rest)
        if rest:
            self._stage[:rest] = self._rest
        return rest

    def came(self, count: int) -> None:
        """`count` bytes were put in `room`."""
        end, stage = self._at + count, self._stage
        if count == len(stage) and self._taken == self._at:  # the usual piece, which is the stage itself
            self._sink.take(self._at, stage)
            self._at = self._taken = end
            return
        begin = self._at - len(self._rest)
        usable = end if end == self._size else begin if end - begin < self._little else end - end % PIECE_UNIT
        self._at = end
        if usable > begin:
            old = max(begin, self._taken)  # an earlier copy had brought the bytes before it
            if usable > old:
                whole = usable - old == len(stage)
                self._sink.take(old, stage if whole else stage[old - begin : usable - begin])
                self._taken = usable
        self._rest = bytes(stage[max(usable, begin) - begin : end - begin])

    def put(self, content: memoryview | bytes) -> None:
        """Bytes that have come somewhere else."""
        at, size = 0, len(content)
        while at < size:
            room = self.room()
            count = min(len(room), size - at)
            room[:count] = content[at : at + count]
            self.came(count)
            at += count


def fill(into: Buffer | Intake, content: Buffer | bytes) -> None:
    """All of a message, which has come somewhere else."""
    if isinstance(into, Intake):
        into.restart()
        into.put(content)
    else:
        into[:] = content
