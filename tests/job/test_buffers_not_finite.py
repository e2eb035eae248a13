"""Buffers with infinities and NaN in a session whose rank and leader are a job's own, in one process: no gradient is blamed."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.job.session_host import Plan
from helixrt.job.step import Worker
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.record import FlightRecord
from helixrt.replica.commands import Exit, RankReport
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.membership import SoloMembership
from helixrt.replica.rank import Hooks, RankParts, RankWorker
from helixrt.replica.runlog import RunLog
from helixrt.timeouts import derive
from tests.job.session_world import LocalHost, batches, session_with, summed
from tests.replica.stand_ins import Doubles, Gated

STEPS = 12  # more than a replica may have gradients that are not finite


class JobHost(LocalHost):
    """The one replica of a run, with the worker and the leader that a job has."""

    def open(self, engine: ModuleEngine, plan: Plan) -> Worker:
        root = genesis("run", 1)
        RunLog(self.store).append(0, root)
        record, timeouts = FlightRecord("r0"), derive(20)
        self.rank = RankWorker(
            RankParts(
                0, 0, engine, Doubles(), Gated(), record, timeouts, "memory", lambda report: self.leader.report(0, report),
                Hooks(), alone=True,
            )
        )  # fmt: skip
        self.machine = StepMachine(0, 0, 1, Log([root]), root.hash, plan.until)
        hooks = LeaderHooks(lambda i, r: None, lambda c: None, self._resting, self.rank.fail)
        log, holders = RunLog(self.store), Holders(self.store, 0, 0)
        self.leader = Leader(
            self.machine, SoloMembership(0.0), log, holders, ("",), self.rank.dispatch, record, timeouts, hooks
        )
        self.leader.start()
        self.rank.__enter__()
        return self.rank

    def close(self) -> None:
        self.leader.close()
        self.rank.__exit__(None, None, None)

    def _resting(self, machine: StepMachine) -> bool:
        self.rank.dispatch(Exit())
        return True

    def committed(self) -> list[bool]:
        """Whether each record was applied."""
        return [record.applied for record in Log(RunLog(self.store).read_from(0)).chain()[1:]]


class Model(nn.Module):
    """`kind`: what its buffer holds, and what a forward does to it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.kind, self.calls = nn.Linear(4, 1), kind, 0
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        first = {"mask": mask, "unknown": torch.tensor([torch.nan, 0.1]), "smallest": torch.tensor(torch.inf)}
        self.register_buffer("buffer", first.get(kind, torch.zeros(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        match self.kind:
            case "mask":
                x = x + (torch.softmax(self.buffer, -1) @ x.T[:, :1]).T
            case "smallest":  # as the observers of quantization have it
                self.buffer.copy_(torch.minimum(self.buffer, x.detach().min()))
            case "overflows" if self.calls == 3:
                self.buffer[0] = torch.inf
            case "spoilt":
                self.buffer.mul_(torch.nan)
        return self.linear(x)


def plain(kind: str) -> Model:
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        summed(model, x, y).div(1.0).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", ["mask", "unknown", "smallest", "overflows", "spoilt"])
def test_a_buffer_that_is_not_finite_trains_as_in_a_plain_loop(kind: str) -> None:
    host = JobHost()
    session, model = session_with(host), Model(kind)
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)], buffers={"buffer": "mean"})
    try:
        for step in session.steps(batches(STEPS), until=STEPS):
            for x, y in step:
                step.backward(summed(model, x, y))
            step.commit()
    finally:
        host.close()
    assert host.committed() == [True] * STEPS
    expected: Any = dict(plain(kind).state_dict())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_gradient_that_is_not_finite_is_found_beside_such_a_buffer() -> None:
    host = JobHost()
    session, model = session_with(host), Model("mask")
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)])
    try:
        for step in session.steps(batches(STEPS), until=4):
            for x, y in step:
                weight = torch.tensor(torch.nan if step.position == 1 else 1.0)
                step.backward(summed(model, x, y) * (torch.inf if step.position == 2 else 1.0), weight)
            step.commit()
    finally:
        host.close()
    assert host.committed() == [True, False, False, True]


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_exchange_with_another_replica_blames_no_gradient_for_such_a_buffer(spoilt: bool) -> None:
    """Nor does the examination of a sum that is not finite."""
    model, reports, root = Model("mask"), queue.Queue[RankReport](), genesis("run", 2)
    registered = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.05)], buffers={"buffer": "mean"})
    engine = ModuleEngine(registered, replicas=2)
    rank = RankWorker(RankParts(0, 0, engine, Doubles(), Gated(), FlightRecord("r0"), derive(20), "memory", reports.put))
    with rank:
        rank.dispatch(p.Work(root.hash, 0, 1))
        order = rank.next_work()
        assert order is not None
        engine.begin(order.on_bucket)
        engine.backward(model(torch.ones(5, 4)).sum() * (torch.inf if spoilt else 1.0), last=True)
        rank.finish(order, engine.end())
        rank.dispatch(p.Exchange(1, (0, 1), (0, 1), contribute=True, fresh=True))
        rank.dispatch(p.Examine(1))
        assert reports.get(timeout=60) == p.RankDone(1, 0, finite=not spoilt)
        assert reports.get(timeout=60) == p.Examined(1, 0, not spoilt)
        assert not torch.isfinite(engine.buckets[0]).all()
        rank.dispatch(Exit())
