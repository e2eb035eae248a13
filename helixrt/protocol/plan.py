"""What one rank does in one collective: a small graph of sends, receives, reductions and copies.

In: nothing; algorithms (`ring`, `direct`, …) build plans from (collective, bytes, ranks, tuning). Out: a `Plan`
that the collective machine executes in any order its dependencies allow. A plan is the same for every
call of the same shape, so it is built once and kept.

All of FTAR's flow control is in the plan: partitions, chunks in flight and slots of scratch memory are
dependencies between nodes (FT-HSDP section 4.2), so a machine that follows them needs no other rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Space(Enum):
    """The memory a region lies in. With an in-place call SOURCE and OUT are the same memory."""

    SOURCE = "source"  # what the caller gave; preserved unless the call is in place
    OUT = "out"  # what the caller gets
    SCRATCH = "scratch"  # the communicator's own, `Plan.scratch_bytes` of it


@dataclass(frozen=True, slots=True)
class Region:
    space: Space
    offset: int  # bytes
    length: int  # bytes; a multiple of the element size; may be 0


@dataclass(frozen=True, slots=True)
class Send:
    """Send `region` to `peer` as message `index` (counted per ordered pair of ranks and collective, from 0)."""

    peer: int
    index: int
    region: Region


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive message `index` of `peer` into `region`; its length is agreed, never taken from the peer."""

    peer: int
    index: int
    region: Region


@dataclass(frozen=True, slots=True)
class Reduce:
    """`into` = `left` op `right`, element by element; `last` marks the final reduction, where a mean is divided.

    With two regions in `into` both get the result in one pass: the paper's fused last reduce-scatter step.
    """

    left: Region
    right: Region
    into: tuple[Region, ...]
    last: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    source: Region
    into: Region


Node = Send | Receive | Reduce | Copy


@dataclass(frozen=True, slots=True)
class Plan:
    """`nodes[i]` may begin when all of `after[i]` are done; `after[i]` holds smaller numbers only.

    A send is done when its memory may be written again; a receive when its bytes are all there.
    """

    nodes: tuple[Node, ...]
    after: tuple[tuple[int, ...], ...]
    scratch_bytes: int = 0

    def __post_init__(self) -> None:
        assert len(self.nodes) == len(self.after)
