"""Host memory that messages wait in until they are sent: a bounded pool of buffers.

In: tensors that a stage gives away, as they come. Out: copies of them in host memory; a tensor is its owner's again as soon
as it is copied (ADAPTRA, Section 5.2). What finds no room waits where it is, on its own tensor, until a buffer is given back.
For tensors on a CUDA device the buffers are pinned; they count as what torch's cache of pinned memory takes for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from helixrt.pipeline.pinned_private import pinned, pinned_bytes, release_unused


class HostTier:
    """At most `capacity_bytes` of buffers, those that are kept for use again included; a message that is larger than that goes
    alone. Any thread."""

    def __init__(self, capacity_bytes: int, pinned: bool = False) -> None:
        self.capacity_bytes, self._pinned = capacity_bytes, pinned
        self.peak_bytes = 0  # that were in use at once
        self.waits = 0  # messages that found no room at first
        self._used = self._kept_bytes = 0
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def take(self, size: int, retry: Callable[[], None] | None = None) -> torch.Tensor | None:
        """A buffer of `size` bytes; None without room, and then `retry` is called, once, when some is given back."""
        taken, full = self._taken(size), False
        with self._lock:
            if self._used and self._used + taken > self.capacity_bytes:
                self.waits += 1
                if retry is not None:
                    self._waiting.append(retry)
                return None
            self._used += taken
            self.peak_bytes = max(self.peak_bytes, self._used)
            if kept := self._kept.get(size):
                self._kept_bytes -= taken
                return kept.pop()
            if self._used + self._kept_bytes > self.capacity_bytes:
                full = bool(self._kept_bytes)
                self._kept.clear()
                self._kept_bytes = 0
        if not self._pinned:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if full:
            release_unused()
        return pinned(size)

    def give(self, buffer: torch.Tensor) -> None:
        """It is not used any more."""
        size = buffer.numel()
        taken = self._taken(size)
        with self._lock:
            self._used -= taken
            if self._used + self._kept_bytes + taken <= self.capacity_bytes:
                self._kept.setdefault(size, []).append(buffer)
                self._kept_bytes += taken
            waiting, self._waiting = self._waiting, []
        for retry in waiting:
            retry()

    def _taken(self, size: int) -> int:
        """Host memory that a buffer takes."""
        return pinned_bytes(size) if self._pinned else size
