"""A block at a time: an all-reduce for ranks that read one another's memory, which costs nothing but the processor.

In: rank, number of ranks, bytes, `Tuning`. Out: the rank's plan. Each rank sums its part for all, a block of `block_bytes`
after the other: what the next rank has of the block, what the one after it has, and so on round. So the sum under way stays in
the processor's cache while it grows, where a ring or halving writes it to memory and reads it again in every step. Then
everyone reads everyone's part. As many bytes as the ring's, but of all peers at once, so a network would be crowded.

Every element is summed by one rank in a fixed order, so all get the same bits. `in_place` and `on_arrival` mean what they
do in `ring`.
"""

from __future__ import annotations

from helixrt.protocol.collective.algorithms.layout import Builder, Tuning, chunked, cut, grain
from helixrt.protocol.collective.algorithms.ring import ring_all_reduce
from helixrt.protocol.collective.plan import Plan, Region, Space

_SLOTS = 2  # of SCRATCH, where sums are not made on arrival: one is received into while the other is summed


def blockwise_all_reduce(
    rank: int,
    size: int,
    length: int,
    element_bytes: int,
    tuning: Tuning,
    in_place: bool = False,
    on_arrival: bool = False,
) -> Plan:
    """OUT = the reduction over all ranks' SOURCE."""
    if size == 1:
        return ring_all_reduce(rank, size, length, element_bytes, tuning, in_place, on_arrival)
    unit = grain(element_bytes)
    build, parts = Builder(on_arrival), cut(0, length, size, unit)
    blocks = [chunked(part.offset, part.length, tuning.block_bytes, unit) for part in parts]
    others = [(rank + i) % size for i in range(1, size)]
    sent: dict[int, list[int | None]] = {}
    for peer in reversed(others):  # which of them needs it first
        sent[peer] = [build.send(peer, block.within(Space.SOURCE)) for block in blocks[peer]]
    slot = max((block.length for block in blocks[rank]), default=0)
    freed: list[int | None] = [None] * _SLOTS
    total: int | None = None
    turn = 0
    for block in blocks[rank]:
        left, out = block.within(Space.SOURCE), block.within(Space.OUT)
        for peer in others:
            waiting = Region(Space.SCRATCH, turn % _SLOTS * slot, block.length)
            emptied, last = [freed[turn % _SLOTS]], peer == others[-1]
            total = build.receive_reduced(peer, left, out, waiting, emptied, [total], last)
            freed[turn % _SLOTS], left, turn = total, out, turn + 1
    mine = parts[rank].within(Space.OUT)
    for peer in reversed(others):
        build.send(peer, mine, total)
    for peer in others:
        build.receive(peer, parts[peer].within(Space.OUT), *(sent[peer] if in_place else ()))
    return build.plan(0 if on_arrival else _SLOTS * slot)
