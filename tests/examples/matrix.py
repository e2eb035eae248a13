"""Train functions of the matrix, one case per thing that a session must train exactly.

`killed.py STEPS FOLDER matrix.py CASE` runs one. Each case adds one thing to a small model with SGD: an optimizer, schedulers,
accumulation, running buffers, dropout, a registered average of the weights, workers of the loader. `everything` has all at
once, with a frozen and a tied parameter. The functions here also build what the oracle in `test_matrix.py` trains in one
process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import helixrt

BATCH = 4


class Model(nn.Module):
    """A regression of six inputs; `tied`: two layers share a weight, and the last bias is frozen."""

    def __init__(self, norm: bool = False, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 1)
        if tied:
            self.third.weight = self.second.weight
            self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(torch.relu(self.norm(self.first(x))))
        return self.last(self.third(torch.tanh(self.second(x))))


class Average:
    """A moving average of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def follow(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.values[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.values

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, value in state.items():
            self.values[name].copy_(value)


@dataclass(frozen=True)
class Updates:
    """What changes the model: stepped in this order; an average follows last."""

    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    average: Average | None = None

    def function(self, model: nn.Module) -> Callable[..., None]:
        def update(record: object = None) -> None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 2.0)
            for each in (*self.optimizers, *self.schedulers):
                each.step()
            if self.average is not None:
                self.average.follow(model)

        return update


def sgd(model: Model) -> Updates:
    return Updates([torch.optim.SGD(model.parameters(), lr=0.03)])


def momentum(model: Model) -> Updates:
    return Updates([torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)])


def adafactor(model: Model) -> Updates:
    return Updates([torch.optim.Adafactor(model.parameters(), lr=0.02)])


def two_optimizers(model: Model) -> Updates:
    ours = [*model.first.parameters(), *model.norm.parameters()]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is mine for mine in ours)]
    return Updates([torch.optim.SGD(ours, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.02)])


def schedulers(model: Model) -> Updates:
    first, second = two_optimizers(model).optimizers
    warm = LinearLR(first, 0.2, total_iters=5)
    sequence = SequentialLR(first, [warm, ExponentialLR(first, 0.98)], milestones=[5])
    return Updates([first, second], [sequence, OneCycleLR(second, 0.05, total_steps=200)])


def average(model: Model) -> Updates:
    return Updates(momentum(model).optimizers, average=Average(model))


def everything(model: Model) -> Updates:
    first = torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.05, momentum=0.9, nesterov=True)
    factors = torch.optim.Adafactor([model.second.weight, model.last.weight], lr=0.02)
    sequence = SequentialLR(first, [LinearLR(first, 0.2, total_iters=5), ExponentialLR(first, 0.98)], milestones=[5])
    return Updates([first, factors], [sequence], Average(model))


@dataclass(frozen=True)
class Case:
    updates: Callable[[Model], Updates] = sgd
    model: Callable[[], Model] = Model
    accumulate: int = 1
    workers: int = 0
    replicas: int = 2


def normed() -> Model:
    return Model(norm=True)


def dropped() -> Model:
    return Model(dropout=0.25)


def whole() -> Model:
    return Model(norm=True, dropout=0.25, tied=True)


CASES = {
    "momentum": Case(momentum),
    "adafactor": Case(adafactor),
    "two-optimizers": Case(two_optimizers),
    "schedulers": Case(schedulers),
    "accumulation": Case(accumulate=4),
    "batch-norm": Case(model=normed),
    "dropout": Case(model=dropped),
    "average": Case(average),
    "workers": Case(workers=2),
    "three-replicas": Case(momentum, replicas=3),
    "everything": Case(everything, whole, accumulate=4, workers=2),
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(204, 6, generator=generator)
    return TensorDataset(x, x.prod(1, keepdim=True))


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y, reduction="sum")


def train(session: helixrt.Session) -> None:
    case = CASES[sys.argv[4]]
    model = session.parallelize(case.model())
    updates = case.updates(model)
    extra = {} if updates.average is None else {"average": updates.average}
    session.register(model=model, optimizers=updates.optimizers, schedulers=updates.schedulers, extra=extra)
    session.update(updates.function(model))
    items = data()
    sampler = session.sampler(items, shuffle=True)
    loader = StatefulDataLoader(items, batch_size=BATCH, sampler=sampler, num_workers=case.workers)
    for step in session.steps(loader, until=int(sys.argv[1]), accumulate=case.accumulate):
        for x, y in step:
            step.backward(summed(model, x, y), weight=len(x))
        done = step.commit()
        session.log({"loss": done.loss})
