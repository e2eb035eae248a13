"""Metrics reach the driver after an outage of the store, in order; what had no room is counted."""

from __future__ import annotations

import json
import threading

import pytest

from helixrt.errors import Retryable
from helixrt.job.leader_reports import Finished, MetricsSender, lines_of, metrics_key
from helixrt.job.metrics import Notice, ValidationMetrics, read_metrics_line
from helixrt.replica.store import MemoryRunStore
from tests.waiting import until


class MoodyStore(MemoryRunStore):
    """Out of reach while `away` is set; the first call after it does what it was asked and does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.asked, self.mute = threading.Event(), 0, False

    def put_if_absent(self, key: str, value: str) -> str:
        self.asked += 1
        if self.away.is_set():
            self.mute = True
            raise Retryable("away")
        stands = super().put_if_absent(key, value)
        if self.mute:
            self.mute = False
            raise Retryable("no answer")
        return stands


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsSender, "GATHER_S", 0.0)
    monkeypatch.setattr(MetricsSender, "PAUSE_S", 0.01)
    monkeypatch.setattr(MetricsSender, "CLOSE_S", 60.0)


def parts_in(store: MoodyStore) -> list[list[str]]:
    found: list[list[str]] = []
    while (part := store.get(metrics_key(1, 0, len(found)))) is not None:
        found.append(lines_of(part))
    return found


def lines_in(store: MoodyStore) -> list[str]:
    return [line for part in parts_in(store) for line in part]


def line(step: int) -> str:
    return ValidationMetrics(1, step, 2.0, 10).to_json()


def test_lines_wait_for_a_store_that_is_away() -> None:
    store = MoodyStore()
    store.away.set()
    sender = MetricsSender(store, 1, 0, "r1.pp0")
    for step in range(5):
        sender.send(line(step))
    until(lambda: store.asked > 3)
    store.away.clear()
    sender.close()
    assert lines_in(store) == [line(step) for step in range(5)]


def test_lines_of_short_steps_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsSender, "GATHER_S", 20.0)
    store = MoodyStore()
    sender = MetricsSender(store, 1, 0, "r1.pp0")
    for step in range(300):
        sender.send(line(step))
    assert not parts_in(store)
    sender.close()
    assert [len(part) for part in parts_in(store)] == [MetricsSender.MOST, 300 - MetricsSender.MOST]
    assert lines_in(store) == [line(step) for step in range(300)]


def test_beyond_the_limit_the_oldest_are_dropped_and_counted() -> None:
    store = MoodyStore()
    store.away.set()
    sender = MetricsSender(store, 1, 0, "r1.pp0", capacity=3)
    sender.send(line(0))
    until(lambda: store.asked)  # it is on its way
    for step in range(1, 10):
        sender.send(line(step))
    store.away.clear()
    until(lambda: len(lines_in(store)) == 5)
    sender.close()
    first, told, *rest = lines_in(store)
    assert first == line(0) and rest == [line(step) for step in (7, 8, 9)]
    assert read_metrics_line(told) == Notice("r1.pp0", "6 lines of metrics were dropped while the run's store did not answer")


def test_a_store_that_stays_away_does_not_keep_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsSender, "CLOSE_S", 0.5)
    store = MoodyStore()
    store.away.set()
    sender = MetricsSender(store, 1, 0)
    sender.say("something")
    sender.close()
    assert lines_in(store) == []


def test_the_end_of_a_replica_without_its_weights_survives_the_way() -> None:
    ended = Finished(1, 12, "hash", "p", "s", unsaved="No space left on device")
    assert Finished.from_json(ended.to_json()) == ended
    assert Finished.from_json(json.dumps({k: v for k, v in ended.__dict__.items() if k != "unsaved"})).unsaved == ""
