"""Direct communication: all sends and receives of a stage in one queue, in the order of its program, of which the head moves.

In: communications in program order, and their results. Out: which may begin, and which are finished. What it
means is defined in `helixrt.schedule.simulate` (ADAPTRA, Sections 3.2 and 5.1). Pure; who uses it sees to exclusion.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """A receive has nothing to begin: its memory was given before."""


@dataclass(slots=True, eq=False)
class Communication:
    """A send, which `begin` puts on the wire, or a receive. `over`: its message has arrived, whether it is the head or not."""

    begin: Callable[[], None] = _nothing
    peer: int = -1
    over: bool = False
    begun: bool = False
    finished_s: float = math.nan  # when it was both done and at the head

    @property
    def finished(self) -> bool:
        return self.finished_s == self.finished_s


class InOrder:
    """At most `depth` communications are unfinished."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.freed_s = -math.inf  # when the last one finished
        self._unfinished: deque[Communication] = deque()

    def __len__(self) -> int:
        return len(self._unfinished)

    @property
    def awaited(self) -> set[int]:
        """The peers whose messages have not arrived, or that have not taken this stage's."""
        return {each.peer for each in self._unfinished if not each.over}

    @property
    def full(self) -> bool:
        return len(self._unfinished) >= self.depth

    def put(self, communication: Communication) -> None:
        """The program has come to it. Not when full."""
        assert not self.full, f"{self.depth} communications are unfinished"
        self._unfinished.append(communication)

    def advance(self, now_s: float) -> list[Communication]:
        """Finish what can be; those that have to begin now, after something was put in or is over."""
        begin = []
        while self._unfinished:
            head = self._unfinished[0]
            if not head.begun:
                head.begun = True
                begin.append(head)
            if not head.over:
                break
            head.finished_s = self.freed_s = now_s
            self._unfinished.popleft()
        return begin
