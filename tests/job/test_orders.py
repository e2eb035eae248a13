"""Orders of a schedule in a job: kept under their hash, planned beside the training, made ready by all ranks or by none."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.job import order_adapter
from helixrt.job.order_adapter import OrderAdapter
from helixrt.job.order_planner import OrderPlanner
from helixrt.job.orders import OrderBook, RankOrders
from helixrt.observe.estimates import Estimate, LinkEstimate, MeasuredCosts
from helixrt.record import Event, FlightRecord, Kind
from helixrt.replica.store import MemoryRunStore
from helixrt.schedule.adaptation.judge import Answer, CostEstimate, Question, judge
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Entry, Op, Operation, Schedule
from tests.waiting import until

ZB = build("zb", 4, 12)
DEADLINE_S = 60.0
JUDGED_S = 5.0  # for the adapter to look at a step's costs; a step that a report came before is not looked at


class NoGraphs:
    """An engine that notes what it is asked for; `refused` orders cannot be made ready."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.prepared, self.refused = schedule, list[Schedule](), set[str]()

    def prepare_schedule(self, schedule: Schedule, again: bool = False) -> None:
        if order_key(schedule) in self.refused:
            raise ConfigError("stages.graphs", "never", "no graph")
        self.prepared.append(schedule)

    def use_schedule(self, schedule: Schedule) -> None:
        if schedule.microbatches != self.schedule.microbatches:
            raise ValueError("is for other micro-batches")
        self.schedule = schedule


def second_first(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The same with the first two micro-batches' operations exchanged."""
    other = {0: 1, 1: 0}
    return tuple(replace(e, microbatch=other.get(e.microbatch, e.microbatch)) for e in entries if isinstance(e, Operation))


def orders_of(engine: NoGraphs, folder: Path, store: MemoryRunStore | None = None) -> RankOrders:
    return RankOrders(engine, OrderBook(store or MemoryRunStore(), folder))  # type: ignore[arg-type]


def test_an_order_is_found_by_its_hash_in_the_store_and_after_a_resume_in_the_folder(tmp_path: Path) -> None:
    store, made = MemoryRunStore(), build("1f1b", 4, 12)
    key = OrderBook(store, tmp_path).put(made)
    assert key == order_key(made)
    elsewhere, fresh = OrderBook(store, tmp_path / "other machine"), MemoryRunStore()
    assert elsewhere.get(key).entries == made.entries
    assert OrderBook(fresh, tmp_path).get(key).entries == made.entries
    assert OrderBook(fresh, tmp_path / "other machine").get(key).entries == made.entries  # the first one put it back
    with pytest.raises(ConfigError, match="is neither in the run's store nor in"):
        elsewhere.get("0" * 16)
    (tmp_path / "schedules" / f"{key}.json").write_text("{}")
    with pytest.raises(ConfigError, match="was changed; delete the file"):
        OrderBook(MemoryRunStore(), tmp_path).get(key)


def test_a_rank_uses_the_order_that_it_is_told_and_the_first_one_again(tmp_path: Path) -> None:
    engine, made = NoGraphs(ZB), build("1f1b", 4, 12)
    orders = orders_of(engine, tmp_path)
    key = orders.book.put(made)
    orders.prepare(key)
    assert engine.schedule is ZB and engine.prepared[0].entries == made.entries
    orders.use(key)
    assert engine.schedule.entries == made.entries and orders.fits(key) == ""
    orders.use("")
    assert engine.schedule is ZB
    other = orders.book.put(build("zb", 4, 8))
    swapped = orders.book.put(replace(made, entries=(*made.entries[:3], second_first(made.entries[3]))))
    assert "stage 3 runs F(chunk 3, micro-batch 1) before F(chunk 3, micro-batch 0)" in orders.fits(swapped)
    assert "8 micro-batches" in orders.fits(other) and "neither in the run's store" in orders.fits("0" * 16)
    with pytest.raises(ConfigError, match="cannot be used by this rank: is for other micro-batches"):
        orders.use(other)


def test_the_planner_answers_in_a_process_of_its_own_as_the_same_question_is_answered_here() -> None:
    costs = uniform(4, 10.0, 10.0, 10.0)
    slow = CostEstimate(with_delays(costs, {(1, 2): 60.0, (2, 1): 60.0}), uniform(4, 0.0, 0.0, 0.0))
    question = Question(slow, ZB)
    planner = OrderPlanner(DEADLINE_S)
    try:
        assert planner.ask(question) == judge(question)
        broken = Question(slow, ZB, least_gain=-1.0)
        assert planner.ask(broken) == "least_gain=-1.0: must be at least 0"
        assert isinstance(planner.ask(question), Answer)
    finally:
        planner.close()
    assert planner.ask(question) is None


def test_a_planner_that_does_not_answer_in_time_is_ended_and_the_next_question_has_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import helixrt.job.order_planner as module

    question = Question(CostEstimate(uniform(4), uniform(4, 0.0, 0.0, 0.0)), ZB)
    planner = OrderPlanner(0.2)
    with monkeypatch.context() as silent:
        silent.setattr(module.sys, "executable", "/bin/cat")  # ends at once: it knows no -m
        assert "has ended, or has not answered" in str(planner.ask(question))

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no resources")

    with monkeypatch.context() as full:
        full.setattr(module.subprocess, "Popen", refused)
        assert "cannot be started" in str(planner.ask(question)), "an answer, and no end of the rank"
    planner = OrderPlanner(DEADLINE_S)
    assert isinstance(planner.ask(question), Answer)
    planner.close()


def measured(step: int, delay_ms: float) -> MeasuredCosts:
    """Of four stages, whose middle link has this delay."""
    ten, free = Estimate(10.0, 0.1, 12), LinkEstimate(Estimate(0.0, 0.01, 12))
    links = {way: free for a in range(3) for way in ((a, a + 1), (a + 1, a))}
    slow = LinkEstimate(Estimate(delay_ms, 0.1, 12))
    links |= {(1, 2): slow, (2, 1): slow}
    operations = {(op, chunk): ten for op in (Op.F, Op.B, Op.W) for chunk in range(4)}
    return MeasuredCosts((0, 1, 2, 3), 12, operations, {}, links, step)


@dataclass
class Replica:
    """A leader whose ranks answer as the test says."""

    engine: NoGraphs
    orders: RankOrders
    record: FlightRecord
    adapter: OrderAdapter = None  # type: ignore[assignment]
    news: MeasuredCosts | None = None
    asked: queue.Queue[str] = field(default_factory=queue.Queue)
    rehearsals: list[str] = field(default_factory=list)
    rehearsal_s: float = 0.01
    said: list[str] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    step: int = 0
    ranks: tuple[str, ...] = ("r0",)
    judged: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def steps(self, count: int, delay_ms: float) -> None:
        for _ in range(count):
            self.step += 1
            self.adapter.step_done(self.step)
            self.news = measured(self.step, delay_ms)
            for rank in self.ranks:
                self.adapter.measured(rank, self.step)
            self.judged.acquire(timeout=JUDGED_S)  # else the adapter might see nothing but the costs of a later step

    def prepare(self, order: str, rehearsal: bool) -> None:
        if rehearsal:
            self.rehearsals.append(order)
            self.adapter.prepared(order, self.rehearsal_s, "")
        else:
            self.asked.put(order)

    def estimates(self) -> MeasuredCosts | None:
        news = self.news
        self.judged.release()
        return news

    def switch(self, delay_ms: float, failed: str = "") -> str:
        """The order that comes of these measurements; the ranks answer."""
        for _ in range(100):
            self.steps(1, delay_ms)
            try:
                order = self.asked.get(timeout=0.5)
            except queue.Empty:
                continue
            self.answer(order, failed)
            self.steps(1, delay_ms)
            return order
        raise AssertionError(f"no switch; {self.said}, {self.errors}, {kinds(self.record)}")

    def answer(self, order: str, failed: str) -> None:
        heard = self.ready()
        self.adapter.prepared(order, 0.01, failed)
        until(lambda: self.ready() > heard, "an order that is ready")

    def ready(self) -> int:
        return sum(event.kind is Kind.ORDER_READY for event in kinds(self.record))


def kinds(record: FlightRecord) -> list[Event]:
    return [e for e in record.events() if e.kind in (Kind.REPLAN, Kind.ORDER, Kind.ORDER_READY, Kind.ORDER_GAIN)]


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []
    monkeypatch.setattr(order_adapter, "_REST", 0)  # every step is judged
    monkeypatch.setattr(order_adapter, "CALM_S", 0.0)

    def make(in_use: str = "", ranks: tuple[str, ...] = ("r0",), **rules: Any) -> Replica:
        engine = NoGraphs(ZB)
        found = Replica(engine, orders_of(engine, tmp_path), FlightRecord("r0"), ranks=ranks)
        found.adapter = OrderAdapter(
            found.orders,
            Adaptation(**rules),
            0,
            len(ranks),
            lambda: in_use,
            found.estimates,
            found.prepare,
            found.record,
            found.said.append,
            found.errors.append,
        )
        found.adapter.start()
        made.append(found)
        return found

    yield make
    for each in made:
        each.adapter.close()
        assert not each.errors


def test_a_slow_link_changes_the_order_of_a_replica_and_its_end_takes_the_first_one_up_again(
    replica: Callable[..., Replica],
) -> None:
    found = replica()
    found.steps(3, 0.0)
    key = found.switch(60.0)
    assert found.orders.schedule(key).placement == ZB.placement and len(key) == 16
    found.steps(8, 60.0)
    assert found.switch(0.0) == ""  # the first one has no other name
    events = kinds(found.record)
    (away, back) = [e.detail for e in events if e.kind is Kind.ORDER]
    assert (away["order"], away["before"], back["order"]) == (key, order_key(ZB), order_key(ZB))
    assert away["present_ms"] == 790.0 and away["predicted_ms"] == 450.0
    gain = next(e.detail for e in events if e.kind is Kind.ORDER_GAIN)
    assert gain["order"] == key and gain["predicted_ms"] == 340.0 and gain["before_ms"] > 0 and gain["after_ms"] >= 0
    assert [e.detail["failed"] for e in events if e.kind is Kind.ORDER_READY] == ["", ""]
    assert f"the schedule's order becomes {key}" in found.said[0]


@pytest.mark.system
def test_the_gain_compares_steps_under_the_costs_that_the_order_was_changed_for(replica: Callable[..., Replica]) -> None:
    """The order changes soon after a link has become slow: of the steps before, most were fast."""
    found, now = replica(), [100.0]
    found.record.clock = lambda: now[0]

    def steps(count: int, delay_ms: float, took_s: float, changed_at: int | None = None) -> None:
        for _ in range(count):
            now[0] += took_s
            found.adapter.measured("r0", found.step, changed_at)
            found.steps(1, delay_ms)

    steps(6, 0.0, 0.5)
    steps(1, 60.0, 0.9)
    asked = False
    for _ in range(3):  # more slow steps would hide what is tested
        steps(1, 60.0, 0.9, changed_at=7)
        until_s = time.monotonic() + 1.0
        while not asked and time.monotonic() < until_s:
            asked = any(event.kind is Kind.REPLAN for event in kinds(found.record))
            time.sleep(0.01)
        if asked:
            break
    key = found.asked.get(timeout=DEADLINE_S)
    found.adapter.prepared(key, 0.01, "")
    steps(8, 60.0, 0.6)
    found.adapter.close()
    (gain,) = [e.detail for e in found.record.events() if e.kind is Kind.ORDER_GAIN]
    assert gain["order"] == key != ""
    assert gain["before_ms"] == pytest.approx(900.0) and gain["after_ms"] == pytest.approx(600.0)


@pytest.mark.parametrize(("rehearsal_s", "pays"), [(0.01, True), (1e4, False)])
def test_what_a_switch_costs_is_known_from_a_rehearsal_before_the_first_judgement(
    replica: Callable[..., Replica], rehearsal_s: float, pays: bool
) -> None:
    found = replica()
    found.rehearsal_s = rehearsal_s
    found.steps(4, 0.0)
    for _ in range(5):
        found.steps(1, 60.0)
    found.adapter.close()
    assert found.rehearsals == [""] and found.asked.empty() is not pays
    (event,) = [e.detail for e in found.record.events() if e.kind is Kind.ORDER_REHEARSED]
    assert event == {"seconds": rehearsal_s, "failed": ""}


def test_an_order_that_a_rank_cannot_run_is_not_used_and_training_goes_on(replica: Callable[..., Replica]) -> None:
    found = replica()
    found.steps(3, 0.0)
    key = found.switch(60.0, failed="rank 2: no graph")
    found.steps(3, 60.0)
    assert found.said[-1] == f"the order {key} of the schedule is not used: rank 2: no graph"


def test_a_replica_that_starts_again_judges_from_its_order(replica: Callable[..., Replica], tmp_path: Path) -> None:
    gpipe = build("gpipe", 4, 12)
    key = OrderBook(MemoryRunStore(), tmp_path).put(gpipe)
    found = replica(in_use=key)
    assert found.switch(0.0) == ""
    (event,) = [e.detail for e in kinds(found.record) if e.kind is Kind.ORDER]
    assert event["before"] == key and event["order"] == order_key(ZB)


def test_costs_are_judged_when_the_last_rank_has_measured_a_step_whoever_that_is(replica: Callable[..., Replica]) -> None:
    """A rank that came before the others in one step, and comes behind them in the next, is not waited for once more."""
    found = replica(ranks=("r0.pp0", "r0.pp1"))
    judged: list[int] = []

    def estimates() -> None:
        judged.append(found.adapter._judged)

    found.adapter._estimates = estimates
    for rank, step in (("pp0", 1), ("pp1", 1), ("pp1", 2), ("pp0", 2), ("pp0", 3), ("pp0", 4), ("pp1", 4), ("pp1", 5)):
        found.adapter.measured(f"r0.{rank}", step)
    found.adapter.close()
    assert judged == [1, 2, 4]


def test_while_costs_stay_they_are_judged_now_and_then_and_at_once_when_one_has_changed(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_adapter, "CALM_S", DEADLINE_S)
    found = replica()
    judged: list[int] = []

    def estimates() -> None:
        judged.append(found.adapter._judged)

    found.adapter._estimates = estimates
    for step in range(1, 9):
        found.adapter.measured("r0", step, changed_at=step if step in (4, 5) else None)
    found.adapter.close()
    assert judged == [1, 4, 5]
