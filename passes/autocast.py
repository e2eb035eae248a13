"""No autocast, for work whose types are fixed: captured graphs, updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operators run on what they are given, also inside a user's `torch.autocast`."""
    with ExitStack() as stack:
        for device in device_types():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def device_types() -> tuple[str, ...]:
    """Of this machine: the processor, and the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
