"""A rank whose own thread computes: orders, their ends and their fates, over stand-ins for its peers."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Iterator

import pytest
import torch

from helixrt.errors import ConfigError, Fatal
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.record import FlightRecord
from helixrt.replica.commands import Evaluate, Exit, OrderPrepared, PrepareOrder, RankReport
from helixrt.replica.rank import Hooks, RankParts, RankWorker
from helixrt.timeouts import derive
from tests.replica.stand_ins import DEADLINE_S, Doubles, Gated

ROOT = genesis("run", 2)


class Driven:
    """A worker that the test's own thread drives."""

    def __init__(self, plain_engine: Callable[..., object]) -> None:
        self.reports: queue.Queue[RankReport] = queue.Queue()
        self.evaluated: list[Evaluate] = []
        self.engine = plain_engine(batch, vocab=16, seed=0)
        self.worker = RankWorker(
            RankParts(
                0, 0, self.engine, Doubles(), Gated(), FlightRecord("r0"), derive(DEADLINE_S), "memory", self.reports.put,
                Hooks(evaluate=self.evaluated.append),
            )
        )  # fmt: skip

    def tell(self, *commands: object) -> None:
        for command in commands:
            self.worker.dispatch(command)

    def work(self) -> object:
        """The next order, worked on and finished."""
        order = self.worker.next_work()
        assert order is not None
        self.worker.finish(order, self.engine.run(order.position, order.on_bucket))
        return order

    def exchanged(self, generation: int) -> None:
        self.tell(p.Exchange(generation, (0, 1), (0, 1), contribute=True, fresh=True))
        assert self.reports.get(timeout=DEADLINE_S) == p.RankDone(generation, 0)


def batch(position: int) -> torch.Tensor:
    return torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(position))


@pytest.fixture
def rank(plain_engine: Callable[..., object]) -> Iterator[Driven]:
    driven = Driven(plain_engine)
    with driven.worker:
        yield driven


FIRST = CommitRecord(1, 1, ROOT.hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")


def test_the_outcome_of_an_order_is_its_update(rank: Driven, plain_engine: Callable[..., object]) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    assert (order.step, order.position) == (1, 0)
    rank.exchanged(1)
    rank.tell(Evaluate(3), p.Apply(FIRST))
    done = rank.worker.outcome(order)
    assert done is not None and done.record is FIRST and done.update is not None and done.work is not None
    assert rank.evaluated == [Evaluate(3)]  # commands are carried out in their order on the way
    alone = plain_engine(batch, vocab=16, seed=0)
    alone.run(0, lambda bucket: None)
    alone.apply(dataclasses.replace(FIRST, contributors=((0, 0),)), alone.buckets)  # twice the sum, divided by two
    pairs = zip(rank.engine.state().tensors.values(), alone.state().tensors.values(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    rank.tell(Exit())
    assert rank.worker.next_work() is None
    assert rank.worker.next_work() is None  # however often it is asked


def test_a_dropped_order_has_no_outcome_and_the_next_one_is_not_lost(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    dropped = rank.work()
    rank.tell(p.Work("b" * 32, 0, 2))  # another base was agreed: the same batch again
    assert rank.worker.outcome(dropped) is None
    again = rank.work()
    assert (again.step, again.position) == (2, 0) and again is not dropped
    rank.exchanged(2)
    rank.tell(p.Apply(dataclasses.replace(FIRST, step=2, generation=2)))
    done = rank.worker.outcome(again)
    assert done is not None and done.record.step == 2


def test_a_rank_takes_up_an_order_of_its_schedule_with_the_work_that_names_it(rank: Driven) -> None:
    used: list[str] = []

    def prepare(order: str, again: bool) -> None:
        if order == "bad":
            raise ConfigError("schedule order", order, "is for others")
        used.append(f"ready {order}")

    hooks = dataclasses.replace(rank.worker.parts.hooks, prepare_order=prepare, use_order=used.append)
    object.__setattr__(rank.worker.parts, "hooks", hooks)
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    rank.exchanged(1)
    rank.tell(PrepareOrder("a"), PrepareOrder("bad"), p.Apply(FIRST))
    rank.tell(p.Work(FIRST.hash, 1, 2, "a"), p.Work("b" * 32, 1, 2, "a"))
    assert rank.worker.outcome(order) is not None
    fine, bad = rank.reports.get(timeout=DEADLINE_S), rank.reports.get(timeout=DEADLINE_S)
    assert isinstance(fine, OrderPrepared) and (fine.order, fine.failed) == ("a", "")
    assert isinstance(bad, OrderPrepared) and bad.failed == "schedule order=bad: is for others"
    assert used == ["ready a"]  # not used before the work that names it
    assert [rank.work().schedule, rank.work().schedule] == ["a", "a"]
    assert used == ["ready a", "a"]
    rank.tell(p.Work("c" * 32, 1, 2))
    rank.work()
    assert used == ["ready a", "a", ""]  # back to the first one


def test_an_engine_without_a_schedule_refuses_orders(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1, "a"))
    with pytest.raises(Fatal, match="must work by the order a of a schedule, and its engine has no orders"):
        rank.worker.next_work()


def test_an_update_without_this_replica_is_no_outcome(rank: Driven) -> None:
    """Its gradient was found not finite, say: the record takes its batch out, and it works on the next one."""
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    rank.exchanged(1)
    rank.tell(p.Apply(dataclasses.replace(FIRST, contributors=((1, 0),))), p.Work("c" * 32, 1, 2))
    assert rank.worker.outcome(order) is None
    following = rank.worker.next_work()
    assert following is not None and following.position == 1


def test_the_end_of_a_run_ends_the_wait_for_an_outcome(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    rank.tell(Exit())
    assert rank.worker.outcome(order) is None
    assert rank.worker.next_work() is None


def test_an_engine_hears_of_a_record_that_is_not_applied(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    before = {name: tensor.clone() for name, tensor in rank.engine.state().tensors.items()}
    rank.tell(p.Apply(dataclasses.replace(FIRST, applied=False)))
    done = rank.worker.outcome(order)
    assert rank.engine.not_applied == 1
    assert done is not None and done.update is None and done.work is not None
    assert all(torch.equal(tensor, before[name]) for name, tensor in rank.engine.state().tensors.items())


def test_an_error_reaches_who_waits_for_an_outcome(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    order = rank.work()
    rank.worker.fail(Fatal("the store is gone"))
    with pytest.raises(Fatal, match="the store is gone"):
        rank.worker.outcome(order)


def test_buckets_of_a_replaced_order_do_not_count(rank: Driven) -> None:
    rank.tell(p.Work(ROOT.hash, 0, 1))
    old = rank.worker.next_work()
    assert old is not None
    rank.tell(p.Work("b" * 32, 0, 2), p.Exchange(2, (0, 1), (0, 1), contribute=True, fresh=True))
    rank.worker.finish(old, rank.engine.run(0, old.on_bucket))
    assert rank.worker.outcome(old) is None
    with pytest.raises(queue.Empty):
        rank.reports.get(timeout=0.3)
    rank.work()
    assert rank.reports.get(timeout=DEADLINE_S) == p.RankDone(2, 0)
