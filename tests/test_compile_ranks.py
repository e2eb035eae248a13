"""On two real ranks: tensor-parallel and data-parallel models through helixrt.compile and torch.compile, beside eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import helixrt
from helixrt.errors import ConfigError
from helixrt.passes.errors import CaptureError, DisagreementError
from helixrt.passes.parts import local
from tests.passes.megatron_sums import SumBackward, SumForward

RANKS, MICROBATCHES = 2, 3


class Block(nn.Module):
    """Two halves of a layer on two ranks; dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.a(SumBackward.apply(self.norm(x))))
        return x + F.dropout(SumForward.apply(self.b(h)), 0.2)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(x)))


class Checkpointed(Block):
    """The region's collective runs again in the backward, as in eager."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def by_dtensor() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = nn.Sequential(Dense(), Dense()).double()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in module:
        parallelize_module(block, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    return module


def data(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 2 * MICROBATCHES, 4, 8, dtype=torch.float64, generator=generator).unbind(0)


def plain_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = []
    for a, b in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = F.mse_loss(model(a), b)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def assert_gradients(model: nn.Module, other: nn.Module, *, bitwise: bool = False) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None, name
        assert type(one.grad) is type(two.grad)
        if bitwise:
            assert torch.equal(local(one.grad), local(two.grad)), name
        torch.testing.assert_close(local(one.grad), local(two.grad), rtol=1e-10, atol=1e-13)


def tensor_parallel(make: Callable[[], nn.Module], profile: str) -> None:
    """Woven, one strand and eager, over two steps, from equal random states."""
    torch.manual_seed(0)
    model = make()
    x, y = data()
    single, plain = make(), make()
    for other in (single, plain):
        with torch.no_grad():
            for one, two in zip(other.parameters(), model.parameters(), strict=True):
                local(one).copy_(local(two))
    helixrt.compile(model, loss=F.mse_loss, microbatches=MICROBATCHES, profile=profile)
    helixrt.compile(single, loss=F.mse_loss, microbatches=MICROBATCHES, strands=1)
    losses = []
    for train in (*(lambda m=m: m.train_step(x, target=y) for m in (model, single)), lambda: plain_loop(plain, x, y)):
        torch.manual_seed(7)
        train()
        losses.append(train())
    assert torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-12, atol=0)
    assert_gradients(model, single, bitwise=True)
    assert_gradients(model, plain)

    explanation = model.explain()
    assert explanation.state == "woven" and explanation.plan.pairing is not None
    pairing = explanation.plan.pairing
    assert 0 < pairing.bound_us <= pairing.predicted_us * (1 + 1e-9)
    assert len(pairing.pairs) == sum(count for kind, count in explanation.counts["woven"].items() if "communication" in kind)
    assert "communication hidden" in str(explanation)


def by_torch_compile() -> None:
    from helixrt.compile.dynamo import backend, recorded

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    plain = copy.deepcopy(model)
    x, y = data()
    compiled = torch.compile(model, backend=backend)
    for each in (compiled, plain):
        torch.manual_seed(7)
        plain_loop(each, x, y)
    assert_gradients(model, plain, bitwise=True)
    assert [graph.collectives for graph in recorded if graph.kind != "inference"][-2:] == [2, 2]


def data_parallel() -> None:
    """A step exchanges gradients once, a step under no_sync not at all; the model has buffers and hooks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4), Dense()).double()
    models = [DistributedDataParallel(copy.deepcopy(model)) for _ in range(2)]
    x, y = data(dist.get_rank())
    compiled, plain = helixrt.compile(models[0], loss=F.mse_loss, microbatches=MICROBATCHES), models[1]
    hooked = [parameter for each in models for parameter in each.module[0].parameters()]
    for parameter in hooked:
        parameter.register_hook(lambda gradient: 2 * gradient)
    for _ in range(2):
        with compiled.no_sync():
            compiled.train_step(x, target=y)
        with plain.no_sync():
            plain_loop(plain, x, y)
        assert_gradients(compiled, plain)
        compiled.train_step(x, target=y)
        with plain.no_sync():
            losses = [F.mse_loss(plain(a), b) for a, b in list(zip(x.chunk(3), y.chunk(3), strict=True))[:-1]]
            for loss in losses:
                (loss / MICROBATCHES).backward()
        (F.mse_loss(plain(x.chunk(3)[-1]), y.chunk(3)[-1]) / MICROBATCHES).backward()
        assert_gradients(compiled, plain)
        for one, other in zip(compiled.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)
        compiled.zero_grad(), plain.zero_grad()


def last_exchanged(plain: DistributedDataParallel, x: torch.Tensor, y: torch.Tensor) -> None:
    """A plain loop that exchanges gradients with the last micro-batch's backward."""
    *first, last = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    with plain.no_sync():
        for a, b in first:
            (F.mse_loss(plain(a), b) / MICROBATCHES).backward()
    (F.mse_loss(plain(last[0]), last[1]) / MICROBATCHES).backward()


def inside_data_parallel() -> None:
    """Stepped through `ddp.module.train_step`, the exchange is the wrapper's; a part of what it wraps is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Dense()).double()
    plain = DistributedDataParallel(copy.deepcopy(model))
    step = helixrt.compile(model, loss=F.mse_loss, microbatches=MICROBATCHES).train_step
    x, y = data(dist.get_rank())
    step(x, target=y)
    model.zero_grad()
    wrapped = DistributedDataParallel(model)  # after a first step, too
    for _ in range(2):
        wrapped.module.train_step(x, target=y)
        last_exchanged(plain, x, y)
        assert_gradients(model, plain.module)
        with wrapped.no_sync():
            step(x, target=y)
        with plain.no_sync():
            plain_loop(plain, x, y)
        assert_gradients(model, plain.module)
        model.zero_grad(), plain.zero_grad()
    eager = helixrt.compile(model, loss=lambda o, t: F.mse_loss(o, t) * float(o.sum() > -1e9), strict=False)
    with pytest.warns(UserWarning, match="plain loop"):
        eager.train_step(x, target=y)
    F.mse_loss(plain(x), y).backward()
    assert_gradients(model, plain.module)

    part = helixrt.compile(Dense().double(), loss=F.mse_loss, microbatches=MICROBATCHES)
    whole = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8).double(), part))
    with pytest.raises(ConfigError, match="DistributedDataParallel=.*compile the module that it wraps"):
        whole.module[1].train_step(x, target=y)


def recaptured_together() -> None:
    """A rank that must capture anew does not do so alone: the others, which still have graphs, capture with it."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).double()
    plain = copy.deepcopy(model)
    helixrt.compile(model, loss=F.mse_loss, microbatches=MICROBATCHES, profile="estimate")
    x, y = data()
    rank = dist.get_rank()
    changes: list[Callable[[nn.Module], Any]] = [
        lambda each: None,
        lambda each: None if rank or each is plain else each.train_step.forget(),
        lambda each: setattr(each[0].norm, "eps", 1e-3),  # a value that is read: new graphs on both ranks
        lambda each: None if not rank or each is plain else each.train_step.forget(),  # the other rank
    ]
    numbers = []
    for change in changes:
        for each in (model, plain):
            change(each)
        for train in (lambda: model.train_step(x, target=y), lambda: plain_loop(plain, x, y)):
            torch.manual_seed(7)
            train()
        assert_gradients(model, plain)
        numbers.append(model.train_step.latest.number)
    torch.manual_seed(7)
    model.train_step(x, target=y)
    assert model.train_step.latest.number == numbers[-1] and numbers == [1, 2, 3, 4]


def other_models() -> None:
    """Ranks that would launch different collectives raise before the first step; nobody hangs."""
    torch.manual_seed(0)
    depth = 1 + dist.get_rank()
    model = helixrt.compile(
        nn.Sequential(*(Block() for _ in range(depth))).double(), loss=F.mse_loss, microbatches=MICROBATCHES
    )
    x, y = data()
    with pytest.raises(DisagreementError, match="ranks would hang"):
        model.train_step(x, target=y)


def fully_sharded() -> None:
    """Is refused in a line; a plain loop takes its place if that is asked for."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    models = [nn.Sequential(Dense(), Dense()).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, y = data(dist.get_rank())
    for model in models:
        for module in (*model, model):
            fully_shard(module)
    with pytest.raises(CaptureError, match="fully sharded parameters are gathered in hooks"):
        helixrt.compile(models[0], loss=F.mse_loss, microbatches=MICROBATCHES).train_step(x, target=y)
    helixrt.compile(models[0], loss=F.mse_loss, microbatches=MICROBATCHES, strict=False)
    with pytest.warns(UserWarning, match="trained by a plain loop"):
        loss = models[0].train_step(x, target=y)
    assert torch.equal(loss, plain_loop(models[1], x, y))
    assert_gradients(*models, bitwise=True)


CASES: dict[str, Callable[[], None]] = {
    "by hand": lambda: tensor_parallel(lambda: nn.Sequential(Block(), Block()).double(), "auto"),
    "checkpointed": lambda: tensor_parallel(lambda: nn.Sequential(Checkpointed(), Checkpointed()).double(), "auto"),
    "DTensor": lambda: tensor_parallel(by_dtensor, "estimate"),
    "torch.compile": by_torch_compile,
    "data parallel": data_parallel,
    "inside data parallel": inside_data_parallel,
    "recaptured together": recaptured_together,
    "fully sharded": fully_sharded,
    "other models": other_models,
}


def check(name: str) -> None:
    CASES[name]()


@pytest.fixture(scope="module")
def answers(ask_ranks: Any) -> Any:
    return ask_ranks(check, CASES)


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name: str, answers: Any) -> None:
    answers.check(name)
