"""Autocast around what an engine does: none around an update, the engine's own around the forwards of a batch.

The end of a `torch.autocast` brings back what was active at its beginning. So contexts must end in the reverse order of their
beginnings, and the engine's begins in one of its calls and ends in another: one of the loop's may begin or end in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from helixrt.errors import MisuseError
from helixrt.passes.autocast import without_autocast


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Around an update: a replica that replays it has no autocast of the loop around it, so none may have. Autocast that goes
    on afterwards casts weights again."""
    try:
        with without_autocast():
            yield
    finally:
        torch.clear_autocast_cache()


class ForwardAutocast:
    """Autocast to `dtype` from `begin` to `end`; of float32 there is none."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._context: torch.autocast | None = None
        self._depth = 0  # contexts that are open within this one's beginning and its end

    def begin(self) -> None:
        assert self._context is None, "autocast of the batch before was not ended"
        if self._dtype is not torch.float32:
            self._context = torch.autocast(self._device.type, self._dtype)
            self._context.__enter__()
            self._depth = _depth()

    def check(self) -> None:
        """Raises MisuseError where the end of this autocast would not be in turn."""
        if self._context is not None and _depth() != self._depth:
            name = str(self._dtype).removeprefix("torch.")
            raise MisuseError(
                f"autocast of the loop and that of the session (dtype={name!r}) overlap. End each `with torch.autocast(...)` "
                "before step.commit() or optimizer.step(), or begin it before all steps and end it after them. It can be left "
                "out: the session has autocast around forward and loss"
            )

    def end(self) -> None:
        """Idempotent."""
        context, self._context = self._context, None
        if context is None:
            return
        kind = self._device.type
        enabled, late = torch.is_autocast_enabled(kind), _depth() < self._depth
        context.__exit__(None, None, None)
        if late:  # one that began before has ended, and brought back what was there before both
            torch.set_autocast_enabled(kind, enabled)


def _depth() -> int:
    """How many contexts are open on this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
