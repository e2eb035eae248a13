"""The thread that sums gradients over the replicas, bucket by bucket, while backward still runs.

In: exchanges to make, and word of every bucket that is final. Out: one report for each exchange, and the sums. A bucket is
exchanged when the newest work has handed it out.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from helixrt.errors import Retryable
from helixrt.protocol.step import messages as p
from helixrt.record import Kind
from helixrt.replica.commands import RankReport
from helixrt.replica.device_streams import DeviceStreams
from helixrt.replica.fetching import Fetching
from helixrt.replica.finite import all_finite, finite_buckets
from helixrt.replica.progress import EXCHANGE
from helixrt.replica.rank_parts import BatchNote, RankParts, WorkOrder
from helixrt.replica.reduced_sets import ReducedSets

_JOIN_S = 5.0
_SOON_S = 1e-3  # of the last bucket, after the one before it


class ExchangeThread:
    """`order_work`, `order` and `abort` come from the thread that dispatches; buckets are handed out by any thread.
    `fail(error)` ends the rank."""

    def __init__(
        self,
        parts: RankParts,
        reduced: ReducedSets,
        fetching: Fetching,
        streams: DeviceStreams,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._parts, self._reduced, self._fetching, self._fail = parts, reduced, fetching, fail
        self._streams = streams
        self._orders: queue.SimpleQueue[p.Exchange | p.Examine | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="helixrt-exchange", daemon=True)
        self._lock = threading.Lock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._work_serial = 0  # of the newest work
        self._ready: set[int] = set()  # buckets that it has handed out
        self._note = BatchNote()  # of its batches
        self._aborted = -1  # newest generation that was aborted

    def start(self) -> None:
        """Begin with the first order."""
        self._thread.start()

    # ---------------------------------------------------------------- orders

    def order_work(self, step: int, position: int, schedule: str = "") -> WorkOrder:
        """From now on this work's buckets are exchanged, and no other's."""
        with self._lock:
            self._work_serial += 1
            self._ready.clear()
            self._note = BatchNote()
            on_bucket = partial(self._on_bucket, self._work_serial)
            return WorkOrder(self._work_serial, step, position, on_bucket, schedule, self._note)

    def order(self, command: p.Exchange | p.Examine) -> None:
        """Carry this out after what was ordered before."""
        self._orders.put(command)

    def abort(self, generation: int) -> None:
        """End the exchanges of this and older generations, at once; each is reported as failed."""
        with self._changed:
            self._aborted = max(self._aborted, generation)
            self._changed.notify_all()
        self._parts.exchange.abort(generation)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._orders.put(None)
        with self._changed:  # it may wait for a bucket that does not come any more
            self._aborted = sys.maxsize
            self._changed.notify_all()
        self._parts.exchange.abort()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _on_bucket(self, serial: int, index: int) -> None:
        with self._lock:
            if serial == self._work_serial:
                self._ready.add(index)
                self._changed.notify_all()

    # ---------------------------------------------------------------- its own thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # thread-local
        try:
            with self._streams.own():
                while (command := self._orders.get()) is not None:
                    self._parts.report(self._carry_out(command))  # one answer each, also when the report itself fails
        except BaseException as error:
            self._fail(error)

    def _carry_out(self, command: p.Exchange | p.Examine) -> RankReport:
        parts = self._parts
        try:
            with parts.progress.doing("exchange", EXCHANGE, parts.max_wait_s + parts.timeouts.exchange_s):
                if isinstance(command, p.Examine):
                    finite = finite_buckets(parts.engine)
                    return p.Examined(command.generation, parts.group_rank, finite)
                return self._exchange(command)
        except Retryable as error:
            suspects = error.cause.peers
            parts.record.write(Kind.EXCHANGE_FAILED, generation=command.generation, reason=str(error), suspects=list(suspects))
            return p.RankFailed(command.generation, parts.group_rank, str(error), suspects)

    def _exchange(self, command: p.Exchange) -> p.RankDone:
        """Sum all buckets, and with the last one the digests of the batches, of which each replica gives its own."""
        parts, write = self._parts, self._parts.record.write
        deadline = time.monotonic() + parts.timeouts.exchange_s + parts.timeouts.step_s
        self._check_abort(command.generation)
        if not command.contribute and parts.max_wait_s > 0:
            self._fetching.wait(parts.max_wait_s)
            self._check_abort(command.generation)  # connecting again would lose it
        begin_s = parts.record.clock()
        if command.fresh:
            prefix = f"{parts.rendezvous}/{command.generation}"
            parts.exchange.configure(command.generation, command.members, parts.replica, prefix)
        write(Kind.EXCHANGE_BEGIN, begin_s=begin_s, generation=command.generation, contribute=command.contribute)
        buckets = parts.engine.buckets
        sums, finite = self._reduced.borrow(buckets, command.contribute), True
        zeros = torch.zeros(0 if command.contribute else max((each.nbytes for each in sums), default=0), dtype=torch.uint8)
        replicas = parts.replicas
        digests, note = torch.zeros(2, 2 * replicas, dtype=torch.int64), BatchNote()  # this replica's, and all
        left = deque(reversed(range(len(buckets))))
        while left:
            done = len(buckets) - len(left)
            together = self._next_buckets(left, command, deadline)
            sources = [buckets[i] if command.contribute else zeros[: sums[i].nbytes].view(sums[i].dtype) for i in together]
            begin_s, outs = parts.record.clock(), [sums[i] for i in together]
            if not left and replicas:
                if command.contribute:
                    note = self._note
                    digests[0, parts.replica], digests[0, replicas + parts.replica] = int(note.digest), int(note.state)
                sources, outs = [*sources, digests[0]], [*outs, digests[1]]
            parts.exchange.all_reduce_together(sources, outs)
            for count, (index, source) in enumerate(zip(together, sources, strict=False), start=done):
                write(
                    Kind.EXCHANGE_BUCKET,
                    begin_s=begin_s,
                    generation=command.generation,
                    bucket=count,
                    buckets=len(buckets),
                    bytes=source.nbytes,
                )
                self._check_abort(command.generation)
                finite = finite and all_finite(parts.engine.finite_part(index, sums[index]))
                self._reduced.summed(index, sums)
        self._streams.finish()  # others take the sums, on streams of theirs
        self._reduced.exchanged(command.generation, sums)
        write(Kind.EXCHANGE_END, generation=command.generation, finite=finite)
        found = tuple(digests[1].tolist())
        batches, states = found[:replicas], found[replicas:]
        return p.RankDone(command.generation, parts.group_rank, finite, batches, note.read_again, states, note.part)

    def _next_buckets(self, left: deque[int], command: p.Exchange, deadline: float) -> list[int]:
        """Take from `left` what is exchanged next: one bucket, once it is final; and with the last but one (of three or more)
        the last, if it is final soon after. That is a small one, the engine's book, which comes when backward has just ended:
        by itself it would cost one more wait for the other replicas, which no computation overlaps."""
        together = [left.popleft()]
        if command.contribute:
            self._await_bucket(together[0], command.generation, deadline)
        before_last = len(left) == 1 and len(self._parts.engine.buckets) > 2
        if before_last and (not command.contribute or self._is_final_soon(left[0])):
            together.append(left.popleft())
        if command.contribute:
            for index in together:
                self._parts.engine.ready(index)
        return together

    def _is_final_soon(self, index: int) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: index in self._ready, _SOON_S)

    def _await_bucket(self, index: int, generation: int, deadline: float) -> None:
        with self._lock:
            while index not in self._ready:
                if self._aborted >= generation:
                    raise Retryable("aborted")
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    if (left_s := self._parts.progress.time_left_s()) > 0:
                        deadline = time.monotonic() + left_s
                        continue
                    why = f"gradient bucket {index} was not ready in time"
                    self._parts.hooks.stuck(why)
                    raise Retryable(why)

    def _check_abort(self, generation: int) -> None:
        with self._lock:
            if self._aborted >= generation:
                raise Retryable("aborted")
