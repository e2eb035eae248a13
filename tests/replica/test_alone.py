"""A run of one replica: its main thread makes the whole step, nothing is copied, and few calls go to the run's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from helixrt.errors import Departed, Fatal, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Exclusion, Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.record import Event, FlightRecord, Kind
from helixrt.replica.commands import Exit, RankReport
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.membership import SoloMembership
from helixrt.replica.rank import Done, Hooks, RankParts, RankWorker
from helixrt.replica.run_keys import ended_key
from helixrt.replica.runlog import RunLog
from helixrt.timeouts import derive
from tests.replica.stand_ins import Doubles, Gated, MoodyStore

ROOT = genesis("run", 1)


class Alone:
    """The one replica of a run, driven by the test's own thread. `bad` are positions whose gradient is not finite."""

    def __init__(self, plain_engine: Callable[..., Any], steps: int, bad: frozenset[int] = frozenset()) -> None:
        self.store, self.record = MoodyStore(), FlightRecord("r0")
        RunLog(self.store).append(0, ROOT)
        self.engine, self.bad = plain_engine(self._batch, vocab=16, seed=0), bad
        self.done: list[Done] = []
        self.end_soon = threading.Timer(0.0, lambda: None)
        self.worker = RankWorker(
            RankParts(
                0, 0, self.engine, Doubles(), Gated(), self.record, derive(20), "memory", self._report,
                Hooks(updated=self.done.append), alone=True,
            )
        )  # fmt: skip
        self.store.calls.clear()
        self.store.threads.clear()
        self.machine = StepMachine(0, 0, 1, Log([ROOT]), ROOT.hash, steps)
        hooks = LeaderHooks(lambda i, r: None, lambda c: None, self._resting, self.worker.fail)
        log, holders = RunLog(self.store), Holders(self.store, 0, 0)
        self.leader = Leader(
            self.machine, SoloMembership(0.0), log, holders, ("",), self.worker.dispatch, self.record, derive(20), hooks
        )

    def _batch(self, position: int) -> torch.Tensor:
        return torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(position))

    def _report(self, report: RankReport) -> None:
        self.leader.report(0, report)

    def _resting(self, machine: StepMachine) -> bool:
        self.worker.dispatch(Exit())
        return True

    def train(self) -> None:
        self.leader.start()
        with self.worker:
            try:
                while (order := self.worker.next_work()) is not None:
                    result = self.engine.run(order.position, order.on_bucket)
                    if order.position in self.bad:
                        self.engine.buckets[0][3] = float("nan")
                    self.worker.finish(order, result)
                    self.worker.outcome(order)
            finally:
                self.leader.close()


@pytest.fixture
def alone(plain_engine: Callable[..., Any]) -> Iterator[Callable[..., Alone]]:
    torch.set_num_threads(1)
    yield lambda *args, **settings: Alone(plain_engine, *args, **settings)


def test_it_trains_as_a_plain_loop_does_and_every_batch_is_in_the_log(
    alone: Callable[..., Alone], plain_engine: Callable[..., Any]
) -> None:
    replica = alone(20)
    replica.train()
    chain = Log(RunLog(replica.store).read_from(0)).chain()
    assert [record.positions[0] for record in chain] == list(range(21)) and len(replica.done) == 20
    plain = plain_engine(replica._batch, vocab=16, seed=0)
    for position in range(20):
        plain.run(position, lambda bucket: None)
        plain.apply(CommitRecord(position + 1, 1, "", ((0, 0),)), [bucket.clone() for bucket in plain.buckets])
    for name, tensor in plain.state().tensors.items():
        assert torch.equal(tensor, replica.engine.state().tensors[name]), name


def test_no_other_thread_takes_part_in_a_step_and_no_gradient_is_copied(alone: Callable[..., Alone]) -> None:
    """But for the records, which the store gets in the background, behind the first."""
    replica, threads, sums = alone(10), set[int](), []
    apply = replica.engine.apply
    replica.engine.apply = lambda record, reduced: (sums.append(reduced), apply(record, reduced))[1]

    def note(event: Event) -> None:
        threads.add(threading.get_ident())
        assert not any(t.name == "helixrt-exchange" for t in threading.enumerate())

    replica.record.attach(note)
    replica.train()
    ends = threading.get_ident()
    own_calls = [call for call, thread in zip(replica.store.calls, replica.store.threads, strict=True) if thread == ends]
    assert own_calls == [("get", ended_key(0, 0)), ("put_if_absent", "log/1")], "the coordination thread asks before the first"
    joins = [event for event in replica.record.events() if event.kind is Kind.QUORUM_JOIN]
    assert ends in threads and len(threads) <= 2 and len(joins) >= 10  # the join after the last step may be another thread's
    own = replica.engine.buckets[0]
    assert len(sums) == 10 and all(len(each) == 1 and each[0].data_ptr() == own.data_ptr() for each in sums)


def test_the_fence_is_read_before_records_are_put_and_the_store_is_asked_nothing_else(alone: Callable[..., Alone]) -> None:
    """The quorum of the next step follows in the same thread, and no other replica is in it."""
    replica = alone(200)
    replica.train()
    fence, calls = ("get", ended_key(0, 0)), replica.store.calls
    begin = calls.index(("put_if_absent", "log/1"))
    assert calls[:begin] == [fence, ("get", "log/1"), ("get", "log/begin"), fence], "before the first quorum, too"
    assert [key for call, key in calls if call == "put_if_absent"] == [f"log/{step}" for step in range(1, 201)]
    behind = calls[begin + 1 :]
    assert behind[0] == fence and {call for call in behind if call[0] == "get"} == {fence}
    assert 1 <= behind.count(fence) < 100, "one for those that were gathered"


def test_a_gradient_that_is_not_finite_is_left_out(alone: Callable[..., Alone]) -> None:
    replica = alone(6, bad=frozenset({2}))
    replica.train()
    chain = Log(RunLog(replica.store).read_from(0)).chain()
    assert [record.applied for record in chain[1:]] == [True, True, False, True, True, True]
    assert chain[3].excluded == {0: Exclusion(0, 0)} and replica.engine.not_applied == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in replica.engine.state().tensors.values())


def test_an_entry_that_stands_where_it_would_append_is_found_at_the_append(alone: Callable[..., Alone]) -> None:
    """A predecessor that does not know yet that it has ended may have put it; its generation is older."""
    replica, stands = alone(4), CommitRecord(1, 0, ROOT.hash, ((0, 0),), {0: 1}, "run")
    replica.leader.start()  # the quorum of the first step forms here
    RunLog(replica.store).append(1, stands)
    replica.leader.start = lambda: None  # type: ignore[method-assign]
    replica.train()
    log = Log(RunLog(replica.store).read_from(0))
    assert log.superseded() == [stands] and [record.step for record in log.chain()] == [0, 1, 2, 3, 4]
    assert [done.record for done in replica.done] == log.chain()[1:]


def test_a_replica_that_was_declared_ended_appends_nothing_more(alone: Callable[..., Alone]) -> None:
    replica = alone(100_000)

    def end(event: Event) -> None:
        if event.kind is Kind.WORK_BEGIN and event.step == 4:
            replica.store.put_if_absent(ended_key(0, 0), "yes")

    replica.record.attach(end)
    with pytest.raises(StartAgain, match="was declared ended"):
        replica.train()
    calls = replica.store.calls
    at = calls.index(("put_if_absent", ended_key(0, 0)))
    late = calls[at + 1 :]
    fences = [number for number, call in enumerate(late) if call == ("get", ended_key(0, 0))]
    assert not any(key.startswith("log/") for _, key in late[fences[0] :]), "nothing is put once the fence was read"
    assert 3 <= len(replica.done) < 10_000


@pytest.mark.system
def test_while_the_store_is_away_steps_wait_soon_and_the_loop_can_be_ended(alone: Callable[..., Alone]) -> None:
    replica = alone(100_000)

    def leave(event: Event) -> None:
        if event.kind is Kind.WORK_BEGIN and event.step == 5:
            replica.store.away = True
            replica.end_soon = threading.Timer(5.0, lambda: replica.worker.fail(Fatal("the driver is gone")))
            replica.end_soon.start()

    replica.record.attach(leave)
    begin_s = time.monotonic()
    with pytest.raises(Fatal, match="the driver is gone"):
        replica.train()
    replica.end_soon.join()
    assert time.monotonic() - begin_s < 30.0
    count = len(replica.done)
    newest_s = max(event.end_s for event in replica.record.events() if event.kind is Kind.APPLY)
    away_s = next(event.end_s for event in replica.record.events() if event.kind is Kind.WORK_BEGIN and event.step == 5)
    assert count >= 5 and newest_s - away_s < 4.0, "it goes on for about a second, more on a busy machine"


def test_a_store_that_does_not_answer_whether_to_leave_does_not_hold_up_the_loop(alone: Callable[..., Alone]) -> None:
    replica, hangs, asked = alone(100_000), threading.Event(), set[int]()

    def leaving() -> str:
        asked.add(threading.get_ident())
        if len(replica.done) > 5:
            replica.worker.fail(Fatal("the driver is gone"))
            hangs.wait(30.0)
        return ""

    replica.leader.hooks.leaving = leaving
    begin_s = time.monotonic()
    with pytest.raises(Fatal, match="the driver is gone"):
        replica.train()
    assert time.monotonic() - begin_s < 15.0 and threading.get_ident() not in asked
    hangs.set()


def test_a_replica_alone_leaves_soon_with_all_records_in_the_log(alone: Callable[..., Alone]) -> None:
    replica, left = alone(100_000), list[str]()

    def departed(machine: StepMachine, why: str) -> None:
        left.append(f"{why} after step {machine.held_step}, {len(RunLog(replica.store).read_from(0)) - 1} in the log")
        replica.worker.dispatch(Exit(why))

    replica.leader.hooks.leaving = lambda: "asked" if len(replica.done) >= 20 else ""
    replica.leader.hooks.departed = departed
    with pytest.raises(Departed, match="asked"):
        replica.train()
    step = len(replica.done)
    assert left == [f"asked after step {step}, {step} in the log"] and 20 <= step < 5000


def test_a_store_that_comes_back_gets_every_record(alone: Callable[..., Alone]) -> None:
    replica = alone(40)

    def leave(event: Event) -> None:
        if event.kind is Kind.WORK_BEGIN and event.step == 5:
            replica.store.away = True
            threading.Timer(2.0, lambda: setattr(replica.store, "away", False)).start()
        if event.kind is Kind.WORK_BEGIN and event.step > 5:
            time.sleep(0.05)

    replica.record.attach(leave)
    replica.train()
    chain = Log(RunLog(replica.store).read_from(0)).chain()
    assert [record.positions[0] for record in chain] == list(range(41)) and len(replica.done) == 40


def test_examine_is_answered_by_the_thread_that_computes(alone: Callable[..., Alone]) -> None:
    replica, reports = alone(3, bad=frozenset({0})), []
    report = replica.worker.parts.report
    object.__setattr__(replica.worker.parts, "report", lambda each: (reports.append(each), report(each))[1])
    replica.train()
    assert [type(each) for each in reports[:2]] == [p.RankDone, p.Examined]
    assert not reports[0].finite and not reports[1].finite
