"""Pinned host memory from torch's cache of it, and what that memory takes.

In: a size. Out: a buffer. The cache rounds a size up to a power of two, keeps memory that is given back, and does not use it
again before the copies that use it are done. `torch._C._host_emptyCache` is private (2.7 to 2.15): the one way to have the
cache release memory in all versions that helixrt runs on.
"""

from __future__ import annotations

import torch

from helixrt.private_api import PINNED_CACHE, built_for_device, usable


def pinned_bytes(size: int) -> int:
    """Host memory that a pinned buffer of `size` bytes takes."""
    return 1 << max(0, size - 1).bit_length()


def pinned(size: int) -> torch.Tensor:
    """A pinned buffer of `size` bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def release_unused() -> None:
    """Give the memory of buffers that are gone back to the system, where torch can. May wait for the device."""
    if built_for_device() and usable(PINNED_CACHE):
        torch._C._host_emptyCache()
