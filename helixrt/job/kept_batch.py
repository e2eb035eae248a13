"""A batch that may be yielded again: what the loop puts into its containers does not stay in it.

In: a batch as the loader gave it, before the loop gets it. Out: a batch with the same tensors, as often as it is asked for;
None once a tensor was changed in place, so that the batch must be read again. Tensors are shared, not copied. Lists, tuples,
mappings, data classes and objects with `__copy__` (NumPy arrays, batches of other libraries) are copied.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch


class KeptBatch:
    """One thread at a time."""

    def __init__(self, batch: Any) -> None:
        self._batch = copied(batch)
        self._versions = tuple(_versions(self._batch))

    def again(self) -> Any | None:
        """The batch as it was read, for the loop; None if a tensor in it was changed in place."""
        return copied(self._batch) if tuple(_versions(self._batch)) == self._versions else None


def copied(value: Any) -> Any:
    """The same leaves in containers of their own."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind._make([copied(item) for item in value])
    if kind is list or kind is tuple:
        return kind(copied(item) for item in value)
    held = isinstance(value, Mapping | Sequence) or hasattr(kind, "__copy__") or is_dataclass(value)
    if not held or isinstance(value, torch.Tensor | type | str | bytes | range):
        return value
    try:
        return copy.copy(value)
    except Exception:  # an object that cannot be copied is the loop's own affair
        return value


def _versions(value: Any) -> Iterator[int]:
    """The version counters of a batch's tensors, in a fixed order: they grow when a tensor is changed in place."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            yield value._version
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _versions(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _versions(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _versions(vars(value)) if hasattr(value, "__dict__") else ()
