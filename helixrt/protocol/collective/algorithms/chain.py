"""The chain: large broadcasts and reductions to one root, pipelined from neighbour to neighbour.

In: rank, number of ranks, root, bytes, `Tuning`. Out: the rank's plan. Every link carries the bytes once, where a
ring's two halves would carry them twice. A chain of N ranks is full after N-2 chunks, so it uses several
chunks per rank (`CHUNKS_PER_HOP`): what filling costs stays near an eighth. `in_place` means what it does in `ring`.
"""

from __future__ import annotations

from helixrt.protocol.collective.algorithms.layout import Builder, Cut, Tuning, chunked, grain
from helixrt.protocol.collective.plan import Plan, Region, Space

CHUNKS_PER_HOP = 8


def _pieces(size: int, length: int, unit: int, tuning: Tuning) -> list[Cut]:
    least = min(tuning.least_chunk_bytes, tuning.chunk_bytes)
    most = min(tuning.chunk_bytes, max(least, length // (CHUNKS_PER_HOP * size)))
    return chunked(0, length, most, unit)


def chain_broadcast(
    rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False
) -> Plan:
    """`root`'s SOURCE goes to everyone's OUT, along root, root + 1, …"""
    build, unit = Builder(), grain(element_bytes)
    place = (rank - root) % size
    for piece in _pieces(size, length, unit, tuning):
        came = None
        if place:
            came = build.receive((rank - 1) % size, piece.within(Space.OUT))
        if place < size - 1:
            build.send((rank + 1) % size, piece.within(Space.OUT if place else Space.SOURCE), came)
    if not place and not in_place:
        build.copy_in_chunks(Cut(0, length), Cut(0, length), tuning.chunk_bytes, unit)
    return build.plan()


def chain_reduce(
    rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False
) -> Plan:
    """The sum travels along root + 1, root + 2, … and ends in `root`'s OUT; the OUT of other ranks is not changed.

    Slots of SCRATCH as in the ring's reduce-scatter: a partial sum is computed in the slot that received it and sent from it.
    """
    build, unit = Builder(), grain(element_bytes)
    pieces = _pieces(size, length, unit, tuning)
    if size == 1:
        if not in_place:
            build.copy_in_chunks(Cut(0, length), Cut(0, length), tuning.chunk_bytes, unit)
        return build.plan()
    place = (rank - root - 1) % size  # the root is the last
    slot = max((p.length for p in pieces), default=0)
    slots = min(len(pieces), 2 * tuning.chunks)
    freed: list[int | None] = [None] * slots
    for i, piece in enumerate(pieces):
        source = piece.within(Space.SOURCE)
        if place == 0:
            build.send((rank + 1) % size, source)
            continue
        waiting = Region(Space.SCRATCH, i % slots * slot, piece.length)
        came = build.receive((rank - 1) % size, waiting, freed[i % slots])
        if rank == root:
            freed[i % slots] = build.reduce(waiting, source, piece.within(Space.OUT), came, last=True)
        else:
            partial = build.reduce(waiting, source, waiting, came)
            freed[i % slots] = build.send((rank + 1) % size, waiting, partial)
    return build.plan(slots * slot if place else 0)
