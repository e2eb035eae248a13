"""The leader's events: brought by any thread, handled in order and one at a time, without a thread of its own."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord
from helixrt.replica.commands import OrderPrepared, PrepareOrder
from helixrt.replica.contracts import Formed, Membership
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.membership import SoloMembership
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import derive


class Recorder:
    """A step machine that notes its events, and the threads that bring them."""

    def __init__(self, on: Callable[[Any], list[Any]] = lambda event: []) -> None:
        self.replica, self.group_world_size, self.held_step, self.attempt = 0, 1, 0, None
        self.log = Log([genesis("run", 1)])
        self.events: list[Any] = []
        self.threads: set[int] = set()
        self._on, self._inside = on, threading.Lock()

    def on(self, event: Any) -> list[Any]:
        assert self._inside.acquire(blocking=False), "two threads handle events at once"
        try:
            self.events.append(event)
            self.threads.add(threading.get_ident())
            return self._on(event)
        finally:
            self._inside.release()


def leader_of(machine: Any, broken: list[BaseException], told: list[Any], membership: Membership | None = None) -> Leader:
    store = MemoryRunStore()
    hooks = LeaderHooks(lambda index, record: None, lambda command: None, lambda machine: False, broken.append)
    return Leader(
        machine,
        membership or SoloMembership(0.0),
        RunLog(store),
        Holders(store, 0, 0),
        (),
        told.append,
        FlightRecord("r0"),
        derive(60.0, 0.0),
        hooks,
    )


def test_reports_of_many_threads_are_each_handled_once_in_their_order_and_never_two_at_a_time(seed: int) -> None:
    machine, broken, told = Recorder(), [], []
    leader = leader_of(machine, broken, told)
    leader.start()
    begin = threading.Barrier(8)

    def report(rank: int) -> None:
        chance = random.Random(seed + rank)
        begin.wait()
        for number in range(300):
            leader.report(rank, p.RankDone(number, rank, finite=chance.random() < 0.5))

    threads = [threading.Thread(target=report, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leader.close()
    numbers: dict[int, list[int]] = defaultdict(list)
    for event in machine.events:
        if isinstance(event, p.RankDone):
            numbers[event.rank].append(event.generation)
    assert numbers == {rank: list(range(300)) for rank in range(8)} and not broken
    assert isinstance(machine.events[0], p.Begin)


def test_the_thread_that_reports_also_gives_out_the_commands() -> None:
    machine, broken, told = Recorder(lambda event: [p.Work("base", 0, 1)] if isinstance(event, p.RankDone) else []), [], []
    leader = leader_of(machine, broken, told)
    leader.start()
    leader.report(0, p.RankDone(1, 0, finite=True))
    assert told == [p.Work("base", 0, 1)] and machine.threads == {threading.get_ident()}
    leader.close()


def test_an_event_that_handling_brings_is_handled_after_it() -> None:
    machine, broken, told = Recorder(), [], []
    leader = leader_of(machine, broken, told)

    def on(event: Any) -> list[Any]:
        if isinstance(event, p.RankDone) and event.generation == 1:
            leader.report(0, p.RankDone(2, 0, finite=True))
            assert machine.events[-1] is event  # the new one waits
        return []

    machine._on = on
    leader.report(0, p.RankDone(1, 0, finite=True))
    assert [event.generation for event in machine.events] == [1, 2] and not broken
    leader.close()


def test_an_error_is_told_once_and_nothing_is_handled_after_it() -> None:
    def on(event: Any) -> list[Any]:
        raise ZeroDivisionError("in the machine")

    machine, broken, told = Recorder(on), [], []
    leader = leader_of(machine, broken, told)
    for _ in range(3):
        leader.report(0, p.RankDone(1, 0, finite=True))  # never raises in the thread that reports
    assert len(machine.events) == 1 and [str(error) for error in broken] == ["in the machine"]
    leader.close()


@pytest.mark.parametrize("started", [True, False])
def test_a_closed_leader_handles_nothing(started: bool) -> None:
    machine, broken, told = Recorder(), [], []
    leader = leader_of(machine, broken, told)
    if started:
        leader.start()
    leader.close()
    leader.close()
    count = len(machine.events)
    leader.report(0, p.RankDone(1, 0, finite=True))
    assert len(machine.events) == count


def test_the_thread_that_brings_the_last_vote_appends_and_gives_out_the_update() -> None:
    """Also in a run of several replicas; only the quorum, which waits for others, has a thread of its own."""
    root = genesis("run", 1)
    record = CommitRecord(1, 1, root.hash, ((0, 0),), {0: 1}, "run")
    me = Member(0, 0, 0, root.hash)

    def on(event: Any) -> list[Any]:
        if isinstance(event, p.RankDone):
            return [p.Append(1, record)]
        return [p.Apply(record), p.Join(me)] if isinstance(event, p.Appended) else []

    machine, broken, told = Recorder(on), [], []
    several = Waits(SoloMembership(0.0))
    leader = leader_of(machine, broken, told, several)
    RunLog(leader.holders._store).append(0, root)
    leader.start()
    leader.report(0, p.RankDone(1, 0, finite=True))
    assert told == [p.Apply(record)] and leader.log.read_from(1) == [record]
    assert several.joined.wait(60) and several.thread != threading.get_ident()
    leader.close()
    assert not broken


class Waits(Membership):
    """A membership of several replicas, as far as who calls it goes."""

    def __init__(self, inner: Membership) -> None:
        self.inner, self.joined, self.thread = inner, threading.Event(), 0

    def announce(self) -> None:
        pass

    def join(self, me: Member, timeout_s: float) -> Formed:
        self.thread = threading.get_ident()
        self.joined.set()
        return self.inner.join(me, timeout_s)

    def close(self) -> None:
        pass


def test_an_order_is_taken_up_when_all_ranks_have_it_ready_and_not_when_one_cannot() -> None:
    machine, broken, told, answers = Recorder(), [], [], []
    machine.group_world_size = 2
    leader = leader_of(machine, broken, told)
    leader.hooks.prepared = lambda *answer: answers.append(answer)
    leader.start()
    leader.prepare("a")
    leader.report(0, OrderPrepared("a", 0.5))
    assert p.OrderReady("a") not in machine.events and not answers
    leader.report(1, OrderPrepared("a", 0.7))
    assert machine.events[-1] == p.OrderReady("a") and answers == [("a", 0.7, "")]
    leader.prepare("b")
    leader.report(1, OrderPrepared("b", 0.1, "no graph"))
    leader.report(0, OrderPrepared("b", 0.2))
    assert machine.events[-1] == p.OrderReady("a") and answers[-1] == ("b", 0.2, "rank 1: no graph")
    leader.prepare("a", rehearsal=True)
    taken_up = len(machine.events)
    leader.report(0, OrderPrepared("a", 0.3))
    leader.report(1, OrderPrepared("a", 0.1))
    assert answers[-1] == ("a", 0.3, "") and len(machine.events) == taken_up
    assert told == [PrepareOrder("a"), PrepareOrder("b"), PrepareOrder("a", True)] and not broken
    leader.close()


def test_votes_wait_while_ranks_make_an_order_ready_so_that_the_next_step_begins_by_it() -> None:
    machine, broken, told = Recorder(), [], []
    machine.group_world_size = 2
    leader = leader_of(machine, broken, told)
    leader.report(0, p.RankDone(1, 0))
    leader.prepare("a")
    leader.report(1, p.RankDone(1, 1))
    leader.report(0, OrderPrepared("a", 0.1))
    failed = p.RankFailed(1, 0, "gone")
    leader.report(0, failed)
    assert machine.events == [p.RankDone(1, 0), failed], "what went wrong does not wait"
    leader.report(1, OrderPrepared("a", 0.1))
    assert machine.events[2:] == [p.OrderReady("a"), p.RankDone(1, 1)]
    leader.prepare("b")
    for report in (p.RankDone(2, 0), p.RankDone(2, 1), OrderPrepared("b", 0.1), OrderPrepared("b", 0.1, "no graph")):
        leader.report(getattr(report, "rank", len(leader._prepared)), report)
    assert machine.events[4:] == [p.RankDone(2, 0), p.RankDone(2, 1)] and not broken
    leader.close()
