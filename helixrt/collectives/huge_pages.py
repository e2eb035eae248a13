"""Tensors that are used again and again get pages of 2 MiB, which a peer reads twice as fast as those of 4 KiB.

In: the memory of each operation's tensors. Out: nothing; the bytes stay what and where they are. The kernel takes part of the
memory at a time (`madvise`, MADV_COLLAPSE of Linux 6.1; it copies 16 MiB in about 35 ms), so a long tensor takes many
operations, and none of them keeps a heartbeat waiting. Where huge pages are disabled or unsupported, nothing happens.

Whose memory: the library's own always; a caller's only with consent (`consent`). Users of a process group consent with
HELIXRT_HUGE_PAGES=1.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

LEAST_BYTES = 4 << 20  # of a tensor worth it
USES = 3  # of the same memory, after which it is assumed to be used again
SLICE_BYTES = 16 << 20  # taken with one operation
PAGE_BYTES = 2 << 20
_MOST = 256  # tensors that are remembered
_COLLAPSE = 25  # MADV_COLLAPSE
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _advise() -> Any:
    """The C function, or None where it would be of no use."""
    try:
        if "[never]" in _SETTING.read_text():
            return None
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):
        return None
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


class HugePages:
    """What one communicator has seen."""

    def __init__(self) -> None:
        self.consent = False  # of those who call: their tensors may get huge pages, too
        self._advise = _advise()
        self._uses: OrderedDict[tuple[int, int], int] = OrderedDict()  # (address, bytes) -> operations
        self._done: dict[tuple[int, int], int] = {}  # where the next slice begins

    def used(self, tensor: torch.Tensor, own: bool = False) -> None:
        """An operation begins with this contiguous CPU tensor, which is the library's `own` or the caller's."""
        if self._advise is None or not (own or self.consent):
            return
        size = tensor.numel() * tensor.element_size()
        if size < LEAST_BYTES:
            return
        memory = (tensor.data_ptr(), size)
        uses = self._uses[memory] = self._uses.pop(memory, 0) + 1  # the newest is the last
        if len(self._uses) > _MOST:
            old, _ = self._uses.popitem(last=False)
            self._done.pop(old, None)
        if uses >= USES:
            self._collapse(memory)

    def _collapse(self, memory: tuple[int, int]) -> None:
        address, size = memory
        begin = self._done.get(memory, -(-address // PAGE_BYTES) * PAGE_BYTES)
        end = min((address + size) // PAGE_BYTES * PAGE_BYTES, begin + SLICE_BYTES)
        if begin < end:
            self._done[memory] = end
            self._advise(begin, end - begin, _COLLAPSE)  # the result is ignored: this is an optimization only
