"""Counts the memory of live tensors as operators make and free them: measured, not modelled.

In: tensors that are there anyway. Out: the most bytes that others held at any moment inside the `with` block.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from helixrt.compile.fake_tensors_private import is_traced


class LiveStorage(TorchDispatchMode):
    """`now_bytes` and `peak_bytes` of storages that operators made since the block began, and that still live."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.now_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                if storage.device.type == "meta" or is_traced(tensor):  # no memory; storages of fake tensors are on meta, too
                    continue
                self.sizes[storage._cdata] = storage.nbytes()
                self.now_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
                weakref.finalize(storage, self._forget, storage._cdata)
        return result

    def _forget(self, key: int) -> None:
        self.now_bytes -= self.sizes.pop(key)
