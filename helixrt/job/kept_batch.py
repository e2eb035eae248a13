"""A batch that may be yielded again: what the loop does with it does not stay in it.

In: a batch as the loader gave it, before the loop gets it. Out: a batch with the same tensors, as often as it is asked for;
None where the batch must be read again: a tensor was changed in place, or the batch holds something that cannot be copied.
Tensors, classes and functions are shared, not copied. All else is copied by pickling, as a loader's worker process does:
containers of any depth, NumPy arrays, data classes, objects of other libraries.
"""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

_SHARED = torch.Tensor | type | FunctionType | BuiltinFunctionType | ModuleType


class KeptBatch:
    """One thread at a time. `problem`: why the batch cannot be given a second time; empty if it can, or was not given yet."""

    def __init__(self, batch: Any, digest: int | torch.Tensor = 0) -> None:
        self.digest = digest  # of the batch as it was read
        self._first: tuple[Any] | None = (batch,)  # as the loader gave it; None once the loop has it
        self._pickled = b""
        self._kind: type | None = None  # of a tuple or a list of tensors, which needs no pickling
        self._shared: list[Any] = []
        self._versions: list[int] = []
        self.problem = ""

    @property
    def ready(self) -> bool:
        """Whether it can be given; if not, it must be read again."""
        return self._first is not None or (not self.problem and _versions(self._shared) == self._versions)

    def give(self) -> Any:
        """The batch as it was read, for the loop; the first time it is the loader's own object. Only while `ready`."""
        if self._first is None:
            if self._kind is not None:
                return self._kind(self._shared)
            return _Unpickler(io.BytesIO(self._pickled), self._shared).load()
        (batch,), self._first = self._first, None
        if type(batch) in (tuple, list) and all(type(item) is torch.Tensor for item in batch):
            self._kind, self._shared = type(batch), list(batch)
            self._versions = _versions(self._shared)
            return batch
        file = io.BytesIO()
        try:
            _Pickler(file, self._shared).dump(batch)
            self._pickled = file.getvalue()
            _Unpickler(io.BytesIO(self._pickled), self._shared).load()
        except Exception as error:  # whatever the code of a user's class raises
            self.problem = f"a batch of type {type(batch).__name__} cannot be copied ({type(error).__name__}: {error})"
            self._pickled, self._shared = b"", []
        self._versions = _versions(self._shared)
        return batch


class _Pickler(pickle.Pickler):
    """Puts what is shared into a list, and its place there into the pickle."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._shared = shared

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, _SHARED):
            return None
        self._shared.append(item)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):
    """Takes what is shared from the list."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, place: int) -> Any:
        return self._shared[place]


def _versions(shared: list[Any]) -> list[int]:
    """One number per tensor: it grows when the tensor is changed in place. Tensors of inference mode have none."""
    return [item._version for item in shared if isinstance(item, torch.Tensor) and not item.is_inference()]
