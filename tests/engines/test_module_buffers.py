"""Buffers that a forward changes: united at commit, as they were in a batch that is begun again, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import MisuseError


def test_lowest_contributor_gives_buffers_when_told_so(loops: Any) -> None:
    case = loops.CASES["batch-norm"]
    replicas = [loops.Replica(case, replica, 3, buffers="first") for replica in range(3)]
    alone = loops.Replica(case, 1, 3, buffers="first")
    for replica in (*replicas[1:], alone):
        replica.work(1)
    live = {n: b.clone() for n, b in alone.parts.model.named_buffers()}
    sums = loops.summed([replica.engine for replica in replicas[1:]])
    for replica in replicas:
        replica.engine.apply(loops.record(1, (1, 2)), sums)
        assert all(loops.equal_bits(b, live[n]) for n, b in replica.parts.model.named_buffers())


class Counting(nn.Module):
    """A module with every kind of buffer: replaced by assignment, integer, boolean, large, not persistent, constant."""

    def __init__(self, large: int = 1 << 17) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("large", torch.ones(large))
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.change: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.calls += len(x)
        self.seen[len(x) % 4] = True
        if self.change:
            getattr(self, self.change).add_(1)
        return self.linear(x)


def counting(large: int = 1 << 17, replica: int = 0, **registered: Any) -> tuple[Counting, ModuleEngine]:
    torch.manual_seed(0)
    model = Counting(large)
    options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], **registered)
    return model, ModuleEngine(options, replica=replica, replicas=3)


def test_buffers_of_every_kind_are_united(loops: Any) -> None:
    made = [counting(replica=replica) for replica in range(3)]
    for (model, engine), rows in zip(made, (1, 2, 7), strict=True):
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.full((rows, 3), float(rows))).sum(), last=True)
        engine.end()
    sums = loops.summed([engine for _, engine in made])
    for model, engine in made:
        engine.apply(loops.record(1, (0, 1, 2)), sums)
        assert torch.equal(model.mean, torch.full((3,), (0.5 + 1 + 3.5) / 3))
        assert model.calls.item() == 7 and model.seen.tolist() == [False, True, True, True]
        assert torch.equal(model.constant, torch.full((3,), 0.1)), "a mean of equal numbers may be another number"


@pytest.mark.parametrize("mode", ["mean", "first"])
def test_a_buffer_with_nan_that_no_forward_changes_keeps_its_bits(loops: Any, mode: Any) -> None:
    """NaN is unequal to itself, and a mean of equal numbers may be another number."""
    engines, models = [], []
    for replica in range(3):
        model = nn.Linear(3, 2)
        model.register_buffer("table", torch.tensor([torch.nan, -torch.inf, 0.1], dtype=torch.float64))
        models.append(model)
        options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        engines.append(ModuleEngine(options, replica=replica, replicas=3, buffers=mode))
    before = models[0].table.clone()
    for model, engine in zip(models, engines, strict=True):
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.ones(1, 3)).sum(), last=True)
        engine.end()
    sums = loops.summed(engines)
    for model, engine in zip(models, engines, strict=True):
        engine.apply(loops.record(1, (0, 1, 2)), sums)
        assert loops.equal_bits(model.table, before)


class Averaged(nn.Module):
    """A model with an average of its weights beside it, as `torch.optim.swa_utils.AveragedModel` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.average.requires_grad_(False)
        self.register_buffer("large", torch.zeros(1 << 17))
        self.register_buffer("updates", torch.zeros(()))


def test_what_the_update_does_to_buffers_stays_done_and_is_state(loops: Any) -> None:
    def made(replica: int) -> tuple[Averaged, ModuleEngine]:
        torch.manual_seed(0)
        model = Averaged()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        engine = ModuleEngine(Registered.of(model, [optimizer]), replica=replica, replicas=2)

        def update(record: Any) -> None:
            if record.applied:
                optimizer.step()
            model.average.update_parameters(model.net)
            model.large.add_(1.0)
            model.updates = model.updates + 1.0  # replaced, not changed in place

        engine.set_update(update)
        return model, engine

    model, engine = made(0)
    weights = [model.net.weight.detach().clone()]
    for step in range(1, 4):
        engine.begin(lambda bucket: None)
        engine.backward(model.net(torch.full((4, 3), float(step))).square().sum(), last=True)
        engine.end()
        engine.apply(loops.record(step), [bucket.clone() for bucket in engine.buckets])
        weights.append(model.net.weight.detach().clone())
    assert int(model.average.n_averaged) == 3 and float(model.large[7]) == 3.0 and float(model.updates) == 3.0
    torch.testing.assert_close(model.average.module.weight, torch.stack(weights[1:]).mean(0))
    other, joiner = made(1)
    joiner.load(engine.state())
    joiner.begin(lambda bucket: None)
    assert all(torch.equal(a, b) for a, b in zip(other.buffers(), model.buffers(), strict=True))


@pytest.mark.parametrize("name", ["large", "scratch"])
def test_a_buffer_that_does_not_travel_may_not_change_and_can_be_named(loops: Any, name: str) -> None:
    model, engine = counting()
    model.change = name
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(1, 3)).sum(), last=True)
    with pytest.raises(MisuseError, match=f"buffer {name} was changed.*running_buffers=\\['{name}'\\]"):
        engine.end()
    model, engine = counting(running_buffers=[name])
    model.change = name
    before = getattr(model, name).clone()
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(1, 3)).sum(), last=True)
    engine.end()
    engine.apply(loops.record(1), loops.summed([engine]))
    assert torch.equal(getattr(model, name), before + 1)


@pytest.mark.parametrize("name", ["large", "scratch"])
def test_a_buffer_that_does_not_travel_is_found_when_it_changes_through_its_data(loops: Any, name: str) -> None:
    """As code that keeps a codebook does (`self.embed.data.mul_(decay)`): it counts no version."""
    model, engine = counting()
    with pytest.raises(MisuseError, match=f"buffer {name} was changed, through its `data`.*running_buffers=\\['{name}'\\]"):
        for step in range(1, 3):  # as many as there are buffers that do not travel
            engine.begin(lambda bucket: None)
            engine.backward(model(torch.ones(1, 3)).sum(), last=True)
            getattr(model, name).data.add_(1)
            engine.end()
            engine.apply(loops.record(step), loops.summed([engine]))
