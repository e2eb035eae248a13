"""Memory that a NIC may reach: registered in place, and kept registered by range.

In: contiguous views of the caller's memory. Out: for a NIC's send queue their address and key. Registering takes longer
than sending what is registered, so a range is remembered with the memory that owns it: an allocator cannot give the
addresses to anybody else while they are in the table, which would have the NIC read what is no longer there. A tensor's
storage can be resized under its owner (`storages`): its ranges are known by the storage and its present memory, and leave
the table when it is resized. Memory whose owner the view does not tell (a bare address) is registered for one message only.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from helixrt.transport.process_memory import address_of
from helixrt.transport.verbs.storages import Memory, WatchedStorage, storage_of


class Registered(Protocol):
    """A memory region of pyverbs."""

    lkey: int
    rkey: int

    def close(self) -> None: ...


class Key(NamedTuple):
    """What a range is known by: addresses, and for a tensor its storage, which compares by identity, and its memory."""

    address: int
    end: int
    storage: WatchedStorage | None = None
    memory: Memory | None = None

    @property
    def stale(self) -> bool:
        """The storage has other memory now."""
        return self.storage is not None and self.storage.memory() != self.memory


class Range:
    """A part of the memory, registered. Kept until it is unused and no longer in the table."""

    __slots__ = ("kept", "keeper", "region", "users")

    def __init__(self, region: Registered, keeper: memoryview | None) -> None:
        self.region = region
        self.keeper = keeper  # holds the memory as long as the range is remembered
        self.users = 0  # messages on a send queue
        self.kept = keeper is not None  # in the table

    @property
    def key(self) -> int:
        return self.region.lkey


class Registrations:
    """One NIC's. `register(address, length, writable)` registers; the least recently used ranges go beyond `capacity_bytes`.

    `take` and `release` may be called by any thread.
    """

    def __init__(self, register: Callable[[int, int, bool], Registered], capacity_bytes: int = 1 << 30) -> None:
        self._register, self._capacity = register, capacity_bytes
        self._lock = threading.Lock()
        self._ranges: OrderedDict[Key, Range] = OrderedDict()  # least recently used first
        self._bytes = 0
        self.made = 0  # registrations so far

    def take(self, view: memoryview) -> tuple[Range, int]:
        """A range that covers `view`, and where the view begins; `release` it when the NIC has done with it.

        Raises what `register` does."""
        keeper = self._keeper(view)
        key = _key(view if keeper is None else keeper)
        if key.storage is not None:
            key.storage.tell(self._resized)
        with self._lock:
            found = self._ranges.get(key)
            if found is None:
                found = self._make(key, keeper, not view.readonly)
            else:
                self._ranges.move_to_end(key)
            found.users += 1
            self._make_room()
            return found, address_of(view)

    def _keeper(self, view: memoryview) -> memoryview | None:
        """What holds its memory, and is registered with it; None if nothing does."""
        if not _owned(view.obj):
            return None
        whole = _whole(view)
        return view if len(whole) > self._capacity else whole  # a part will do

    def _make(self, key: Key, keeper: memoryview | None, writable: bool) -> Range:
        for old, each in [(old, each) for old, each in self._ranges.items() if old.stale]:
            self._drop(old, each)
        made = Range(self._register(key.address, key.end - key.address, writable), keeper)
        self.made += 1
        if keeper is not None:
            self._ranges[key] = made
            self._bytes += key.end - key.address
        return made

    def _resized(self, storage: WatchedStorage) -> None:
        """Its memory is about to be another."""
        with self._lock:
            for key, each in [(key, each) for key, each in self._ranges.items() if key.storage is storage]:
                self._drop(key, each)

    def _make_room(self) -> None:
        if self._bytes <= self._capacity:
            return
        for key, each in list(self._ranges.items()):
            if self._bytes <= self._capacity:
                return
            if not each.users:
                self._drop(key, each)

    def _drop(self, key: Key, each: Range) -> None:
        del self._ranges[key]
        self._bytes -= key.end - key.address
        each.kept, each.keeper = False, None
        if not each.users:
            each.region.close()

    def knows(self, view: memoryview) -> bool:
        """Nothing is to be registered for it, now or later."""
        keeper = self._keeper(view)
        return keeper is None or _key(keeper) in self._ranges

    def remember(self, view: memoryview) -> None:
        """Register it before it is sent."""
        self.release(self.take(view)[0])

    def release(self, each: Range) -> None:
        with self._lock:
            each.users -= 1
            if not each.users and not each.kept:
                each.region.close()
            self._make_room()

    def clear(self) -> None:
        """Nothing is on a send queue any more."""
        with self._lock:
            for key, each in list(self._ranges.items()):
                each.users = 0
                self._drop(key, each)


def _key(view: memoryview) -> Key:
    address, storage = address_of(view), storage_of(view.obj)
    return Key(address, address + len(view), storage, None if storage is None else storage.memory())


def _owned(exporter: Any) -> bool:
    """Whether holding `exporter` holds its memory. A ctypes object made from a bare address does not, unless whoever
    made it hung the owner on it as `owner`."""
    if not isinstance(exporter, ctypes.Array | ctypes.Structure):
        return True
    raw: Any = exporter
    return bool(raw._b_needsfree_) or raw._b_base_ is not None or raw._objects is not None or hasattr(raw, "owner")


def _whole(view: memoryview) -> memoryview:
    """All the memory that `view` is a part of, where its exporter shows that; else the view."""
    try:
        whole = memoryview(view.obj)
        return whole.cast("B") if whole.c_contiguous else view
    except (TypeError, ValueError, BufferError):
        return view
