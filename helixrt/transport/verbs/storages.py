"""Torch storages whose memory may be freed under a living tensor: which one a buffer belongs to, and when it is resized.

In: the exporter of a view, which names the tensor that owns the memory as `owner`. Out: what identifies the storage and its
present memory. `untyped_storage().resize_(0)` gives the memory back to the allocator though tensors still refer to the
storage, and a later `resize_` (as FSDP does in every step) often yields the same size at the same address, but on other
pages. Neither the owner nor the address shows that, so resizes are counted: `resize_` of the one storage object is
wrapped, as torch returns the same object for every tensor of a storage. A resize by an operator below Python shows only
where it changes the size or the address. Nothing of torch is imported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_ATTRIBUTE = "_helixrt_resizes"  # of a storage object that is watched

Memory = tuple[int, int, int]  # resizes so far, address, bytes


class WatchedStorage:
    """One storage. `listeners` are called before each resize, and held weakly."""

    __slots__ = ("__weakref__", "_listeners", "_resizes", "_storage")

    def __init__(self, storage: Any) -> None:
        self._resizes = 0
        self._listeners: list[weakref.WeakMethod[Callable[[WatchedStorage], None]]] = []
        self._storage = weakref.ref(storage)

    def memory(self) -> Memory | None:
        """Equal as long as the memory is the same; None once the storage is gone."""
        storage = self._storage()
        return None if storage is None else (self._resizes, storage.data_ptr(), storage.nbytes())

    def tell(self, listener: Callable[[WatchedStorage], None]) -> None:
        """Call this bound method before each resize from now on; the same method only once."""
        known = weakref.WeakMethod(listener)
        if known not in self._listeners:
            self._listeners = [each for each in self._listeners if each() is not None] + [known]

    def resize(self, size: int) -> Any:
        self._resizes += 1
        for each in self._listeners:
            listener = each()
            if listener is not None:
                listener(self)
        storage: Any = self._storage()
        return type(storage).resize_(storage, size)


def storage_of(exporter: Any) -> WatchedStorage | None:
    """The storage that `exporter`'s memory belongs to, watched from now on; None if it is no tensor's."""
    owner = getattr(exporter, "owner", None)
    find = getattr(owner, "untyped_storage", None)
    if find is None:
        return None
    storage = find()
    watched: WatchedStorage | None = getattr(storage, _ATTRIBUTE, None)
    if watched is None:
        watched = WatchedStorage(storage)
        setattr(storage, _ATTRIBUTE, watched)
        storage.resize_ = watched.resize  # of this object alone
    return watched
