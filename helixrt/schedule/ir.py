"""The schedule IR: per stage an ordered list of operations, and the stage of every chunk of the model.

An operation is F (forward), B (backward for inputs), W (backward for weights) or BW (the whole backward in one
piece, whose gradient leaves when all of it is done), of one chunk and one micro-batch; a `Pair` is a forward and a
backward that overlap. Three functions define the meaning of a schedule: `needs` (whose results an operation
takes in), `provides` (which results it makes) and `route` (between which stages its output travels). Whether a
schedule can run is proved in `check`; how long it takes is computed in `simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from helixrt.errors import HelixError


class ScheduleError(HelixError):
    """A schedule that is incomplete or cannot finish; the message names the operations."""

    comes_again = True


class Op(StrEnum):
    """What is done to one micro-batch in one chunk."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one micro-batch in one chunk of the model."""

    op: Op
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}(chunk {self.chunk}, micro-batch {self.microbatch})"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward (B or BW) on the same stage that overlap.

    It starts when both can, and both of its results are there when it ends.
    """

    forward: Operation
    backward: Operation

    def __str__(self) -> str:
        return f"{self.forward} with {self.backward}"


Entry = Operation | Pair


def operations_of(entry: Entry) -> tuple[Operation, ...]:
    """The operations of an entry, in the order they run when they do not overlap."""
    return (entry.forward, entry.backward) if isinstance(entry, Pair) else (entry,)


def linear(stages: int) -> tuple[int, ...]:
    """Placement of one chunk per stage: chunk k on stage k."""
    return tuple(range(stages))


def interleaved(stages: int, rounds: int = 2) -> tuple[int, ...]:
    """Placement of `rounds` chunks per stage: chunk k on stage k mod stages (Megatron-LM's virtual stages)."""
    return tuple(range(stages)) * rounds


def folded(stages: int) -> tuple[int, ...]:
    """Placement of two chunks per stage: chunk k going down and chunk 2 stages - 1 - k coming back on stage k."""
    return (*range(stages), *reversed(range(stages)))


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one step, in order.

    `placement[chunk]` is the stage that holds the chunk; activations go from chunk to chunk + 1.
    `entries[stage]` is the stage's list. A schedule without any backward is forward only (evaluation).
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of every stage, in the model's order."""
        homes: list[list[int]] = [[] for _ in range(self.stages)]
        for chunk, stage in enumerate(self.placement):
            homes[stage].append(chunk)
        return tuple(map(tuple, homes))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """By chunk: the most micro-batches whose activations it holds at a time. W needs them, too."""
        held, most = [0] * self.chunks, [0] * self.chunks
        for stage in range(self.stages):
            for operation in self.operations(stage):
                if operation.op is Op.F:
                    held[operation.chunk] += 1
                    most[operation.chunk] = max(most[operation.chunk], held[operation.chunk])
                elif operation.op is not Op.B:
                    held[operation.chunk] -= 1
        return tuple(most)

    def operations(self, stage: int) -> Iterator[Operation]:
        """The stage's operations in order, pairs taken apart."""
        for entry in self.entries[stage]:
            yield from operations_of(entry)

    @property
    def forward_only(self) -> bool:
        return all(o.op is Op.F for stage in range(self.stages) for o in self.operations(stage))

    def label(self, entry: Entry) -> str:
        """Short text of an entry: `F4`, `B3`, `W3`, `BW3`, `F4+B2`; with `.k` for the stage's k-th further chunk.

        For example `F4.1` is the forward of micro-batch 4 in the second chunk of its stage.
        """
        return "+".join(map(self._short, operations_of(entry)))

    def _short(self, operation: Operation) -> str:
        nth = self.held[self.placement[operation.chunk]].index(operation.chunk)
        return f"{operation.op.value}{operation.microbatch}" + (f".{nth}" if nth else "")

    def warmup(self) -> tuple[int, ...]:
        """Per stage, the forwards before the first backward (the x_i of ADAPTRA, Section 4.1); a pair's is not one."""
        counts = []
        for entries in self.entries:
            first = next((i for i, e in enumerate(entries) if isinstance(e, Pair) or e.op is not Op.F), len(entries))
            counts.append(first)
        return tuple(counts)


def needs(schedule: Schedule, operation: Operation) -> tuple[Operation, ...]:
    """The results that `operation` takes in, named by the F, B or W that makes them (alone or in a BW)."""
    op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
    if op is Op.F:
        return (Operation(Op.F, chunk - 1, microbatch),) if chunk else ()
    if op is Op.W:
        return (Operation(Op.B, chunk, microbatch),)
    own = Operation(Op.F, chunk, microbatch)
    return (own, Operation(Op.B, chunk + 1, microbatch)) if chunk + 1 < schedule.chunks else (own,)


def provides(operation: Operation) -> tuple[Operation, ...]:
    """The results that `operation` makes: itself, or B and W when it is a whole backward."""
    if operation.op is Op.BW:
        chunk, microbatch = operation.chunk, operation.microbatch
        return (Operation(Op.B, chunk, microbatch), Operation(Op.W, chunk, microbatch))
    return (operation,)


def route(schedule: Schedule, operation: Operation) -> tuple[int, int] | None:
    """(from, to): the stages between which the operation's output travels; None if it stays or ends there."""
    if operation.op is Op.W:
        return None
    chunk = operation.chunk + (1 if operation.op is Op.F else -1)
    if not 0 <= chunk < schedule.chunks:
        return None
    here, there = schedule.placement[operation.chunk], schedule.placement[chunk]
    return None if here == there else (here, there)
