"""The exchange of a run of one replica: its own gradients are the sums.

In: the orders that the exchange thread gets where there are other replicas. Out: the same reports, made by the main thread when
its work is done. No other replica receives or fetches these sums, so a step copies no gradient and wakes no thread.
"""

from __future__ import annotations

from helixrt.protocol.step import messages as p
from helixrt.record import Kind
from helixrt.replica.finite import finite_buckets
from helixrt.replica.rank_parts import BatchNote, RankParts, WorkOrder
from helixrt.replica.reduced_sets import ReducedSets


class OwnSums:
    """`order_work` comes from the thread that dispatches, `carry_out` from the main thread, after the work it belongs to."""

    def __init__(self, parts: RankParts, reduced: ReducedSets) -> None:
        self._parts, self._reduced = parts, reduced
        self._serial = 0  # of the newest work
        self._note = BatchNote()  # of it

    def order_work(self, step: int, position: int, schedule: str = "") -> WorkOrder:
        """The next work. Its buckets are read when it is done."""
        self._serial += 1
        order = WorkOrder(self._serial, step, position, _nobody_waits, schedule)
        self._note = order.note
        return order

    def carry_out(self, command: p.Exchange | p.Examine) -> p.RankDone | p.Examined:
        """Look whether the gradients of the finished work are finite; for an exchange they are its sums from then on."""
        parts = self._parts
        begin_s = parts.record.clock()
        buckets = list(parts.engine.buckets)
        finite = finite_buckets(parts.engine)
        if isinstance(command, p.Examine):
            return p.Examined(command.generation, parts.group_rank, finite)
        assert command.members == (parts.replica,), f"a run of one replica has no exchange with {command.members}"
        self._reduced.exchanged(command.generation, buckets)
        parts.record.write(
            Kind.EXCHANGE_BUCKET,
            begin_s=begin_s,
            generation=command.generation,
            bucket=0,
            buckets=1,
            bytes=sum(bucket.numel() * bucket.element_size() for bucket in buckets),
        )
        digests = (int(self._note.digest),) * parts.replicas
        return p.RankDone(command.generation, parts.group_rank, finite, digests, self._note.read_again)


def _nobody_waits(bucket: int) -> None:
    pass
