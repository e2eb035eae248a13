"""Which part of the whole replica's state one rank holds: what a checkpoint must know that other ranks are to read.

In: the shape of a whole tensor and how its dimensions are cut. Out: `Portion`: the name that the tensor has in the whole model,
whatever stages and chunks there are, and the boxes of it that this rank holds. Plain data; no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

MODEL = "model"  # first part of the names of what the model's state_dict has, in the state of the whole model
NOT_PERSISTENT = "not_persistent"  # of buffers that it has not

Runs = tuple[tuple[int, int], ...]  # (first index, how many) of a dimension, in the order in which a rank holds them


@dataclass(frozen=True)
class Block:
    """A box of a whole tensor. `offset` and `size` in the whole tensor, `local` the offset in the rank's own; by dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]


@dataclass(frozen=True)
class Portion:
    """What a rank holds of the tensor `name` of the whole model, which has this shape. `writes`: this rank is the first of
    those that hold the same. `also`: other names that the model has for it, as it has for tied parameters."""

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    writes: bool = True
    also: tuple[str, ...] = ()

    @staticmethod
    def whole(name: str, shape: Sequence[int], writes: bool = True) -> Portion:
        return Portion.of(name, shape, [every(size) for size in shape], writes)

    @staticmethod
    def of(name: str, shape: Sequence[int], held: Sequence[Runs], writes: bool = True) -> Portion:
        """`held`: for each dimension the indices that this rank holds."""
        spans = [[(first, count, at) for (first, count), at in zip(runs, _starts(runs), strict=True)] for runs in held]
        blocks = tuple(
            Block(tuple(b[0] for b in box), tuple(b[1] for b in box), tuple(b[2] for b in box))
            for box in product(*spans)
            if prod(b[1] for b in box) > 0
        )
        return Portion(name, tuple(shape), blocks, writes)


def every(size: int) -> Runs:
    """All indices of a dimension."""
    return ((0, size),)


def length(runs: Runs) -> int:
    return sum(count for _, count in runs)


def cut(runs: Runs, rank: int, ranks: int, sections: Sequence[int] = ()) -> Runs:
    """What rank `rank` of `ranks` gets of a dimension: of each section (their sizes; the whole without any) the piece that
    `torch.chunk` gives it."""
    found: list[tuple[int, int]] = []
    begin = 0
    for size in sections or (length(runs),):
        each = -(-size // ranks) if size else 0
        found += _between(runs, begin + min(rank * each, size), begin + min((rank + 1) * each, size))
        begin += size
    if begin != length(runs):
        raise ValueError(f"sections of {list(sections)} are {begin} together, and the dimension has {length(runs)}")
    return tuple(found)


def parts_of(size: int, parts: int) -> tuple[int, ...]:
    """The sizes that `torch.chunk` gives."""
    each = -(-size // parts) if size else 0
    return tuple(max(0, min(each, size - part * each)) for part in range(parts))


def _between(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The indices at the places from `start` to before `stop`."""
    found = []
    for (first, count), at in zip(runs, _starts(runs), strict=True):
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            found.append((first + low - at, high - low))
    return found


def _starts(runs: Runs) -> list[int]:
    starts, at = [], 0
    for _, count in runs:
        starts.append(at)
        at += count
    return starts
