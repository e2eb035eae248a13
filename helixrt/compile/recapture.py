"""Ranks that communicate run graphs that were captured together.

In: for each step the number of the graphs that this rank would run, 0 where it has none. Out: whether all ranks of all groups
that the model communicates in would run the same; otherwise all of them capture again, at the same time. A rank that captured
alone (after `forget`, another shape, a changed attribute) would exchange plans while the others train.

Before the first capture the groups are unknown; it happens in the first step of every rank. A rank waits for the others as
long as it would in the step's first collective: the group's own timeout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from helixrt.passes.agree import exchange
from helixrt.passes.group_private import group_named
from helixrt.passes.groups import transport


class Together:
    """Numbers captures, the same on all ranks. It outlives the graphs, because the others still wait after `forget`."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.count = 0

    def same(self, number: int) -> bool:
        """Whether this rank and those it communicates with run the graphs of this number. Every one of them calls it.

        Raises DisagreementError when one does not come within its group's timeout.
        """
        differs = number == 0
        for name in self.names * min(len(self.names), 2):  # twice, so that a result of one group reaches the others
            group = group_named(name)
            mine = struct.pack("<qq", 0 if differs else number, self.count)
            rows = [struct.unpack("<qq", row) for row in exchange(mine, group, None, transport(group)[1])]
            differs = differs or any(other != number for other, _ in rows)
            self.count = max(count for _, count in rows)
        return not differs

    def captured(self, names: Iterable[str]) -> int:
        """The number of graphs captured now, which communicate in the groups called `names`."""
        self.names = tuple(dict.fromkeys((*self.names, *names)))
        self.count += 1
        return self.count
