"""Graphs by the shapes of the batches that they are for, such as sequence lengths.

In: batches of one model, and what makes graphs for one. Out: the graphs; they are made when a batch of these shapes comes for
the first time. The `most` last used ones are kept; a dropped one is made again when it is needed
again, which takes time, is reported once, and gives the same results. All ranks of a replica see the same batches, so they
make and drop the same graphs.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from helixrt.compile.microbatches import Batch

Graphs = TypeVar("Graphs")


class ShapeGraphs(Generic[Graphs]):
    """`made` counts how many were made."""

    def __init__(self, most: int, make: Callable[[Batch], Graphs]) -> None:
        self._most, self._make = most, make
        self._kept: OrderedDict[Hashable, Graphs] = OrderedDict()
        self._told = False
        self.made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, batch: Batch) -> Graphs:
        """For batches like this one."""
        key = tuple(batch.kinds().items())
        found = self._kept.get(key)
        if found is None:
            while len(self._kept) >= self._most:  # first, so that there are never more
                self._kept.popitem(last=False)
                self._tell()
            found = self._kept[key] = self._make(batch)
            self.made += 1
        self._kept.move_to_end(key)
        return found

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"batches had more than shapes={self._most} shapes, and each takes time to capture, also when it comes again; "
                "pad batches to a few lengths (bucketing), or raise shapes= of helixrt.compile, which keeps more graphs",
                stacklevel=2,
            )
