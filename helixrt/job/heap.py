"""Keeps freed tensor memory in the process, on glibc.

By default the allocator gives memory at the top of the heap back to the system whenever a step's activations
are freed, and the next step gets it again page by page, each page zeroed by the kernel: some percent of a small
model's step. A training process wants its peak in every step anyway.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_KEPT_BYTES = 1 << 30
_FROM_HEAP_BYTES = 32 << 20  # the largest that glibc allows


def keep_freed_memory() -> bool:
    """Keep up to 1 GiB of freed heap in this process. True if the allocator took the settings (glibc only)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
