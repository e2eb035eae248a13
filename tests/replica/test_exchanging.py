"""Which buckets the exchange thread sums when, and which of them together."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helixrt.protocol.step import messages as p
from helixrt.record import FlightRecord, Kind
from helixrt.replica.commands import RankReport
from helixrt.replica.contracts import Engine
from helixrt.replica.rank import RankParts, RankWorker
from helixrt.timeouts import derive
from tests.replica.stand_ins import DEADLINE_S, Doubles, Gated


class Noted(Doubles):
    """Notes the first number of each bucket of a call."""

    def __init__(self) -> None:
        self.calls: queue.Queue[list[float]] = queue.Queue()

    def all_reduce_together(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        super().all_reduce_together(sources, outs)
        self.calls.put([float(source[0]) for source in sources])


class Buckets:
    """An engine as far as the exchange needs one; bucket i holds the number i + 1."""

    def __init__(self, count: int) -> None:
        self.buckets = [torch.full((4 + i,), i + 1.0, dtype=torch.float64 if i == 0 else torch.float32) for i in range(count)]
        self.awaited: list[int] = []

    def ready(self, index: int) -> None:
        self.awaited.append(index)

    def finite_part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return values

    def state(self) -> Any:
        return SimpleNamespace(tensors={})


class OneThread:
    def __init__(self, buckets: int) -> None:
        self.engine, self.exchange, self.record = Buckets(buckets), Noted(), FlightRecord("r0")
        self.reports: queue.Queue[RankReport] = queue.Queue()
        parts = RankParts(
            0, 0, cast(Engine, self.engine), self.exchange, Gated(), self.record, derive(DEADLINE_S), "memory", self.reports.put
        )
        self.worker = RankWorker(parts)
        self.thread = self.worker.exchanging

    def call(self) -> list[float]:
        return self.exchange.calls.get(timeout=DEADLINE_S)

    def done(self) -> list[torch.Tensor]:
        """The sums, once the exchange is over."""
        assert self.reports.get(timeout=DEADLINE_S) == p.RankDone(1, 0)
        assert self.exchange.calls.empty()
        exchanged = self.worker.reduced._exchanged
        assert exchanged is not None
        return exchanged[1]


@contextmanager
def exchanging(buckets: int) -> Iterator[OneThread]:
    one = OneThread(buckets)
    one.thread.start()
    try:
        yield one
    finally:
        one.thread.close()


def order(contribute: bool = True) -> p.Exchange:
    return p.Exchange(1, (0, 1), (0, 1), contribute=contribute, fresh=True)


@pytest.mark.parametrize(("buckets", "calls"), [(1, [[1.0]]), (2, [[2.0], [1.0]]), (4, [[4.0], [3.0], [2.0, 1.0]])])
def test_the_last_of_three_or_more_buckets_goes_with_the_one_before_it(buckets: int, calls: list[list[float]]) -> None:
    with exchanging(buckets) as one:
        work = one.thread.order_work(1, 0)
        for index in reversed(range(buckets)):
            work.on_bucket(index)
        one.thread.order(order())
        assert [one.call() for _ in calls] == calls
        assert [float(each[0]) for each in one.done()] == [2.0 * (i + 1) for i in range(buckets)]
        assert one.engine.awaited == list(reversed(range(buckets)))


def test_a_bucket_does_not_wait_for_one_that_comes_late() -> None:
    with exchanging(3) as one:
        work = one.thread.order_work(1, 0)
        work.on_bucket(2)
        work.on_bucket(1)
        one.thread.order(order())
        assert [one.call(), one.call()] == [[3.0], [2.0]]
        work.on_bucket(0)
        assert one.call() == [1.0]
        assert [float(each[0]) for each in one.done()] == [2.0, 4.0, 6.0]


def test_who_contributes_nothing_sums_zeros_and_waits_for_no_bucket() -> None:
    with exchanging(3) as one:
        one.thread.order_work(1, 0)
        one.thread.order(order(contribute=False))
        assert [one.call(), one.call()] == [[0.0], [0.0, 0.0]]
        assert [float(each.abs().sum()) for each in one.done()] == [0.0, 0.0, 0.0]
        assert one.engine.awaited == []


def test_each_bucket_has_an_event_of_its_own() -> None:
    events: list[Any] = []
    with exchanging(3) as one:
        one.record.attach(events.append)
        work = one.thread.order_work(1, 0)
        for index in (2, 1, 0):
            work.on_bucket(index)
        one.thread.order(order())
        one.call(), one.call()
        one.done()
    found = [event.detail for event in events if event.kind is Kind.EXCHANGE_BUCKET]
    assert [(each["bucket"], each["buckets"], each["bytes"]) for each in found] == [(0, 3, 24), (1, 3, 20), (2, 3, 32)]


def test_closing_ends_the_wait_for_a_bucket_that_does_not_come() -> None:
    with exchanging(3) as one:
        one.thread.order_work(1, 0)
        one.thread.order(order())
        one.thread.close()
        assert isinstance(one.reports.get(timeout=DEADLINE_S), p.RankFailed) and not one.thread._thread.is_alive()
