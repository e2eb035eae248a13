"""What all algorithms share: the tuning values, how bytes are cut, and the builder of plans.

In: lengths, `Tuning`. Out: `Cut`s and `Grid`s that every rank computes with the same result, and `Builder`, which numbers
messages and drops empty ones. FT-HSDP section 4.2: partitions of at most S x C bytes per rank, in C chunks of
at most S bytes. The paper's chunks are of fixed size; here a message too small for C full chunks is still cut
into up to C (of at least `least_chunk_bytes`), so that transfers and reductions of small messages overlap too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.protocol.collective.plan import Copy, Node, Plan, Receive, Reduce, Region, Send, Space

ALIGNMENT_BYTES = 64  # borders between chunks fall on cache lines, as far as elements allow


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes that decide the algorithm and its pipelining; all ranks of a communicator hold the same.

    `helixrt bench ftar --tune` measures them. `chunk_bytes` is the paper's S, `chunks` its C.
    """

    chunk_bytes: int = 8 << 20
    chunks: int = 4
    least_chunk_bytes: int = 1 << 20
    direct_bytes: int = 256 << 10  # everyone to everyone, while a rank sends at most this much
    two_step_bytes: int = 2 << 20  # direct reduce-scatter, then all-gather, for messages up to this size
    halving_bytes: int = 64 << 20  # recursive halving and doubling up to this size, where the ranks are a power of two

    def __post_init__(self) -> None:
        for key, least in (("chunk_bytes", 64), ("chunks", 1), ("least_chunk_bytes", 1)):
            if getattr(self, key) < least:
                raise ConfigError(f"tuning.{key}", getattr(self, key), f"must be at least {least}")
        for key in ("direct_bytes", "two_step_bytes", "halving_bytes"):
            if getattr(self, key) < 0:
                raise ConfigError(f"tuning.{key}", getattr(self, key), "must not be negative")


@dataclass(frozen=True, slots=True)
class Cut:
    offset: int
    length: int

    def within(self, space: Space) -> Region:
        return Region(space, self.offset, self.length)


Grid = tuple[tuple[tuple[Cut, ...], ...], ...]
"""[partition][rank's part][lane]: the chunks of one rank in one partition are its lanes."""


def grain(element_bytes: int) -> int:
    """The unit that borders between chunks are multiples of: whole elements and whole cache lines."""
    return math.lcm(element_bytes, ALIGNMENT_BYTES)


def cut(offset: int, length: int, parts: int, unit: int) -> list[Cut]:
    """`length` bytes from `offset` in `parts` contiguous pieces, as equal as multiples of `unit` allow."""
    units = -(-length // unit)
    borders = [min(length, units * i // parts * unit) for i in range(parts)] + [length]
    return [Cut(offset + a, b - a) for a, b in zip(borders, borders[1:], strict=False)]


def chunked(offset: int, length: int, most: int, unit: int) -> list[Cut]:
    """Non-empty pieces of at most `most` bytes (of at least one `unit`)."""
    return cut(offset, length, -(-length // max(unit, most // unit * unit)), unit) if length else []


def rounds(largest_part: int, tuning: Tuning, unit: int) -> tuple[int, int]:
    """(partitions, lanes) for parts of at most `largest_part` bytes."""
    chunk = max(unit, tuning.chunk_bytes // unit * unit)
    partitions = max(1, -(-largest_part // (chunk * tuning.chunks)))
    a_round = -(-largest_part // partitions)
    lanes = max(-(-a_round // chunk), min(tuning.chunks, a_round // max(unit, tuning.least_chunk_bytes)))
    return partitions, max(1, lanes)


def grid_of_whole(length: int, size: int, tuning: Tuning, unit: int) -> Grid:
    """Partitions first, each cut into a part per rank, as the paper does it."""
    partitions, lanes = rounds(-(-length // size), tuning, unit)
    return tuple(
        tuple(tuple(cut(part.offset, part.length, lanes, unit)) for part in cut(p.offset, p.length, size, unit))
        for p in cut(0, length, partitions, unit)
    )


def grid_of_blocks(lengths: Sequence[int], tuning: Tuning, unit: int) -> Grid:
    """The parts are given: rank r's block of `lengths[r]` bytes, one behind the other."""
    partitions, lanes = rounds(max(lengths), tuning, unit)
    pieces = [cut(b.offset, b.length, partitions * lanes, unit) for b in blocks(lengths)]
    return tuple(tuple(tuple(block[q * lanes : (q + 1) * lanes]) for block in pieces) for q in range(partitions))


def blocks(lengths: Sequence[int]) -> list[Cut]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return [Cut(offset, length) for offset, length in zip(offsets, lengths, strict=False)]


def longest(grid: Grid) -> int:
    return max(c.length for partition in grid for part in partition for c in part)


class Builder:
    """Collects nodes. Empty regions make no node: what would be its number is None, and None may be waited for.

    `on_arrival`: what is received to be summed is summed as it comes, where that is done by the processor.
    """

    def __init__(self, on_arrival: bool = False) -> None:
        self.on_arrival = on_arrival
        self._nodes: list[Node] = []
        self._after: list[tuple[int, ...]] = []
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def _add(self, node: Node, after: Sequence[int | None]) -> int:
        self._nodes.append(node)
        self._after.append(tuple(sorted({a for a in after if a is not None})))
        return len(self._nodes) - 1

    def send(self, peer: int, region: Region, *after: int | None, empty: bool = False) -> int | None:
        """`empty` sends a message even when there are no bytes: its arrival is what counts."""
        if not region.length and not empty:
            return None
        index = self._sent.get(peer, 0)
        self._sent[peer] = index + 1
        return self._add(Send(peer, index, region), after)

    def receive(
        self,
        peer: int,
        region: Region,
        *after: int | None,
        empty: bool = False,
        left: Region | None = None,
        last: bool = False,
    ) -> int | None:
        """`left`: what comes is reduced with it as it comes, and `region` gets the result."""
        assert left is None or left.length == region.length
        if not region.length and not empty:
            return None
        index = self._received.get(peer, 0)
        self._received[peer] = index + 1
        return self._add(Receive(peer, index, region, left, last), after)

    def receive_reduced(
        self,
        peer: int,
        left: Region,
        into: Region,
        waiting: Region,
        emptied: Sequence[int | None],
        ready: Sequence[int | None] = (),
        last: bool = False,
    ) -> int | None:
        """The next message of `peer` reduced with `left`, which is there after `ready`, into `into`.

        Unless it is done on arrival, the message is first stored in `waiting`, which is free after `emptied`.
        """
        if self.on_arrival:
            return self.receive(peer, into, *ready, *(emptied if into == waiting else ()), left=left, last=last)
        came = self.receive(peer, waiting, *emptied)
        return self.reduce(left, waiting, into, *ready, came, last=last)

    def reduce(self, left: Region, right: Region, into: Region, *after: int | None, last: bool = False) -> int | None:
        assert left.length == right.length == into.length
        return self._add(Reduce(left, right, (into,), last), after) if into.length else None

    def copy(self, source: Region, into: Region, *after: int | None) -> int | None:
        assert source.length == into.length
        return self._add(Copy(source, into), after) if into.length else None

    def copy_in_chunks(self, source: Cut, into: Cut, most: int, unit: int) -> None:
        """SOURCE to OUT, in pieces that do not keep the progress thread for long."""
        for a, b in zip(
            chunked(source.offset, source.length, most, unit), chunked(into.offset, into.length, most, unit), strict=True
        ):
            self.copy(a.within(Space.SOURCE), b.within(Space.OUT))

    def plan(self, scratch_bytes: int = 0) -> Plan:
        return Plan(tuple(self._nodes), tuple(self._after), scratch_bytes)
