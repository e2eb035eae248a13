"""The reduced gradient sets of one rank: each belongs to one of its threads at a time, or is kept here.

A set goes round: the exchange thread borrows it and fills it with sums; the commit keeps it under the record's lineage hash;
the main thread takes it for the update and has it served to replicas that missed the exchange; when it is two updates old
it is free again. Sets that are fetched for replay enter where the commit does.

On an accelerator there is one set, which the exchange of each step fills: its buckets are written after the next work has made
gradients, and so after the update and the copy that is served. An exchange to which this replica does not contribute may run
before the update, and fills a set in host memory; so all that is kept or served is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from helixrt.protocol.catchup_memory import SERVED as MOST_SERVED
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import StateTransport
from helixrt.replica.live_bytes import KEPT, SERVED, SUMS, host_copy
from helixrt.replica.rank_parts import Buckets, bucket_names, reduced_name

_FREE = 2  # sets that are held for the next exchanges


class ReducedSets:
    """Safe from any thread; `serve` is called by the main thread alone."""

    def __init__(self, transport: StateTransport) -> None:
        self._transport = transport
        self._served: list[tuple[str, Buckets]] = []  # offered sets, oldest first; the main thread's own
        self._lock = threading.Lock()  # guards everything below
        self._exchanged: tuple[int, Buckets] | None = None  # (generation, sums) of the last exchange
        self._free: list[Buckets] = []
        self._on_device: Buckets | None = None  # the one set, where gradients are on an accelerator
        self._kept: dict[str, Buckets] = {}

    def borrow(self, like: Sequence[torch.Tensor], contribute: bool = True) -> Buckets:
        """A set of this layout for an exchange's sums; that of an exchange that was not committed is used again.
        `contribute`: this replica's gradients are in them."""
        if contribute and any(_elsewhere(bucket) for bucket in like):
            with self._lock:
                self._exchanged = None
                if self._on_device is None:
                    self._on_device = [torch.empty_like(b) for b in like]
                return self._on_device
        with self._lock:
            if self._exchanged is not None and self._exchanged[1] is self._on_device:
                self._exchanged = None
            if self._exchanged is not None:
                spare, self._exchanged = self._exchanged[1], None
                return spare
            if self._free:
                return self._free.pop()
        return [torch.empty_like(b, device="cpu" if _elsewhere(b) else b.device) for b in like]

    def exchanged(self, generation: int, sums: Buckets) -> None:
        """The exchange of this generation filled a borrowed set."""
        with self._lock:
            self._exchanged = (generation, sums)

    @property
    def newest(self) -> Buckets | None:
        """The sums of the last exchange, until they are committed or borrowed again."""
        with self._lock:
            return None if self._exchanged is None else self._exchanged[1]

    def keep(self, record: CommitRecord) -> None:
        """The sums of the last exchange are those of this record."""
        with self._lock:
            assert self._exchanged is not None and self._exchanged[0] == record.generation
            self._kept[record.hash] = self._exchanged[1]
            self._exchanged = None

    def put(self, lineage: str, sums: Buckets) -> None:
        """Keep a set that was fetched."""
        with self._lock:
            self._kept[lineage] = sums

    def take(self, lineage: str) -> Buckets:
        """The kept set of this record; it is the caller's now."""
        with self._lock:
            return self._kept.pop(lineage)

    def forget(self, lineage: str) -> None:
        """Do not keep this record's set any longer; idempotent."""
        with self._lock:
            self._kept.pop(lineage, None)

    def kept(self) -> frozenset[str]:
        """The records whose sets are kept."""
        with self._lock:
            return frozenset(self._kept)

    def serve(self, record: CommitRecord, sums: Buckets) -> None:
        """Offer the newest two sets to other replicas; an older one is free again."""
        if sums is self._on_device:
            sums = [host_copy(each) for each in sums]
        name = reduced_name(record.hash)
        self._transport.offer(name, dict(zip(bucket_names(sums), sums, strict=True)))
        self._served.append((name, sums))
        if len(self._served) > MOST_SERVED:
            old_name, old = self._served.pop(0)
            self._transport.withdraw(old_name)
            with self._lock:
                if len(self._free) < _FREE and self._on_device is None:  # else the exchange's set is that one
                    self._free.append(old)

    def live(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of all sets by kind (`live_bytes`). Called by the main thread."""
        with self._lock:
            sums = [*(self._on_device or ()), *(self._exchanged[1] if self._exchanged is not None else ())]
            sums += [tensor for free in self._free for tensor in free]
            kept = [tensor for sums_ in self._kept.values() if sums_ is not self._on_device for tensor in sums_]
        return {SUMS: sums, KEPT: kept, SERVED: [tensor for _, served in self._served for tensor in served]}


def _elsewhere(tensor: torch.Tensor) -> bool:
    """Not in host memory."""
    return tensor.device.type != "cpu"
