"""Recursive halving and doubling: an all-reduce of 2 log2(N) steps where N is a power of two.

In: rank, number of ranks, bytes, `Tuning`. Out: the rank's plan. The reduce-scatter halves what a rank is responsible
for in every step, and exchanges the other half with the rank that differs in one bit of its number, the highest first;
the all-gather takes the same steps back. As many bytes as the ring sends, in fewer and larger messages: where ranks share
processors, what a message costs beside its bytes counts.

Every element is summed by one rank and sent to the others, so all get the same bits. The message is cut into partitions
which follow each other through two places in SCRATCH, or, summed `on_arrival`, through none. `in_place` means what it does
in `ring`.
"""

from __future__ import annotations

from helixrt.protocol.collective.algorithms.layout import Builder, Cut, Tuning, chunked, cut, grain
from helixrt.protocol.collective.algorithms.ring import ring_all_reduce
from helixrt.protocol.collective.plan import Plan, Region, Space


def halving_all_reduce(
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
    assert size & (size - 1) == 0, f"{size} ranks: no power of two"
    unit = grain(element_bytes)
    build = Builder(on_arrival)
    partitions = chunked(0, length, tuning.chunk_bytes * tuning.chunks, unit)
    place_bytes = max((_largest_half(partition, size, unit) for partition in partitions), default=0)
    freed: list[list[int | None]] = [[], []]  # for each place, the reductions that emptied it
    for number, partition in enumerate(partitions):
        place = number % 2
        freed[place] = _one(build, rank, size, partition, unit, place * place_bytes, freed[place])
    return build.plan(0 if on_arrival else min(2, len(partitions)) * place_bytes)


def _one(
    build: Builder, rank: int, size: int, whole: Cut, unit: int, scratch: int, freed: list[int | None]
) -> list[int | None]:
    """The nodes of one partition, which receives at `scratch`; returns those that end the use of that place.

    One place for all steps: with one for each, peers may send earlier, and where ranks share processors that was slower.
    """
    parts = cut(whole.offset, whole.length, size, unit)
    first, count = 0, size  # the parts this rank is still responsible for
    own, space, ready = whole, Space.SOURCE, None
    away: list[tuple[int, Cut]] = []  # (peer, what it is responsible for from now on)
    while count > 1:
        count //= 2
        peer = rank ^ count
        low, high = _joined(parts[first : first + count]), _joined(parts[first + count : first + 2 * count])
        own, other = (high, low) if rank & count else (low, high)
        first += count if rank & count else 0
        build.send(peer, other.within(space), ready)
        away.append((peer, other))
        waiting = Region(Space.SCRATCH, scratch, own.length)
        left, out = own.within(space), own.within(Space.OUT)
        ready = build.receive_reduced(peer, left, out, waiting, freed, [ready], last=count == 1)
        freed = freed if ready is None else [ready]
        space = Space.OUT
    have: list[int | None] = [ready]
    for peer, other in reversed(away):
        build.send(peer, own.within(Space.OUT), *have)
        have.append(build.receive(peer, other.within(Space.OUT)))
        own = _joined([own, other])
    return freed


def _largest_half(partition: Cut, size: int, unit: int) -> int:
    parts = cut(partition.offset, partition.length, size, unit)
    return max(_joined(half).length for half in (parts[: size // 2], parts[size // 2 :]))


def _joined(cuts: list[Cut]) -> Cut:
    """Neighbours as one."""
    begin = min(c.offset for c in cuts)
    return Cut(begin, max(c.offset + c.length for c in cuts) - begin)
