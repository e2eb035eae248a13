"""What a rank must not do, whatever the order in which its threads get on: one rank over stand-ins for its peers."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from helixrt.errors import Fatal, Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord
from helixrt.replica import live_bytes
from helixrt.replica.commands import Broken, Channel, Evaluate, Exit, LoadDurable, LoadedDurable, RankReport
from helixrt.replica.contracts import FetchReport, RunStore, Shard, State, layout_of
from helixrt.replica.layout_book import KEPT, LayoutBook
from helixrt.replica.rank import Hooks, RankParts, RankWorker
from helixrt.replica.state_shards import shards_of
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import derive
from tests.replica.stand_ins import DEADLINE_S, Alone, Gated
from tests.replica.test_leader import leader_of
from tests.waiting import until

ROOT = genesis("run", 2)


class OneRank:
    """A worker and what it reports; `work` is called by the engine with each position."""

    def __init__(
        self,
        plain_engine: Callable[..., object],
        transport: Gated | None = None,
        stuck: Callable[[str], None] = lambda why: None,
        evaluate: Callable[[Evaluate], None] = lambda order: None,
        load_s: float = 0.0,
        **timeouts: float,
    ) -> None:
        self.worked: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.reports: list[RankReport] = []
        self.transport = transport or Gated()
        self.error: BaseException | None = None
        self.engine = plain_engine(self._batch, vocab=16, seed=0)
        self.transport.layouts = lambda name: layout_of(shards_of(self.engine.state()))
        self.worker = RankWorker(
            RankParts(
                0, 0, self.engine, Alone(), self.transport, FlightRecord("r0"),
                dataclasses.replace(derive(20), **timeouts), "memory", lambda report: self.say(report),
                Hooks(stuck=stuck, evaluate=evaluate), load_s=load_s,
            )
        )  # fmt: skip
        self.say: Callable[[RankReport], None] = self.reports.append
        self.thread = threading.Thread(target=self._run, name="one-rank")
        self.thread.start()

    def _batch(self, position: int) -> torch.Tensor:
        self.worked.append(position)
        assert self.hold.wait(DEADLINE_S)
        return torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(position))

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.hold.set()
        self.worker.dispatch(Exit())
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def rank(plain_engine: Callable[..., object]) -> Iterator[OneRank]:
    one = OneRank(plain_engine)
    yield one
    one.end()


def donors() -> tuple[Member, ...]:
    return (Member(1, 0, 1, "x", addresses=("peer",)),)


def test_replaced_work_is_run_all_the_same_as_other_stages_may_have_begun_it(rank: OneRank) -> None:
    rank.hold.clear()
    for position in (0, 1, 2):
        rank.worker.dispatch(p.Work(ROOT.hash, position, 1))
    rank.hold.set()
    rank.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: rank.reports)
    assert rank.worked == [0, 1, 2] and rank.reports == [p.RankDone(1, 0)]
    expected = rank.engine.buckets[0]
    assert torch.equal(rank.worker.reduced.live()[live_bytes.SUMS][0], expected)


def test_a_fetch_that_was_replaced_changes_nothing(rank: OneRank) -> None:
    old, new = "a" * 32, "b" * 32
    rank.transport.gates = {f"state-{h}": threading.Event() for h in (old, new)}
    rank.worker.dispatch(p.FetchState(old, donors()))
    late = rank.worker.fetching.threads()[old]
    rank.worker.dispatch(p.FetchState(new, donors()))
    rank.transport.gates[f"state-{new}"].set()
    until(lambda: rank.reports)
    rank.transport.gates[f"state-{old}"].set()
    late.join(DEADLINE_S)
    assert rank.reports == [p.Fetched(new)]
    rank.worker.dispatch(p.Load(new))
    until(lambda: rank.worker.serving.updates_done == 1)
    assert all(torch.equal(t, torch.full_like(t, 7.0)) for t in rank.engine.state().tensors.values())


def test_a_fetch_that_was_replaced_is_given_up(rank: OneRank) -> None:
    """It has no deadline, and would hold a second state in memory."""
    old, new = "a" * 32, "b" * 32
    rank.transport.gates = {f"state-{h}": threading.Event() for h in (old, new)}
    rank.transport.progress = threading.Event()
    rank.transport.gates[f"state-{old}"].set()
    rank.worker.dispatch(p.FetchState(old, donors()))
    replaced = rank.worker.fetching.threads()[old]
    until(lambda: rank.transport.begun == [f"state-{old}"])
    rank.worker.dispatch(p.FetchState(new, donors()))
    rank.transport.progress.set()  # its next shard comes
    replaced.join(DEADLINE_S)
    assert not replaced.is_alive() and rank.reports == [] and rank.error is None
    rank.transport.gates[f"state-{new}"].set()
    until(lambda: rank.reports == [p.Fetched(new)])


class Slow(Gated):
    """A transport whose first attempts find nobody who offers, and whose last takes longer than it may be without bytes."""

    def fetch(self, name, layout, donors, stall_s, on_shard=lambda shard, donor, ok: None):  # type: ignore[no-untyped-def]
        self.begun.append(name)
        if len(self.begun) < 3:
            raise Retryable("nobody offers it")
        time.sleep(1.5 * stall_s)
        return {s.name: torch.full(s.shape, 7.0) for s in layout}, FetchReport(1, {"peer": 1})


def test_a_fetch_may_take_longer_than_a_step(plain_engine: Callable[..., object]) -> None:
    rank = OneRank(plain_engine, Slow(), stall_s=1.0)
    rank.worker.dispatch(p.FetchState("a" * 32, donors()))
    until(lambda: rank.reports)
    assert rank.reports == [p.Fetched("a" * 32)]
    rank.end()


def test_a_state_is_fetched_in_the_layout_that_its_donors_offer(rank: OneRank) -> None:
    """Its own is another one before the first step of its optimizers."""
    lineage = "b" * 32
    more = (*layout_of(shards_of(rank.engine.state())), Shard("optimizer/0/exp_avg/w", (3,), "float32", 12))
    rank.transport.layouts = lambda name: more
    rank.transport.gates[f"state-{lineage}"] = threading.Event()
    rank.transport.gates[f"state-{lineage}"].set()
    rank.worker.dispatch(p.FetchState(lineage, donors()))
    until(lambda: rank.reports == [p.Fetched(lineage)])
    assert "optimizer/0/exp_avg/w" in rank.worker.fetching.take(lineage).tensors


def test_the_store_keeps_the_newest_layouts() -> None:
    store, layout = MemoryRunStore(), (Shard("parameter/w", (4,), "float32", 16),)
    book, other = LayoutBook(store), LayoutBook(store)
    for number in range(3 * KEPT):
        book.write(f"{number % KEPT if number < 2 * KEPT else number:032}", layout)
    assert len(store._values) == KEPT
    other.check(f"{3 * KEPT - 1:032}", layout)
    with pytest.raises(Retryable, match="not agreed"):
        other.check("0" * 32, layout)


def test_a_layout_that_is_not_the_agreed_one_is_not_fetched() -> None:
    store = MemoryRunStore()
    layout = (Shard("parameter/w", (3,), "float32", 12), Shard("scalars", (7,), "uint8", 7))
    LayoutBook(store).write("a" * 32, layout)
    book = LayoutBook(store, limit_bytes=100)
    book.check("a" * 32, (layout[0], Shard("scalars", (9,), "uint8", 9)))  # scalars are of any length
    with pytest.raises(Retryable, match="in a layout that the replicas have not agreed on"):
        book.check("a" * 32, (Shard("parameter/w", (4,), "float32", 16),))
    with pytest.raises(Retryable, match="in a layout that the replicas have not agreed on"):
        book.check("b" * 32, layout)
    with pytest.raises(Retryable, match="has 4000 bytes; at most 100 are accepted"):
        book.check("a" * 32, (Shard("parameter/w", (1000,), "float32", 4000),))
    with pytest.raises(Fatal, match="has another layout here .* than on the replica that offered it first"):
        LayoutBook(store).write("a" * 32, (Shard("parameter/w", (4,), "float32", 16),))


def test_a_state_that_is_offered_again_is_not_copied_again(rank: OneRank) -> None:
    name = f"state-{ROOT.hash}"
    for _ in range(2):
        rank.worker.dispatch(p.Offer(ROOT.hash))
        until(lambda: name in rank.transport.offered and rank.worker.serving.idle)
        first = rank.transport.offered[name]
        rank.worker.dispatch(p.Offer(ROOT.hash))
        until(lambda: rank.worker.serving.idle)
        assert rank.transport.offered[name] is first
        rank.worker.dispatch(p.Withdraw(ROOT.hash))
        assert name not in rank.transport.offered


def test_a_state_that_is_withdrawn_before_its_snapshot_is_not_offered(plain_engine: Callable[..., object]) -> None:
    one = OneRank(plain_engine)
    begun, go = threading.Event(), threading.Event()
    state = one.engine.state

    def slow_state() -> State:
        begun.set()
        assert go.wait(DEADLINE_S)
        return state()

    one.engine.state = slow_state  # type: ignore[method-assign]
    one.worker.dispatch(p.Offer(ROOT.hash))
    assert begun.wait(DEADLINE_S)
    one.worker.dispatch(p.Withdraw(ROOT.hash))
    go.set()
    until(lambda: one.worker.serving.idle)
    assert one.transport.offered == {}
    one.end()


def test_no_state_is_offered_as_an_evaluation_has_changed_it(plain_engine: Callable[..., object]) -> None:
    """The user's function swaps averaged weights in and out again, past the version counters, while a replica catches up."""
    swapped, go = threading.Event(), threading.Event()

    def evaluate(order: Evaluate) -> None:
        tensors = list(shards_of(one.engine.state()).values())
        before = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            tensor.data.zero_()
        swapped.set()
        assert go.wait(DEADLINE_S)
        for tensor, was in zip(tensors, before, strict=True):
            tensor.data.copy_(was)

    one = OneRank(plain_engine, evaluate=evaluate)
    one.worker.dispatch(Evaluate(1))
    assert swapped.wait(DEADLINE_S)
    one.worker.dispatch(p.Offer(ROOT.hash))
    time.sleep(0.2)
    assert not one.transport.offered, "not before the evaluation has ended"
    go.set()
    until(lambda: one.worker.serving.idle)
    (offered,) = one.transport.offered.values()
    state = shards_of(one.engine.state())
    assert offered.keys() == state.keys() and all(torch.equal(offered[name], shard) for name, shard in state.items())
    assert any(bool(tensor.any()) for tensor in offered.values())
    one.end()
    assert one.error is None


def test_a_donor_that_evaluates_for_longer_than_a_step_offers_the_state_behind_it(plain_engine: Callable[..., object]) -> None:
    """The others commit a step without its gradient meanwhile."""
    evaluating, go = threading.Event(), threading.Event()

    def evaluate(order: Evaluate) -> None:
        evaluating.set()
        assert go.wait(DEADLINE_S)

    one = OneRank(plain_engine, evaluate=evaluate, step_s=0.1)
    behind = CommitRecord(1, 5, ROOT.hash, ((1, 0),), {}, "run", applied=False)
    one.worker.dispatch(Evaluate(1))
    assert evaluating.wait(DEADLINE_S)
    one.worker.dispatch(p.Apply(behind))
    one.worker.dispatch(p.Offer(behind.hash))
    (snapshot,) = one.worker.serving._snapshots
    assert not snapshot.done.wait(0.5) and not one.transport.offered
    go.set()
    until(lambda: one.worker.serving.idle)
    assert len(one.transport.offered) == 1
    one.end()
    assert one.error is None


def test_forgotten_reduced_buckets_are_not_kept_when_they_come(rank: OneRank) -> None:
    lineage = "c" * 32
    rank.transport.gates = {f"reduced-{lineage}": threading.Event()}
    rank.worker.dispatch(p.FetchReduced(lineage, donors()))
    late = rank.worker.fetching.threads()[lineage]
    rank.worker.dispatch(p.Forget(lineage))
    rank.transport.gates[f"reduced-{lineage}"].set()
    late.join(DEADLINE_S)
    assert rank.reports == [] and rank.worker.reduced.live()[live_bytes.KEPT] == []


def test_a_state_that_is_not_needed_any_more_is_not_fetched_to_its_end(rank: OneRank) -> None:
    lineage = "c" * 32
    rank.transport.gates = {f"state-{lineage}": threading.Event()}
    rank.transport.gates[f"state-{lineage}"].set()
    rank.transport.progress = threading.Event()  # a slow donor
    rank.worker.dispatch(p.FetchState(lineage, donors()))
    needless = rank.worker.fetching.threads()[lineage]
    until(lambda: rank.transport.begun)
    rank.worker.dispatch(p.Forget(lineage))
    rank.transport.progress.set()  # its next shard comes
    needless.join(DEADLINE_S)
    assert not needless.is_alive() and rank.reports == [] and rank.error is None and not rank.worker.fetching._states


def test_a_state_that_came_and_is_not_needed_any_more_is_not_kept(rank: OneRank) -> None:
    lineage = "c" * 32
    rank.transport.gates = {f"state-{lineage}": threading.Event()}
    rank.transport.gates[f"state-{lineage}"].set()
    rank.worker.dispatch(p.FetchState(lineage, donors()))
    until(lambda: rank.reports == [p.Fetched(lineage)])
    rank.worker.dispatch(p.Forget(lineage))
    assert not rank.worker.fetching._states


def test_a_state_is_never_offered_under_the_name_of_an_update_that_is_not_done(plain_engine: Callable[..., object]) -> None:
    one = OneRank(plain_engine)
    one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
    one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: one.reports)
    one.hold.clear()
    record = CommitRecord(1, 1, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    one.worker.dispatch(p.Work(ROOT.hash, 1, 2))  # keeps the main thread busy
    until(lambda: one.worked == [0, 1])
    one.worker.dispatch(p.Apply(record))
    one.worker.dispatch(p.Offer(record.hash))
    (snapshot,) = one.worker.serving._snapshots
    assert not snapshot.done.wait(0.3) and f"state-{record.hash}" not in one.transport.offered
    one.hold.set()
    until(lambda: one.worker.serving.idle)
    offered, state = one.transport.offered[f"state-{record.hash}"], shards_of(one.engine.state())
    assert all(torch.equal(offered[name], shard) for name, shard in state.items())
    one.end()
    assert one.error is None


def test_a_report_that_cannot_be_sent_ends_the_rank(plain_engine: Callable[..., object]) -> None:
    one = OneRank(plain_engine)

    def lost(report: RankReport) -> None:
        one.reports.append(report)
        raise Retryable("the store is gone")

    one.say = lost
    one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
    one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: not one.thread.is_alive())
    assert one.reports == [p.RankDone(1, 0)] and isinstance(one.error, Retryable)


def test_compute_that_hangs_is_told_to_who_can_end_the_process(plain_engine: Callable[..., object]) -> None:
    stuck: list[str] = []
    one = OneRank(plain_engine, stuck=stuck.append, step_s=0.1, exchange_s=0.1)
    try:
        one.hold.clear()
        one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
        one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
        until(lambda: stuck and one.reports)
        assert "not ready in time" in stuck[0]
        assert isinstance(one.reports[0], p.RankFailed)
    finally:
        one.end()


def test_gradients_of_a_main_thread_that_asked_for_more_time_are_awaited_so_long(plain_engine: Callable[..., object]) -> None:
    stuck: list[float] = []
    one = OneRank(plain_engine, stuck=lambda why: stuck.append(time.monotonic()), step_s=0.1, exchange_s=0.1)
    try:
        one.hold.clear()
        begun_s = time.monotonic()
        with one.worker.parts.progress.busy("writing files", 1.0):
            one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
            one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
            until(lambda: stuck and one.reports)
        assert stuck[0] - begun_s >= 1.0
        assert one.worker.parts.progress.time_left_s() == 0.0
    finally:
        one.end()


class FlakyStore(MemoryRunStore):
    """Does what it is asked and does not answer, every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def put_if_absent(self, key: str, value: str) -> str:
        stands = super().put_if_absent(key, value)
        self.calls += 1
        if self.calls % 2:
            raise Retryable("no answer")
        return stands


def test_a_channel_outlives_a_store_that_does_not_answer_at_times() -> None:
    store = FlakyStore()
    writer, reader = Channel(store, "x", 10), Channel(store, "x", 10)
    heard: list[object] = []
    messages = [p.RankDone(g, 0) for g in range(5)]
    for message in messages:
        writer.put(message)
    reader.follow(heard.append, lambda why: None)
    until(lambda: len(heard) == len(messages))
    reader.close()
    assert heard == messages


def test_a_command_that_cannot_be_carried_out_is_heard_of() -> None:
    store: RunStore = MemoryRunStore()
    writer, reader = Channel(store, "x", 10), Channel(store, "x", 10)
    writer.put(p.RankDone(1, 0))
    said: list[str] = []

    def take(message: object) -> None:
        raise AssertionError("cannot")

    reader.follow(take, said.append)
    until(lambda: said)
    assert "message 0 of x" in said[0] and "cannot" in said[0]
    reader.close()


def test_ranks_answers_to_an_earlier_fetch_do_not_count_for_a_later_one() -> None:
    leader = leader_of(StepMachine(0, 0, 2, Log([ROOT]), ROOT.hash, 9), [], [])
    assert leader._hear(0, p.Fetched("a")) is None
    leader._order(p.FetchState("a", ()))  # asked again
    assert leader._hear(1, p.Fetched("a")) is None
    assert leader._hear(0, p.Fetched("a")) == p.Fetched("a")
    assert leader._hear(0, p.Fetched("b")) is None
    assert leader._hear(1, p.FetchFailed("b", "lost")) == p.FetchFailed("b", "lost")
    assert leader._hear(1, p.Fetched("b")) is None


def test_a_rank_reports_what_its_threads_do_and_that_it_has_been_through_a_step(rank: OneRank) -> None:
    report = rank.worker.parts.progress.report
    assert report().threads == () and not report().committed
    rank.hold.clear()
    rank.worker.dispatch(p.Work(ROOT.hash, 6, 1))
    rank.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: rank.worked and len(report().threads) == 2)
    said = report()
    assert {t.thread: t.doing for t in said.threads} == {"main": "work", "exchange": "exchange"}
    rank.hold.set()
    until(lambda: rank.reports)
    until(lambda: report().threads == ())
    rank.worker.dispatch(p.Apply(CommitRecord(1, 1, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")))
    until(lambda: report().committed)


def test_a_rank_of_the_replica_that_is_broken_is_no_failure_of_its_leader() -> None:
    leader = leader_of(StepMachine(0, 0, 2, Log([ROOT]), ROOT.hash, 9), [], [])
    with pytest.raises(StartAgain):
        leader._hear(1, Broken("out of memory"))


def test_durable_state_is_loaded_in_place_but_the_initial_parameters_only_before_any_update(
    plain_engine: Callable[..., object],
) -> None:
    one = OneRank(plain_engine)
    asked: list[tuple[str, bool]] = []
    one.worker.parts.hooks.load = lambda lineage, initial: not asked.append((lineage, initial)) and lineage != "deleted"
    for lineage, initial in (("deleted", False), (ROOT.hash, True), ("saved", False)):
        one.worker.dispatch(LoadDurable(lineage, initial))
    until(lambda: len(one.reports) == 3)
    assert one.reports == [
        LoadedDurable("deleted", False), LoadedDurable(ROOT.hash, True), LoadedDurable("saved", True),
    ]  # fmt: skip
    one.worker.dispatch(LoadDurable(ROOT.hash, True))  # its parameters are those of a checkpoint now
    one.end()
    assert isinstance(one.error, StartAgain) and asked[-1] == ("saved", False)


@pytest.mark.parametrize(("load_s", "limit_s"), [(3600.0, 3600.0), (5.0, 180.0)])
def test_reading_a_checkpoint_may_take_as_long_as_writing_one(
    load_s: float, limit_s: float, plain_engine: Callable[..., object]
) -> None:
    """And no less than an evaluation may."""
    one = OneRank(plain_engine, load_s=load_s, evaluate_s=180.0)
    asked: list[tuple[str, float]] = []

    def load(lineage: str, initial: bool) -> bool:
        asked.extend((thread.thread, thread.limit_s) for thread in one.worker.parts.progress.report().threads)
        return True

    one.worker.parts.hooks.load = load
    one.worker.dispatch(LoadDurable("saved", False))
    until(lambda: one.reports)
    one.end()
    assert asked == [("main", limit_s)]
