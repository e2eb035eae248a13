"""`torch.compile(backend="helixrt")` in one process: what it refuses, and graphs with symbolic sizes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol

from helixrt.compile.dynamo import backend, recorded
from helixrt.passes.communication import REGISTERED, How, register

ROWS = (6, 10, 5)  # of batches, one after the other; none like another size, which would be taken for the same


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone: its collectives are in the graphs as those of many are."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- operators that nobody has described


@torch.library.custom_op("helixrt_test::shout", mutates_args=())
def shout(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """To other ranks, for all that anybody knows."""
    return x.clone()


@shout.register_fake
def _(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("helixrt_test::shout_into", mutates_args=("x",))
def shout_into(x: torch.Tensor, group_name: str) -> None:
    x.add_(1)


class InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return shout(x, "0")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return shout(gradient, "0")


def in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: shout(x, "0"), lambda x: x.sin(), (x,))


def into_its_argument(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    shout_into(y, "0")
    return y * 2


def train(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.compile(call, backend="helixrt")(torch.randn(4, requires_grad=True)).sum().backward()


def infer(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        torch.compile(call, backend="helixrt")(torch.randn(4))


CASES: dict[str, tuple[Callable[..., None], Callable[[torch.Tensor], torch.Tensor], str]] = {
    "in a forward": (train, lambda x: InForward.apply(x), "shout"),
    "in a backward": (train, lambda x: InBackward.apply(x), "shout"),
    "without gradients": (infer, lambda x: shout(x.cos(), "0"), "shout"),
    "in a branch": (infer, in_a_branch, "shout"),
    "into its argument": (infer, into_its_argument, "shout_into"),
}


@pytest.mark.parametrize(("run", "call", "name"), CASES.values(), ids=CASES.keys())
def test_an_unknown_communicating_operator_is_refused_by_its_name(
    run: Callable[..., None], call: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    with pytest.raises(Exception, match=f"helixrt_test::{name}") as refused:
        run(call)
    said = str(refused.value)
    assert "takes a process group (group_name) and is not known" in said and "communication.register(" in said


def test_one_that_was_described_is_run() -> None:
    before = dict(REGISTERED)
    register("helixrt_test::shout", How.BLOCKS)
    try:
        for run, call, name in CASES.values():
            if name == "shout":
                run(call)
    finally:
        REGISTERED.clear()
        REGISTERED.update(before)


# ---- symbolic sizes


class SumOverRanks(torch.autograd.Function):
    """Sums over ranks in both directions, waited for at once, as eager does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(gradient.contiguous(), "sum", dist.group.WORLD))


class Branches(nn.Module):
    """A sum over ranks beside a product that needs none of it; sizes are computed from the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.beside, self.last = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = SumOverRanks.apply(self.shared(x).reshape(-1, 8))
        beside = torch.tanh(self.beside(x)).reshape(2 * x.shape[0], -1, 8).sum(1)
        beside = beside.repeat_interleave(2, 0)[: summed.shape[0]]
        return self.last(summed.tanh() * beside).view(x.shape[0], -1) / x.shape[0]


def operators(code: str) -> list[str]:
    """The operators of a graph's readable code, in order."""
    return re.findall(r"torch\.ops\.\w+\.(\w+)", code)


def test_symbolic_sizes_fence_nothing_and_gradients_are_those_of_eager(group: None) -> None:
    torch.manual_seed(0)
    model = Branches()
    plain, compiled = copy.deepcopy(model), torch.compile(model, dynamic=True, backend=backend)
    recorded.clear()
    for rows in ROWS:
        x = torch.randn(rows, 4, 8, dtype=torch.float64)
        for each in (compiled, plain):
            each(x).square().sum().backward()
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad), name

    assert [graph.kind for graph in recorded] == ["forward", "backward"], "one graph for all sizes"
    for graph in recorded:
        assert "Sym(s" in graph.code, f"a size is symbolic\n{graph.code}"
        listed = operators(graph.code)
        launched, waited = listed.index("all_reduce"), listed.index("wait_tensor")
        behind = [name for name in listed[launched + 1 : waited] if name not in ("view", "t", "expand", "clone")]
        assert {"mm", "addmm", "bmm"} & set(behind), f"nothing is computed while the sum is under way\n{graph.code}"
