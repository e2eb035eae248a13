"""One time limit for several waits in a row.

In: seconds for all of them together. Out: what is left for the next one.
"""

from __future__ import annotations

import time


class Deadline:
    """Begins when it is made. `limit_s` is the whole time, for messages."""

    __slots__ = ("_until", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._until = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds; 0 when the time is over."""
        return max(0.0, self._until - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until
