"""Regions of torch.utils.checkpoint in captured graphs: what is kept, what is computed again, and with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.measure import Operation
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.replay import random_state, replayed
from helixrt.passes.split import split

CPU = torch.device("cpu")


class Region(nn.Module):
    """Buffers, views, several results, dropout; with `inner` a region inside the region."""

    def __init__(self, checkpointed: bool, inner: bool) -> None:
        super().__init__()
        self.checkpointed, self.inner = checkpointed, inner
        self.a, self.b, self.bn = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.b(x)), 0.4)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(torch.sigmoid(self.bn(self.a(x))), 0.4)
        h = checkpoint(self.inside, h, use_reentrant=False) if self.inner else self.inside(h)
        left, right = h.chunk(2, dim=1)
        return x + torch.cat((left * right, right.sin()), 1).t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def stack(checkpointed: bool, inner: bool = False) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Region(checkpointed, inner) for _ in range(3))).double()


def captured(module: nn.Module) -> Part:
    x, target = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)
    return capture(module, (x.requires_grad_(),), loss=F.mse_loss, target=target)


def saved(part: Part) -> int:
    """Bytes from F to B and W, states of generators aside."""
    forward = split(part).forward
    return sum(
        nodes.size_bytes(nodes.storage_owner(node))
        for port, node in zip(forward.outputs, forward.graph.output_node().args[0], strict=True)
        if port.role is Role.SAVED and node.target is not random_state
    )


@pytest.mark.parametrize("inner", [False, True])
def test_recomputed_in_one_graph_and_in_three(inner: bool, values_of: Any, in_three: Any, bitwise_equal: Any) -> None:
    """The joint graph, and F, B and W: outputs and gradients are those of the graph that keeps everything."""
    module = stack(True, inner)
    part, kept = captured(module), captured(stack(False))
    x, target = torch.randn(2, 4, 6, dtype=torch.float64).unbind(0)
    values = values_of(module, {"0": x, "target": target}, loss=torch.ones((), dtype=torch.float64))
    results = []
    for each in (part, kept):
        torch.manual_seed(5)
        results.append(each.run(values))
    after = torch.get_rng_state()
    for port, value in results[1].items():
        assert torch.equal(results[0][port], value), port
    torch.manual_seed(5)
    bitwise_equal(part, in_three(split(part), values), results[0])
    assert torch.equal(after, torch.get_rng_state()), "computing again draws nothing"
    assert [stamp.name for stamp in part.stamps] == ["capture", "recompute"] and len(kept.stamps) == 1
    assert not any(nodes.is_random(node) and nodes.origin(node).backward for node in part.graph.nodes)


def test_only_what_enters_a_region_is_kept() -> None:
    between = 4 * 6 * 8
    assert saved(captured(stack(True))) <= 4 * between, "inputs of two regions, the loss's input and difference"
    assert saved(captured(stack(False))) > 20 * between


def test_random_operators_draw_again_and_can_be_measured() -> None:
    part = captured(stack(True))
    again = [node for node in part.graph.nodes if "replayed" in str(node.target)]
    assert len(again) == 6
    for node in again:
        out, mask = Operation.of(node)()
        assert out.shape == mask.shape == (4, 6)
    x = torch.randn(100, dtype=torch.float64)
    for operator, arguments in (
        (torch.ops.aten.native_dropout.default, (x, 0.5, True)),
        (torch.ops.aten.rand_like.default, (x,)),
        (torch.ops.aten.bernoulli.p, (x, 0.3)),
        (torch.ops.aten.multinomial.default, (x.abs(), 5)),
    ):
        state = random_state(CPU)
        drawn = operator(*arguments)
        after = random_state(CPU)
        assert not torch.equal(state, after)
        repeated = replayed(operator)(state, CPU, *arguments)
        assert torch.equal(after, random_state(CPU))
        first, second = (each[0] if isinstance(each, tuple) else each for each in (drawn, repeated))
        assert torch.equal(first, second), operator
    with pytest.raises(RuntimeError):
        replayed(torch.ops.aten.rand_like.default)(torch.zeros_like(state), CPU, x)


def test_a_loss_alone_has_no_region() -> None:
    part = captured(nn.Linear(6, 6).double())
    assert [stamp.name for stamp in part.stamps] == ["capture"]
    assert Port(Role.OUTPUT, "loss") in part.outputs
