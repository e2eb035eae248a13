"""Ranks: what the ranks that share a plan tell each other while they make it, so that all make the same one.

In: a process group, or None where one process plans for itself. Out: meeting points, everyone's words, and numbers
merged over all. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from helixrt.passes.agree import broadcast, exchange
from helixrt.passes.groups import transport

DEADLINE_S = 120.0


class Ranks:
    """The ranks of `group`; `deadline_s` for each exchange, after which DisagreementError is raised."""

    def __init__(self, group: Any = None, deadline_s: float = DEADLINE_S) -> None:
        self.group, self.deadline_s = group, deadline_s
        self.first = group is None or group.rank() == 0
        if group is not None:
            self._device = transport(group)[1]

    @property
    def count(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    def meet(self) -> None:
        """Go on when all are here."""
        if self.count > 1:
            self._exchange(b"\0")

    def arrive(self) -> None:
        """Go on when all are here, however long they compute before; waits as long as the group's own timeout."""
        if self.count > 1:
            exchange(b"\0", self.group, None, self._device)

    def everyone(self, mine: bytes) -> list[bytes]:
        """The value of each rank, by rank."""
        if self.count == 1:
            return [mine]
        sizes = [int.from_bytes(size, "little") for size in self._exchange(len(mine).to_bytes(8, "little"))]
        padded = self._exchange(mine.ljust(max(*sizes, 1), b"\0"))
        return [text[:size] for text, size in zip(padded, sizes, strict=True)]

    def first_says(self, mine: Any) -> Any:
        """The value of the first rank, on every rank; any JSON value. Only the first rank sends."""
        said = json.dumps(mine).encode() if self.first else b""
        return json.loads(said if self.count == 1 else broadcast(said, self.group, self.deadline_s, self._device))

    def table(self, mine: Sequence[float]) -> np.ndarray:
        """Everyone's numbers [ranks, numbers]; all must have equally many."""
        rows = [np.frombuffer(row) for row in self.everyone(np.asarray(mine, dtype=np.float64).tobytes())]
        return np.stack(rows)

    def maxima(self, mine: Sequence[float]) -> list[float]:
        return [float(value) for value in self.table(mine).max(axis=0)]

    def _exchange(self, mine: bytes) -> list[bytes]:
        return exchange(mine, self.group, self.deadline_s, self._device)
