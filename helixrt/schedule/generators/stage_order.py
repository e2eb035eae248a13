"""One stage's list, written down operation by operation.

The published schedules say which chunk is next and leave the micro-batch to counting: every kind of operation goes
through a chunk's micro-batches in order. `StageOrder` does the counting. In: the calls of a generator, which may
plan for more micro-batches than there are; out: the stage's entries without the surplus ones. What is left of a
valid schedule without some of its micro-batches is valid, since micro-batches do not depend on one another.
"""

from __future__ import annotations

from collections import Counter

from helixrt.schedule.ir import Entry, Op, Operation, Pair


class StageOrder:
    """The entries of one stage, for `microbatches` micro-batches; later ones are counted and left out."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._entries: list[Entry] = []
        self._counted: Counter[tuple[Op, int]] = Counter()

    def add(self, op: Op, chunk: int) -> None:
        """The chunk's next F, B, W or BW. W counts by itself, so it may come any time after its B."""
        operation = self._next(op, chunk)
        if operation.microbatch < self.microbatches:
            self._entries.append(operation)

    def add_pair(self, forward_chunk: int, backward_chunk: int) -> None:
        """The next F of one chunk overlapped with the next BW of another; alone where the other is surplus."""
        pair = Pair(self._next(Op.F, forward_chunk), self._next(Op.BW, backward_chunk))
        kept = [o for o in (pair.forward, pair.backward) if o.microbatch < self.microbatches]
        self._entries += [pair] if len(kept) == 2 else kept

    def count(self, op: Op, chunk: int) -> int:
        """How many F, B or W of the chunk there are so far, surplus ones included; a BW is a B and a W."""
        return self._counted[op, chunk]

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def _next(self, op: Op, chunk: int) -> Operation:
        kinds = (Op.B, Op.W) if op is Op.BW else (op,)
        microbatch = self._counted[kinds[0], chunk]
        for kind in kinds:
            self._counted[kind, chunk] += 1
        return Operation(op, chunk, microbatch)
