"""Sums of gradients over the ranks of one replica that share a stage, bucket by bucket, while backward still runs.

In: for each bucket the group over which its gradients come in summands, and word of every bucket that is final on this rank.
Out: the sums, in place, and the same word when a bucket holds them. One thread makes all sums of a rank, in the order in which
buckets are final, which is the same on all ranks of the stage; so no two ranks wait for each other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from helixrt.errors import Retryable

OnBucket = Callable[[int], None]
_JOIN_S = 5.0
_LOOK_S = 1.0


class BucketSums:
    """`begin`, the call that it returns and `drain` come from the thread that computes.

    `groups`: of each bucket; None where this rank has the whole gradient. They are for this object alone: collectives of one
    group must come in the same order on all its ranks. A bucket waits at most as long as its group's timeout. On a device
    `handed_over(bucket)` is called in the thread that computes; `ready(bucket)` has the calling thread's stream wait for what
    was queued before the bucket was handed over, or handed on. The sums are made on a stream of their own.
    """

    def __init__(
        self,
        buckets: Sequence[torch.Tensor],
        groups: Sequence[dist.ProcessGroup | None],
        handed_over: OnBucket = lambda bucket: None,
        ready: OnBucket = lambda bucket: None,
    ) -> None:
        assert len(buckets) == len(groups)
        self._buckets, self._groups, self._handed_over, self._ready = buckets, groups, handed_over, ready
        self._orders: queue.SimpleQueue[tuple[int, OnBucket] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._open = 0  # buckets that were handed over and are not done
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        if any(group is not None for group in groups):
            self._thread = threading.Thread(target=self._run, name="helixrt-reductions", daemon=True)
            self._thread.start()

    def begin(self, on_bucket: OnBucket) -> OnBucket:
        """What to call with each bucket that is final here. `on_bucket` is called when it holds the sum, from the thread of the
        sums, or at once where no bucket has one. Raises Retryable if a rank of the replica is lost."""
        self.drain()
        return on_bucket if self._thread is None else lambda bucket: self._order(bucket, on_bucket)

    def drain(self) -> None:
        """Wait until all buckets that were handed over hold their sums; on a device, have what the calling thread queues from
        now on wait for them. Raises Retryable if a rank of the replica is lost."""
        with self._changed:
            while self._open and self._broken is None:
                self._changed.wait(_LOOK_S)
            if self._broken is not None:
                raise self._broken
        if self._thread is not None:
            for bucket in range(len(self._buckets)):
                self._ready(bucket)

    def close(self) -> None:
        """End the thread, unless it waits for a rank that is lost; idempotent."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _order(self, bucket: int, on_bucket: OnBucket) -> None:
        self._handed_over(bucket)
        with self._changed:
            self._open += 1
        self._orders.put((bucket, on_bucket))

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # thread-local
        device = self._buckets[0].device
        if device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(device))
        while (order := self._orders.get()) is not None:
            try:
                self._carry_out(*order)
            except BaseException as error:  # the thread that computes raises it
                with self._changed:
                    self._broken = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _carry_out(self, bucket: int, on_bucket: OnBucket) -> None:
        group = self._groups[bucket]
        self._ready(bucket)
        if group is not None:
            try:
                dist.all_reduce(self._buckets[bucket], group=group)
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise Retryable(f"a rank of this replica is lost: {reason}") from error
        on_bucket(bucket)
