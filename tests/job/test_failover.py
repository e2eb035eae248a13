"""After a rail was left every leader hears of it, whoever left it, and nobody waits for the run's store."""

from __future__ import annotations

import threading

import pytest

from helixrt.errors import Retryable
from helixrt.job.failover import FailoverNews
from helixrt.record import FlightRecord, Kind
from tests.replica.stand_ins import MoodyStore
from tests.waiting import until


class Ranks:
    def __init__(self, count: int) -> None:
        self.store = MoodyStore()
        self.records = [FlightRecord(f"r{n}.pp0") for n in range(count)]
        self.news = [FailoverNews(self.store, record.rank) for record in self.records]
        for record, news in zip(self.records, self.news, strict=True):
            record.attach(news)

    def leave(self, rank: int, step: int, failure: str | None = "device", usable: int = 1) -> None:
        self.records[rank].write(Kind.RAIL_LEFT, step=step, peer=0, rail=0, failure=failure, reason="port down", usable=usable)

    def all_know(self, step: int) -> bool:
        return until(lambda: all(news.newest() == step for news in self.news))


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(3)


def close(ranks: Ranks) -> None:
    for news in ranks.news:
        news.close()
        news.close()


def test_all_learn_of_the_newest_failover_of_any(ranks: Ranks) -> None:
    assert [news.newest() for news in ranks.news] == [-1] * 3
    ranks.leave(1, 7)
    ranks.leave(2, 7)
    assert ranks.all_know(7)
    ranks.leave(0, 9)
    assert ranks.all_know(9)
    ranks.leave(2, 8)  # it lagged behind: nothing new
    ranks.leave(1, 9)
    close(ranks)
    entries = [ranks.store.get(f"failover/{k}") for k in range(4)]
    assert 2 <= sum(entry is not None for entry in entries) <= 4 and entries[0] is not None
    assert [news.newest() for news in ranks.news] == [9] * 3


def test_only_failures_that_others_made_up_for_count(ranks: Ranks) -> None:
    ranks.leave(0, 3, failure=None)  # on purpose: it was slow
    ranks.leave(1, 3, usable=0)  # the end of the link
    ranks.records[2].write(Kind.RAIL_BACK, step=3, peer=0, rail=0, usable=2)
    close(ranks)
    assert ranks.store.get("failover/0") is None


def test_a_store_that_is_away_holds_up_nobody(ranks: Ranks) -> None:
    ranks.store.away = True
    begin = threading.Thread(target=ranks.leave, args=(0, 5))
    begin.start()
    begin.join(60)
    assert not begin.is_alive(), "whoever drives the links goes on"
    with pytest.raises(Retryable):
        ranks.news[1].newest()
    ranks.store.away = False
    assert ranks.all_know(5)
    close(ranks)


def test_many_at_once_agree(ranks: Ranks) -> None:
    together = threading.Barrier(3)

    def leave(rank: int) -> None:
        together.wait(60)
        for step in range(rank, 60, 3):
            ranks.leave(rank, step)

    threads = [threading.Thread(target=leave, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ranks.all_know(59)
    close(ranks)
