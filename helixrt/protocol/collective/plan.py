"""What one rank does in one collective: a small graph of sends, receives, reductions and copies.

In: nothing; algorithms (`ring`, `direct`, …) build plans from (collective, bytes, ranks, tuning). Out: a `Plan`
that the collective machine executes in any order its dependencies allow. A plan is the same for every
call of the same shape, so it is built once and kept.

All of FTAR's flow control is in the plan: partitions, chunks in flight and slots of scratch memory are
dependencies between nodes (FT-HSDP section 4.2). A machine that follows them needs one rule more: the
sends of a plan to one peer begin in the order of their index. The tests prove plans against it (`plan_check`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Space(Enum):
    """The memory that a region belongs to. With an in-place call SOURCE and OUT are the same memory."""

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
    """Receive message `index` of `peer` into `region`; its length is agreed, never taken from the peer.

    With `left`, what arrives is reduced as it comes: `region` = `left` op the bytes, and they lie nowhere themselves. What
    is summed so is still in the processor's cache. `last` is that of `Reduce`.
    """

    peer: int
    index: int
    region: Region
    left: Region | None = None
    last: bool = False


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
class PlanIndex:
    """What a machine looks up while it runs a plan, all of it by number; worked out once, when the plan is built."""

    waits_for: tuple[int, ...]  # how many nodes each node comes after
    before: tuple[tuple[int, ...], ...]  # which nodes come after each node, ascending
    roots: tuple[int, ...]  # nodes that come after none
    sends: tuple[tuple[int, ...], ...]  # [peer][index] -> node
    receives: tuple[tuple[int, ...], ...]  # [peer][index] -> node


def _by_index(nodes: tuple[Node, ...], kind: type[Send] | type[Receive]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = []
    for number, node in enumerate(nodes):
        if isinstance(node, kind):
            found.extend([] for _ in range(node.peer + 1 - len(found)))
            assert node.index == len(found[node.peer]), f"{node}: not the next index of its peer"
            found[node.peer].append(number)
    return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """`nodes[i]` may begin when all of `after[i]` are done; `after[i]` holds smaller numbers only.

    A send is done when its memory may be written again; a receive when its bytes are all there. The
    messages of one ordered pair have the indices 0, 1, 2, … in the order of their nodes.
    """

    nodes: tuple[Node, ...]
    after: tuple[tuple[int, ...], ...]
    scratch_bytes: int = 0
    index: PlanIndex = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.nodes) == len(self.after)
        before: list[list[int]] = [[] for _ in self.nodes]
        for number, earlier in enumerate(self.after):
            for e in earlier:
                assert 0 <= e < number, f"node {number} comes after {e}"
                before[e].append(number)
        index = PlanIndex(
            waits_for=tuple(map(len, self.after)),
            before=tuple(map(tuple, before)),
            roots=tuple(n for n, earlier in enumerate(self.after) if not earlier),
            sends=_by_index(self.nodes, Send),
            receives=_by_index(self.nodes, Receive),
        )
        object.__setattr__(self, "index", index)
