"""Models that communicate are captured with functional collectives, and give eager's numbers on two real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as funcol

from helixrt.passes import nodes
from helixrt.passes.agree import agree
from helixrt.passes.capture import capture
from helixrt.passes.parts import Part, Port, Role, local
from helixrt.passes.split import split, whole_backward
from helixrt.passes.verify import collective_order, verify
from tests.passes.megatron_sums import SumBackward, SumForward
from tests.passes.test_cut_ranks import Dense

RANKS = 2


def tensor_parallel(sequence: bool) -> nn.Module:
    """Two blocks parallelized by DTensor, with or without sequence parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    module = nn.Sequential(Dense(), Dense()).double()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in module:
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "a": ColwiseParallel(input_layouts=Shard(1)),
                "b": RowwiseParallel(output_layouts=Shard(1)),
            }
        else:
            plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return module


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8).double(), nn.Linear(8, 8, bias=False).double()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(SumForward.apply(self.b(F.relu(self.a(SumBackward.apply(x))))))


class Experts(nn.Module):
    """Rows go to the other rank's layer and come back, as in expert parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.expert = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.route(x).flatten(0, 1)
        sizes = [rows.shape[0] // RANKS] * RANKS
        there = funcol.all_to_all_single_autograd(rows, sizes, sizes, dist.group.WORLD)
        back = funcol.all_to_all_single_autograd(self.expert(there), sizes, sizes, dist.group.WORLD)
        return x + back.view_as(x)


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


MODELS = {
    "tensor parallel": lambda: tensor_parallel(False),
    "sequence parallel": lambda: tensor_parallel(True),
    "by hand": lambda: nn.Sequential(ByHand(), ByHand()),
    "experts": Experts,
}
LEAST = {"tensor parallel": 4, "sequence parallel": 8, "by hand": 3, "experts": 4}  # collectives of a joint graph


def check(name: str) -> None:
    """One model on this rank: capture, agree, compare the joint graph, F + B + W and eager."""
    torch.manual_seed(0)
    module = MODELS[name]()
    torch.manual_seed(dist.get_rank())
    x, target = torch.randn(2, 4, 8, dtype=torch.float64), torch.randn(2, 4, 8, dtype=torch.float64)
    part = capture(module, (x,), loss=square, target=target)
    halves = split(part)
    whole = whole_backward(halves)
    for graph in (part, halves.forward, halves.backward, halves.weight, whole):
        verify(graph)
        agree(graph, dist.group.WORLD)
    assert len(collective_order(part)) >= LEAST[name], collective_order(part)
    assert any(nodes.is_collective(node) for node in halves.forward.graph.nodes)

    values = {Port(Role.INPUT, "0"): x, Port(Role.TARGET, "target"): target}
    values[Port(Role.TANGENT, "loss")] = torch.ones((), dtype=torch.float64)
    values |= {Port(Role.PARAMETER, n): local(p.detach()) for n, p in module.named_parameters()}
    joint = replayed(values, part)
    for graphs in ((halves.forward, halves.backward, halves.weight), (halves.forward, whole)):
        taken_apart = replayed(values, *graphs)
        for port, value in joint.items():
            assert torch.equal(value, taken_apart[port]), (port, graphs)

    torch.manual_seed(7)
    loss = square(module(x), target)
    loss.backward()
    torch.testing.assert_close(joint[Port(Role.OUTPUT, "loss")], loss.detach(), rtol=1e-12, atol=0)
    for parameter_name, parameter in module.named_parameters():
        gradient = joint[Port(Role.GRADIENT, parameter_name)]
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, local(parameter.grad), rtol=1e-10, atol=1e-12)
        if parameter_name in part.layouts:
            wrapped = part.layouts[parameter_name].wrap(gradient)
            assert wrapped.placements == parameter.grad.placements, parameter_name
            assert wrapped.shape == parameter.grad.shape and wrapped.stride() == parameter.grad.stride()


def replayed(values: dict[Port, torch.Tensor], *parts: Part) -> dict[Port, torch.Tensor]:
    torch.manual_seed(7)
    known = dict(values)
    for part in parts:
        known |= part.run(known)
    return known


@pytest.fixture(scope="module")
def answers(ask_ranks: Any) -> Any:
    return ask_ranks(check, MODELS)


@pytest.mark.system
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_give_eager_gradients(name: str, answers: Any) -> None:
    answers.check(name)
