"""Everyone to everyone: the algorithms for small messages, and those that have no ring.

In: rank, number of ranks, bytes, `Tuning`. Out: the rank's plan. A collective takes one step (two for
`two_step_all_reduce`) in place of the ring's 2N-2. Every total is summed in the order of the ranks by the rank that
holds it, so all ranks get the same bits. Peers are served beginning with the next higher rank, so that
not everyone sends to the same one first. `in_place` means what it does in `ring`; `gather` and `scatter` take it as
all-gather and reduce-scatter do, for the root's own block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helixrt.protocol.collective.algorithms.layout import Builder, Cut, Tuning, blocks, chunked, cut, grain
from helixrt.protocol.collective.plan import Plan, Region, Space


def _others(rank: int, size: int) -> list[int]:
    return [(rank + i) % size for i in range(1, size)]


def _sum_in_rank_order(
    build: Builder,
    own: tuple[int, Region],
    received: Mapping[int, tuple[Region, int | None]],
    out: Region,
    before_out: Sequence[int | None] = (),
) -> int | None:
    """Reduces `own` (rank, region) and what came from the others into `out`; partial sums stay in what was received.

    Only the last reduction writes `out`, so `out` may be where `own` is.
    """
    terms = {own[0]: (own[1], None), **received}
    ranks = sorted(terms)
    total, done = terms[ranks[0]]
    for r in ranks[1:]:
        term, came = terms[r]
        last = r == ranks[-1]
        into = out if last else term if total is own[1] else total
        done = build.reduce(total, term, into, done, came, *(before_out if last else ()), last=last)
        total = into
    return done


def direct_all_reduce(rank: int, size: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """Everyone sends all of SOURCE to everyone. In place, OUT is written when SOURCE has left."""
    build, everything = Builder(), Cut(0, length)
    if size == 1:
        if not in_place:
            build.copy_in_chunks(everything, everything, tuning.chunk_bytes, grain(element_bytes))
        return build.plan()
    source = everything.within(Space.SOURCE)
    sent = [build.send(peer, source) for peer in _others(rank, size)]
    received = {}
    for i, peer in enumerate(_others(rank, size)):
        slot = Region(Space.SCRATCH, i * length, length)
        received[peer] = (slot, build.receive(peer, slot))
    _sum_in_rank_order(build, (rank, source), received, everything.within(Space.OUT), sent if in_place else ())
    return build.plan((size - 1) * length)


def two_step_all_reduce(rank: int, size: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """Each rank sums one part for all (a direct reduce-scatter), then sends it to all (a direct all-gather)."""
    if size == 1:
        return direct_all_reduce(rank, size, length, element_bytes, tuning, in_place)
    build, parts = Builder(), cut(0, length, size, grain(element_bytes))
    for peer in _others(rank, size):
        build.send(peer, parts[peer].within(Space.SOURCE))
    mine = parts[rank]
    received = {}
    for i, peer in enumerate(_others(rank, size)):
        slot = Region(Space.SCRATCH, i * mine.length, mine.length)
        received[peer] = (slot, build.receive(peer, slot))
    out = mine.within(Space.OUT)
    total = _sum_in_rank_order(build, (rank, mine.within(Space.SOURCE)), received, out)
    for peer in _others(rank, size):
        build.send(peer, out, total)
    for peer in _others(rank, size):
        build.receive(peer, parts[peer].within(Space.OUT))  # in place too: the peer has the total because what we sent had come
    return build.plan((size - 1) * mine.length)


def direct_reduce_scatter(
    rank: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False
) -> Plan:
    """Every rank gets its block from everyone and sums it."""
    build, source = Builder(), blocks(lengths)
    mine, size = source[rank], len(lengths)
    if size == 1:
        if not in_place:
            build.copy_in_chunks(mine, Cut(0, mine.length), tuning.chunk_bytes, grain(element_bytes))
        return build.plan()
    for peer in _others(rank, size):
        build.send(peer, source[peer].within(Space.SOURCE))
    received = {}
    for i, peer in enumerate(_others(rank, size)):
        slot = Region(Space.SCRATCH, i * mine.length, mine.length)
        received[peer] = (slot, build.receive(peer, slot))
    _sum_in_rank_order(build, (rank, mine.within(Space.SOURCE)), received, Region(Space.OUT, 0, mine.length))
    return build.plan((size - 1) * mine.length)


def direct_all_gather(rank: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    return _all_gather_to(range(len(lengths)), rank, lengths, element_bytes, tuning, in_place)


def gather(rank: int, root: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """`root` gets the blocks of all ranks in OUT, in their order; the OUT of other ranks is not changed."""
    return _all_gather_to((root,), rank, lengths, element_bytes, tuning, in_place)


def _all_gather_to(
    roots: Sequence[int], rank: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool
) -> Plan:
    build, unit, out = Builder(), grain(element_bytes), blocks(lengths)
    for peer in _others(rank, len(lengths)):
        if peer in roots:
            for piece in chunked(0, lengths[rank], tuning.chunk_bytes, unit):
                build.send(peer, piece.within(Space.SOURCE))
    if rank in roots:
        for peer in _others(rank, len(lengths)):
            for piece in chunked(out[peer].offset, out[peer].length, tuning.chunk_bytes, unit):
                build.receive(peer, piece.within(Space.OUT))
        if not in_place:
            build.copy_in_chunks(Cut(0, lengths[rank]), out[rank], tuning.chunk_bytes, unit)
    return build.plan()


def scatter(rank: int, root: int, lengths: Sequence[int], element_bytes: int, tuning: Tuning, in_place: bool = False) -> Plan:
    """`root`'s SOURCE holds a block for each rank; OUT gets the block of `rank`."""
    build, unit, source = Builder(), grain(element_bytes), blocks(lengths)
    if rank != root:
        for piece in chunked(0, lengths[rank], tuning.chunk_bytes, unit):
            build.receive(root, piece.within(Space.OUT))
        return build.plan()
    for peer in _others(rank, len(lengths)):
        for piece in chunked(source[peer].offset, source[peer].length, tuning.chunk_bytes, unit):
            build.send(peer, piece.within(Space.SOURCE))
    if not in_place:
        build.copy_in_chunks(source[rank], Cut(0, lengths[rank]), tuning.chunk_bytes, unit)
    return build.plan()


def all_to_all(rank: int, sends: Sequence[int], receives: Sequence[int], element_bytes: int, tuning: Tuning) -> Plan:
    """SOURCE holds `sends[r]` bytes for rank r, in the order of ranks; OUT gets `receives[r]` bytes of rank r.

    SOURCE and OUT must be disjoint.
    """
    build, unit = Builder(), grain(element_bytes)
    source, out, size = blocks(sends), blocks(receives), len(sends)
    for peer in _others(rank, size):
        for piece in chunked(source[peer].offset, source[peer].length, tuning.chunk_bytes, unit):
            build.send(peer, piece.within(Space.SOURCE))
    for peer in reversed(_others(rank, size)):  # the next lower rank serves this one first
        for piece in chunked(out[peer].offset, out[peer].length, tuning.chunk_bytes, unit):
            build.receive(peer, piece.within(Space.OUT))
    build.copy_in_chunks(source[rank], out[rank], tuning.chunk_bytes, unit)
    return build.plan()


def direct_reduce(
    rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False
) -> Plan:
    """All ranks send to `root`, whose OUT gets the total; the OUT of other ranks is not changed."""
    if size == 1:
        return direct_all_reduce(rank, size, length, element_bytes, tuning, in_place)
    build = Builder()
    source = Region(Space.SOURCE, 0, length)
    if rank != root:
        build.send(root, source)
        return build.plan()
    received = {}
    for i, peer in enumerate(_others(rank, size)):
        slot = Region(Space.SCRATCH, i * length, length)
        received[peer] = (slot, build.receive(peer, slot))
    _sum_in_rank_order(build, (rank, source), received, Region(Space.OUT, 0, length))
    return build.plan((size - 1) * length)


def direct_broadcast(
    rank: int, size: int, root: int, length: int, element_bytes: int, tuning: Tuning, in_place: bool = False
) -> Plan:
    """`root` sends SOURCE to everyone's OUT, its own included; the others' SOURCE is not looked at."""
    build, unit = Builder(), grain(element_bytes)
    pieces = chunked(0, length, tuning.chunk_bytes, unit)
    if rank != root:
        for piece in pieces:
            build.receive(root, piece.within(Space.OUT))
        return build.plan()
    for piece in pieces:
        for peer in _others(rank, size):
            build.send(peer, piece.within(Space.SOURCE))
    if not in_place:
        build.copy_in_chunks(Cut(0, length), Cut(0, length), tuning.chunk_bytes, unit)
    return build.plan()


def barrier(rank: int, size: int) -> Plan:
    """Dissemination: in round k every rank sends to the rank 2^k further; after log2(N) rounds all ranks have arrived.

    The messages are empty.
    """
    build, nothing = Builder(), Region(Space.SCRATCH, 0, 0)
    heard: list[int | None] = []
    distance = 1
    while distance < size:
        build.send((rank + distance) % size, nothing, *heard, empty=True)
        heard.append(build.receive((rank - distance) % size, nothing, empty=True))
        distance *= 2
    return build.plan()


def send_to(peer: int, length: int, element_bytes: int, tuning: Tuning) -> Plan:
    """SOURCE to `peer`, which runs `receive_from`. An empty message is a message all the same."""
    build = Builder()
    for piece in chunked(0, length, tuning.chunk_bytes, grain(element_bytes)) or [Cut(0, 0)]:
        build.send(peer, piece.within(Space.SOURCE), empty=True)
    return build.plan()


def receive_from(peer: int, length: int, element_bytes: int, tuning: Tuning) -> Plan:
    """What `peer` sends by `send_to`, into OUT."""
    build = Builder()
    for piece in chunked(0, length, tuning.chunk_bytes, grain(element_bytes)) or [Cut(0, 0)]:
        build.receive(peer, piece.within(Space.OUT), empty=True)
    return build.plan()
