"""Graphs by what they were captured for: a key (shapes, settings) and the Python values that the capture read.

In: keys, and guards of captured graphs. Out: the graphs that serve a call, or the name of the value that is another. The
`most` last used graphs are kept; a dropped one is captured again when it is needed, which takes time and gives the same
results. A value that changes in every step would be captured in every step: its third change within `WITHIN` calls is refused
with its name. Ranks that see the same calls and the same values keep, make and drop the same graphs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from helixrt.passes.errors import CaptureError
from helixrt.passes.guards_private import Guards

Graphs = TypeVar("Graphs")
AGAIN = 2  # captures for changes of one value
WITHIN = 500  # calls


@dataclass
class _Kept(Generic[Graphs]):
    key: Hashable
    graphs: Graphs
    guards: Guards | None


class KeptGraphs(Generic[Graphs]):
    """`changed`: the value for which `find` found nothing, else empty, and `in_model` whether the model has it; `dropped`: how
    many were dropped so far."""

    def __init__(self, most: int) -> None:
        self._most, self.dropped = most, 0
        self._kept: list[_Kept[Graphs]] = []  # the last used one at the end
        self._calls = 0
        self._captures: dict[str, list[int]] = defaultdict(list)  # by value: in which calls
        self.changed, self.in_model = "", False

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable) -> Graphs | None:
        """Those for calls of this key, with the values of now."""
        self._calls += 1
        self.changed = ""
        for each in reversed(self._kept):
            if each.key == key:
                changed = "" if each.guards is None else each.guards.changed()
                if not changed:
                    self._kept.remove(each)
                    self._kept.append(each)
                    self.changed = ""
                    return each.graphs
                if not self.changed and each.guards is not None:
                    self.changed, self.in_model = changed, each.guards.in_model
        return None

    def make_room(self, where: str) -> None:
        """Before graphs are captured: drops some, so that there are never more. Raises CaptureError where the `changed` value
        changes too often; `where`: the user's FILE:LINE."""
        if self.changed:
            recent = [call for call in self._captures[self.changed] if call > self._calls - WITHIN]
            if len(recent) >= AGAIN:
                reason = f"{self.changed} is no tensor, and it has changed for the third time: a graph has one value of it"
                raise CaptureError(where, reason, "pass it as an input (a tensor of the batch), or keep it in a buffer")
            self._captures[self.changed] = [*recent, self._calls]
        while len(self._kept) >= self._most:
            del self._kept[0]
            self.dropped += 1

    def keep(self, key: Hashable, graphs: Graphs, guards: Guards | None) -> None:
        """In place of those that serve the same calls."""
        self._kept = [each for each in self._kept if each.key != key or (each.guards is not None and each.guards.changed())]
        self._kept.append(_Kept(key, graphs, guards))
