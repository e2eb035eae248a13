"""The reduced gradient sets of one rank: each belongs to one of its threads at a time, or is kept here.

A set goes round: the exchange thread borrows it and fills it with sums; the commit keeps it under the record's lineage hash;
the main thread takes it for the update and has it served to replicas that missed the exchange; when it is two updates old
it is free again. Sets that are fetched for replay enter where the commit does.

On an accelerator there is one set, which the exchange of each step fills: its buckets are written after the next work has made
gradients, and so after the update. With it goes a set in pinned host memory, its copy, to be served: each bucket of it is
queued to be copied when it is summed, while the next one is exchanged. An exchange to which this replica does not contribute
may run before the update, and fills a set in host memory; so all that is kept or served is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from helixrt.protocol.catchup_memory import SERVED as MOST_SERVED
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import StateTransport
from helixrt.replica.live_bytes import KEPT, SERVED, SUMS, host_like
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
        self._copy: Buckets | None = None  # of that set, in host memory
        self._kept: dict[str, Buckets] = {}
        self._copies: dict[str, Buckets] = {}  # of what is kept, or taken and not served yet, on the device

    def borrow(self, like: Sequence[torch.Tensor], contribute: bool = True) -> Buckets:
        """A set of this layout for an exchange's sums; that of an exchange that was not committed is used again.
        `contribute`: this replica's gradients are in them."""
        if contribute and any(_elsewhere(bucket) for bucket in like):
            with self._lock:
                self._exchanged = None
                if self._on_device is None:
                    self._on_device = [torch.empty_like(b) for b in like]
                    self._free = [free for free in self._free if self._is_reusable(free)]
                if self._copy is None:
                    self._copy = self._free.pop() if self._free else [host_like(b) for b in like]
                return self._on_device
        with self._lock:
            if self._exchanged is not None and self._exchanged[1] is self._on_device:
                self._exchanged = None
            if self._exchanged is not None:
                spare, self._exchanged = self._exchanged[1], None
                return spare
            if self._free:
                return self._free.pop()
        return [torch.empty_like(b, device="cpu") for b in like]  # used once: pinning it would take longer than the sum

    def summed(self, index: int, sums: Buckets) -> None:
        """The calling thread has queued what sums this bucket of a borrowed set; queues its copy, where it needs one."""
        if sums is self._on_device and self._copy is not None:
            self._copy[index].copy_(sums[index], non_blocking=True)

    def exchanged(self, generation: int, sums: Buckets) -> None:
        """The exchange of this generation filled a borrowed set; what `summed` has queued is done."""
        with self._lock:
            self._exchanged = (generation, sums)

    def keep(self, record: CommitRecord) -> None:
        """The sums of the last exchange are those of this record."""
        with self._lock:
            assert self._exchanged is not None and self._exchanged[0] == record.generation
            self._kept[record.hash] = self._exchanged[1]
            if self._exchanged[1] is self._on_device and self._copy is not None:
                self._copies[record.hash], self._copy = self._copy, None
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
            self._copies.pop(lineage, None)

    def serve(self, record: CommitRecord, sums: Buckets) -> None:
        """Offer the newest two sets to other replicas; an older one is free again."""
        with self._lock:
            sums = self._copies.pop(record.hash, sums)
            assert sums is not self._on_device, "the copy of the set was forgotten before it was served"
        name = reduced_name(record.hash)
        self._transport.offer(name, dict(zip(bucket_names(sums), sums, strict=True)))
        self._served.append((name, sums))
        if len(self._served) > MOST_SERVED:
            old_name, old = self._served.pop(0)
            self._transport.withdraw(old_name)
            with self._lock:
                if len(self._free) < _FREE and self._is_reusable(old):
                    self._free.append(old)

    def _is_reusable(self, sums: Buckets) -> bool:
        """The copy of a set on a CUDA device is pinned, else each bucket of it would hold up the exchange; a set that was
        fetched, or summed while this replica was behind, is not."""
        return self._on_device is None or not self._on_device[0].is_cuda or sums[0].is_pinned()

    def live(self) -> dict[str, list[torch.Tensor]]:
        """The tensors of all sets by kind (`live_bytes`). Called by the main thread."""
        with self._lock:
            sums = [*(self._on_device or ()), *(self._exchanged[1] if self._exchanged is not None else ())]
            sums += [tensor for spare in (*self._free, self._copy or ()) for tensor in spare]
            held = [s for s in (*self._kept.values(), *self._copies.values()) if s is not self._on_device]
            kept = [tensor for sums_ in held for tensor in sums_]
        return {SUMS: sums, KEPT: kept, SERVED: [tensor for _, served in self._served for tensor in served]}


def _elsewhere(tensor: torch.Tensor) -> bool:
    """Not in host memory."""
    return tensor.device.type != "cpu"
