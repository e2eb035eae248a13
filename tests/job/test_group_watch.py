"""A rank ends when another rank of its replica has, or when its incarnation has: in good order, else with its process."""

from __future__ import annotations

import json
import threading

import pytest

from helixrt.errors import Retryable, StartAgain
from helixrt.job import group_watch
from helixrt.job.group_watch import GroupWatch
from helixrt.job.leaving import LEAVE_S
from helixrt.job.policies import FATAL_EXIT, LEFT_EXIT, RELOAD_EXIT
from helixrt.replica.run_keys import EXIT_KEY, ended_key, exit_key, leave_key
from helixrt.replica.store import MemoryRunStore
from tests.replica.stand_ins import MoodyStore

LIFE = (3, 5)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watch(store: MemoryRunStore, clock: Clock, ranks: int = 3) -> GroupWatch:
    return GroupWatch(store, LIFE, 1, ranks, end=lambda error: None, clock=clock)


def test_another_rank_that_failed_is_named() -> None:
    store, clock = MemoryRunStore(), Clock()
    store.put_if_absent(exit_key(*LIFE, 0), json.dumps({"code": 0, "why": ""}))
    store.put_if_absent(exit_key(*LIFE, 1), json.dumps({"code": 70, "why": "its own"}))
    store.put_if_absent(exit_key(3, 4, 2), json.dumps({"code": 70, "why": "of the incarnation before"}))
    assert watch(store, clock).look() == ""
    store.put_if_absent(exit_key(*LIFE, 2), json.dumps({"code": 70, "why": "ValueError: bad"}))
    assert watch(store, clock).look() == "rank 2 of this replica has ended: ValueError: bad"


def test_an_incarnation_that_was_ended_ends_unless_it_leaves_or_the_run_is_over() -> None:
    store, clock = MemoryRunStore(), Clock()
    store.put_if_absent(ended_key(*LIFE), "yes")
    assert watch(store, clock).look() == "this incarnation of the replica has ended"
    store.put_if_absent(leave_key(*LIFE), "SIGTERM to r3.pp0")
    store.put_if_absent(exit_key(*LIFE, 0), json.dumps({"code": LEFT_EXIT, "why": "left"}))
    leaving = watch(store, clock)
    assert leaving.look() == "", "it may save its state first"
    clock.now_s += LEAVE_S - 1
    assert leaving.look() == ""
    clock.now_s += 1
    assert leaving.look() == "rank 0 of this replica has ended: left"
    store.put_if_absent(EXIT_KEY, "ok")
    assert leaving.look() == ""


@pytest.mark.parametrize("word", ["ended", "exit"])
def test_a_departure_counts_from_when_the_replica_has_left_and_not_from_when_it_was_asked_to(word: str) -> None:
    """Its newest batch may take long, and be computed to its end first. The leader's word that it has ended may be missing."""
    store, clock = MemoryRunStore(), Clock()
    store.put_if_absent(leave_key(*LIFE), "SIGTERM to r3.pp0")
    leaving = watch(store, clock)
    assert leaving.look() == ""
    clock.now_s = 1000.0
    if word == "ended":
        store.put_if_absent(ended_key(*LIFE), "yes")
    else:
        store.put_if_absent(exit_key(*LIFE, 0), json.dumps({"code": LEFT_EXIT, "why": "left"}))
    assert leaving.look() == ""
    clock.now_s += LEAVE_S - 1
    assert leaving.look() == ""
    clock.now_s += 1
    assert leaving.look() != ""


def test_a_rank_that_fails_before_its_replica_has_left_takes_the_others_with_it() -> None:
    store, clock = MemoryRunStore(), Clock()
    store.put_if_absent(leave_key(*LIFE), "SIGTERM to r3.pp0")
    store.put_if_absent(exit_key(*LIFE, 0), json.dumps({"code": FATAL_EXIT, "why": "out of memory"}))
    assert watch(store, clock).look() == "rank 0 of this replica has ended: out of memory"


@pytest.mark.parametrize("ends", [True, False])
def test_a_main_thread_that_does_not_end_is_ended_with_its_process(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(group_watch, "GRACE_S", 30.0 if ends else 0.05)
    store, told, left = MemoryRunStore(), list[BaseException](), list[int]()
    failed, gone = threading.Event(), threading.Event()

    def end(error: BaseException) -> None:
        told.append(error)
        failed.set()

    def leave(code: int) -> None:
        left.append(code)
        gone.set()

    with GroupWatch(store, LIFE, 0, 2, end, leave):
        store.put_if_absent(ended_key(*LIFE), "yes")
        assert failed.wait(60)
        if not ends:
            assert gone.wait(60)
    assert isinstance(told[0], StartAgain) and left == ([] if ends else [RELOAD_EXIT])
    said = store.get(exit_key(*LIFE, 0))
    assert said is None if ends else said is not None and json.loads(said)["code"] == RELOAD_EXIT


def test_a_replica_of_one_rank_is_not_ended_by_the_watch_of_its_group() -> None:
    """It sees at its quorums that it has ended, and may save its state before."""
    store, clock = MemoryRunStore(), Clock()
    store.put_if_absent(ended_key(*LIFE), "yes")
    assert GroupWatch(store, LIFE, 0, 1, end=pytest.fail, clock=clock).look() == ""


def test_a_rank_whose_server_stays_away_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_watch, "LOOK_S", 0.01)
    ended: list[BaseException] = []
    said = threading.Event()

    def end(error: BaseException) -> None:
        ended.append(error)
        said.set()

    store = MoodyStore("the run's store at h:1 cannot be reached")
    store.away = True
    with GroupWatch(store, LIFE, 0, 1, end, leave=pytest.fail, away_s=0.1):
        assert said.wait(30.0)
    (error,) = ended
    assert isinstance(error, Retryable) and "the run's store at h:1 cannot be reached; it has been away for 0.1 s" in str(error)
