"""Autocast, as captured graphs and the stages of a pipeline use it; and none, for work whose types are fixed: captured graphs,
backwards, updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache

import torch


def autocast_to(dtype: torch.dtype | None, device: torch.device | str) -> AbstractContextManager[object]:
    """Autocast to this type on the device's kind; of None the autocast that is active stays."""
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype=dtype)


@contextmanager
def autocast_pass(dtype: torch.dtype | None, device: torch.device | str) -> Iterator[None]:
    """As `autocast_to`, around the forwards and backwards of all micro-batches of a step: each weight is cast once."""
    with autocast_to(dtype, device):
        try:
            yield
        finally:
            if dtype is not None:  # also where an autocast of the caller goes on, whose end alone would clear it
                torch.clear_autocast_cache()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operators run on what they are given, also inside a user's `torch.autocast`."""
    active = [device for device in device_types() if torch.is_autocast_enabled(device)]
    if not active:
        yield
        return
    with ExitStack() as stack:
        for device in active:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@cache
def device_types() -> tuple[str, ...]:
    """Of this machine: the processor, and the accelerator if there is one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
