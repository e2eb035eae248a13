"""The ring: all-reduce, reduce-scatter and all-gather between neighbours only (FT-HSDP section 4.2).

In: rank, number of ranks, bytes, `Tuning`. Out: the rank's plan. Every partition of at most S x C x N bytes
goes round in 2N-2 steps (N-1 for the halves alone), each in C lanes of at most S bytes. Messages are numbered
by (partition, step, lane), and sends begin in that order, so the next partition's first step follows the last
sends of this one at once. The order is also why no credit or window can deadlock a ring: a message
waits only for slots that earlier messages free.

Where the paper copies into a send buffer and out of a receive buffer, this does not: the first step sends
straight from SOURCE, all-gather receives straight into OUT and forwards from there, and a reduction writes
the partial sum to the place in OUT where the total will come. Only what reduce-scatter receives needs SCRATCH, and
nothing does of an all-reduce that sums `on_arrival`.

`in_place` says that SOURCE and OUT are the same memory (all-gather: SOURCE is the rank's block in OUT;
reduce-scatter: OUT is the rank's block in SOURCE). An all-reduce has one plan for both: a finished part is received where an
own message was sent from, and its sender has it only because that message had arrived (the tests' `plan_check`, "Sent
and replaced"). So all receives are posted at the beginning, and one frame carries their credits.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixrt.protocol.collective.algorithms.layout import (
    Builder,
    Cut,
    Tuning,
    blocks,
    grain,
    grid_of_blocks,
    grid_of_whole,
    longest,
)
from helixrt.protocol.collective.plan import Plan, Region, Space


def ring_all_reduce(
    rank: int,
    size: int,
    length: int,
    element_bytes: int,
    tuning: Tuning,
    in_place: bool = False,
    on_arrival: bool = False,
) -> Plan:
    """SOURCE and OUT of `length` bytes each; OUT gets the same bits on every rank.

    Of one rank there is nothing to reduce: OUT gets a copy, and no node is marked `last`.
    """
    unit = grain(element_bytes)
    build = Builder(on_arrival)
    if size == 1:
        if not in_place:
            build.copy_in_chunks(Cut(0, length), Cut(0, length), tuning.chunk_bytes, unit)
        return build.plan()
    grid = grid_of_whole(length, size, tuning, unit)
    slot = longest(grid)
    lanes = range(len(grid[0][0]))
    right, left = (rank + 1) % size, (rank - 1) % size
    freed: list[int | None] = [None for _ in lanes]  # the reduction that emptied the lane's slot
    for parts in grid:
        ready: list[int | None] = [None for _ in lanes]  # what put the lane's next chunk in its place
        for step in range(2 * size - 2):
            outgoing, incoming = (rank - step) % size, (rank - step - 1) % size
            for lane in lanes:
                what = parts[outgoing][lane].within(Space.OUT if step else Space.SOURCE)
                build.send(right, what, ready[lane])
            for lane in lanes:
                chunk = parts[incoming][lane]
                if step < size - 1:
                    waiting = Region(Space.SCRATCH, lane * slot, chunk.length)
                    source, out = chunk.within(Space.SOURCE), chunk.within(Space.OUT)
                    ready[lane] = build.receive_reduced(left, source, out, waiting, [freed[lane]], last=step == size - 2)
                    freed[lane] = freed[lane] if ready[lane] is None else ready[lane]
                else:
                    ready[lane] = build.receive(left, chunk.within(Space.OUT))
    return build.plan(0 if on_arrival else len(lanes) * slot)


def ring_reduce_scatter(
    rank: int,
    lengths: Sequence[int],
    element_bytes: int,
    tuning: Tuning,
    in_place: bool = False,
    on_arrival: bool = False,
) -> Plan:
    """SOURCE holds a block for each rank, `lengths[r]` bytes for rank r; OUT gets the reduced block of `rank`.

    `in_place` costs nothing here: the rank's own block is read by the reduction that writes OUT and by no other.
    """
    size, unit = len(lengths), grain(element_bytes)
    build = Builder(on_arrival)
    mine = blocks(lengths)[rank]
    if size == 1:
        if not in_place:
            build.copy_in_chunks(mine, Cut(0, mine.length), tuning.chunk_bytes, unit)
        return build.plan()
    grid = grid_of_blocks(lengths, tuning, unit)
    slot = longest(grid)
    lanes = range(len(grid[0][0]))
    right, left = (rank + 1) % size, (rank - 1) % size
    # two slots for a lane: one is received into while the other's partial sum is sent on
    freed: list[list[int | None]] = [[None, None] for _ in lanes]
    turn = 0
    for parts in grid:
        ready: list[int | None] = [None for _ in lanes]
        for step in range(size - 1):
            outgoing, incoming = (rank - 1 - step) % size, (rank - 2 - step) % size
            last = step == size - 2
            for lane in lanes:
                chunk = parts[outgoing][lane]
                if step == 0:
                    build.send(right, chunk.within(Space.SOURCE))
                else:
                    held = Region(Space.SCRATCH, (2 * lane + 1 - turn) * slot, chunk.length)
                    sent = build.send(right, held, ready[lane])
                    freed[lane][1 - turn] = sent if sent is not None else freed[lane][1 - turn]
            for lane in lanes:
                chunk = parts[incoming][lane]
                waiting = Region(Space.SCRATCH, (2 * lane + turn) * slot, chunk.length)
                out = Region(Space.OUT, chunk.offset - mine.offset, chunk.length) if last else waiting
                source = chunk.within(Space.SOURCE)
                ready[lane] = build.receive_reduced(left, source, out, waiting, [freed[lane][turn]], last=last)
                if ready[lane] is not None and not (last and on_arrival):  # which would leave the slot as it was
                    freed[lane][turn] = ready[lane]
            turn = 1 - turn
    return build.plan(2 * len(lanes) * slot)


def ring_all_gather(rank: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """SOURCE holds the block of `rank`, `lengths[rank]` bytes; OUT gets the blocks of all ranks, in their order."""
    size, unit = len(lengths), grain(element_bytes)
    build = Builder()
    mine = blocks(lengths)[rank]
    if not in_place:
        build.copy_in_chunks(Cut(0, mine.length), mine, tuning.chunk_bytes, unit)
    if size == 1:
        return build.plan()
    right, left = (rank + 1) % size, (rank - 1) % size
    for parts in grid_of_blocks(lengths, tuning, unit):
        ready: list[int | None] = [None for _ in parts[0]]
        for step in range(size - 1):
            outgoing, incoming = (rank - step) % size, (rank - step - 1) % size
            for lane, chunk in enumerate(parts[outgoing]):
                if step == 0:
                    build.send(right, Region(Space.SOURCE, chunk.offset - mine.offset, chunk.length))
                else:
                    build.send(right, chunk.within(Space.OUT), ready[lane])
            for lane, chunk in enumerate(parts[incoming]):
                ready[lane] = build.receive(left, chunk.within(Space.OUT))
    return build.plan()
