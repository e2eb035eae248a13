"""A rank worker and host in one process, of one replica: commits each step, or drops it where a test says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.engines.module import ModuleEngine
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.job.agreements import LayoutAgreement
from helixrt.job.evaluation import Measured
from helixrt.job.session import Session
from helixrt.job.session_host import Plan, SessionSettings
from helixrt.job.step import Step, Worker
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.replica.commands import Evaluate
from helixrt.replica.contracts import WorkResult
from helixrt.replica.rank import Done, WorkOrder
from helixrt.replica.store import MemoryRunStore

OPENED: list[ModuleEngine] = []  # of the present test's sessions; conftest.py closes them, as a rank does


class CommittingWorker:
    """Drops the steps whose serial numbers are in `dropped`; `positions` are those that were ordered."""

    def __init__(self, engine: ModuleEngine, plan: Plan, dropped: set[int], applied: Callable[[int], bool]) -> None:
        self.engine, self.plan, self.dropped, self.applied = engine, plan, dropped, applied
        self.head, self.serial = genesis("run", 1), 0
        self.stopped = ""
        self.handed_out: list[int] = []
        self.positions: list[int] = []
        self.chain = [self.head]

    def next_work(self) -> WorkOrder | None:
        if self.head.step >= self.plan.until or self.head.last:
            return None
        self.serial += 1
        self.handed_out = []
        self.positions.append(self.head.positions[0])
        return WorkOrder(self.serial, self.head.step + 1, self.head.positions[0], self.handed_out.append)

    def finish(self, order: WorkOrder, result: WorkResult) -> None:
        assert sorted(self.handed_out) == list(range(len(self.engine.buckets)))
        self.result = result

    def outcome(self, order: WorkOrder) -> Done | None:
        if order.serial in self.dropped:
            return None
        applied = self.applied(order.step)
        positions = {0: order.position + self.plan.accumulate}
        contributors = ((0, 0),)
        last = self.stopped
        self.head = CommitRecord(
            order.step, order.serial, self.head.hash, contributors, positions, "run", applied=applied, last=last
        )
        self.chain.append(self.head)
        sums = [bucket.clone() for bucket in self.engine.buckets] if applied else None
        update = self.engine.apply(self.head, sums)
        if self.plan.evaluate_every and order.step % self.plan.evaluate_every == 0:
            self.plan.evaluate(Evaluate(order.step, self.head.hash, 0, (0,)))
        return Done(self.head, update, self.result, 0.25)


class LocalHost:
    def __init__(
        self,
        dropped: set[int] | None = None,
        applied: Callable[[int], bool] = lambda step: True,
        store: MemoryRunStore | None = None,
    ) -> None:
        self.store = store or MemoryRunStore()
        self.dropped, self.applied = dropped or set(), applied
        self.said: list[str] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.validated: list[tuple[int, dict[str, float]]] = []
        self.weights: list[float | None] = []  # of each validation, if it is shared
        self.worker: CommittingWorker | None = None

    @property
    def folder(self) -> Path | None:
        return None

    def connect(self, device: torch.device) -> ReplicaMesh:
        raise NotImplementedError("a replica of one rank has nothing to connect")

    def open(self, engine: ModuleEngine, plan: Plan) -> Worker:
        OPENED.append(engine)
        LayoutAgreement(self.store, 0, engine).initial()
        self.worker = CommittingWorker(engine, plan, self.dropped, self.applied)
        return self.worker

    def stop(self, reason: str) -> None:
        assert self.worker is not None
        self.worker.stopped = reason

    def say(self, text: str) -> None:
        self.said.append(text)

    def log(self, step: int, values: Mapping[str, float], done: Done) -> None:
        self.logged.append((step, dict(values)))

    def validation(self, order: Evaluate, found: Measured) -> None:
        self.validated.append((order.step, dict(found.values)))
        self.weights.append(found.weight)

    def busy(self, doing: str, limit_s: float) -> AbstractContextManager[None]:
        return nullcontext()


def session_with(host: LocalHost, **settings: Any) -> Session:
    return Session(SessionSettings(device="cpu", **settings), host)


def tiny() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))


def batches(count: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 1, generator=generator)) for _ in range(count)]


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y, reduction="sum")


class DrawingLoader:
    """The same batches, read by code that draws random numbers of every kind."""

    def __len__(self) -> int:
        return len(batches())

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
            assert len(drawn) == 3 and number < len(self)
            yield batch


def ready(
    host: LocalHost | None = None, registered: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[Session, nn.Module]:
    """A session with a `tiny` model and SGD; `registered` is what else it registers."""
    session, model = session_with(host or LocalHost(), **settings), tiny()
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], **(registered or {}))
    return session, model


def worked(session: Session, model: nn.Module, until: int, accumulate: int = 1) -> Iterator[Step[Any]]:
    """Steps over `batches()`, each after the backward of its micro-batches and before its commit."""
    for step in session.steps(batches(), until=until, accumulate=accumulate):
        for x, y in step:
            step.backward(summed(model, x, y))
        yield step

