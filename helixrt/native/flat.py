"""Plans of collectives in the form that the native library reads: integers only.

In: a `Plan`. Out: a `Flat`, whose arrays have the layout of `src/plan.hpp`. The caller keeps it, as it keeps the plan.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from helixrt.protocol.collective.plan import Copy, Plan, Receive, Reduce, Region, Send, Space

FIELDS = 13  # integers of a node: kind, peer, index, flags, bytes, then (space, offset) of four places
SEND, RECEIVE, REDUCE, COPY = range(4)  # kinds
LAST, ON_ARRIVAL, TWICE = 1, 2, 4  # flags
SPACES = {Space.SOURCE: 0, Space.OUT: 1, Space.SCRATCH: 2}


@dataclass(frozen=True, slots=True)
class Flat:
    """`nodes`: `FIELDS` integers for each node. Node i comes after `after[after_begin[i]:after_begin[i + 1]]`."""

    nodes: array[int]
    after: array[int]
    after_begin: array[int]
    scratch_bytes: int

    @property
    def count(self) -> int:
        return len(self.after_begin) - 1


def flatten(plan: Plan) -> Flat:
    """The plan as integers: all that the library knows of it."""
    nodes, after, after_begin = array("q"), array("q"), array("q", [0])
    for node, earlier in zip(plan.nodes, plan.after, strict=True):
        match node:
            case Send(peer, index, region):
                nodes.extend((SEND, peer, index, 0, region.length, *_places(region)))
            case Receive(peer, index, region, left, last):
                flags = (ON_ARRIVAL if left is not None else 0) | (LAST if last else 0)
                nodes.extend((RECEIVE, peer, index, flags, region.length, *_places(region, left)))
            case Reduce(left, right, (into, *more), last):
                assert len(more) <= 1, f"{node}: more than two places"
                flags = (TWICE if more else 0) | (LAST if last else 0)
                nodes.extend((REDUCE, 0, 0, flags, into.length, *_places(into, left, right, *more)))
            case Copy(source, into):
                nodes.extend((COPY, 0, 0, 0, into.length, *_places(into, None, source)))
            case _:
                raise AssertionError(node)
        after.extend(earlier)
        after_begin.append(len(after))
    return Flat(nodes, after, after_begin, plan.scratch_bytes)


def _places(*regions: Region | None) -> list[int]:
    """Four places. One that the node does not use is (0, 0), which nothing reads."""
    found: list[int] = []
    for region in (*regions, None, None, None, None)[:4]:
        found += (0, 0) if region is None else (SPACES[region.space], region.offset)
    return found
