"""Inside one micro-batch collectives are launched early and waited for late, and nothing runs before what it needs."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from helixrt.passes import hide as hide_pass
from helixrt.passes.errors import VerifyError
from helixrt.passes.hide import hide

ATEN, C10D = torch.ops.aten, torch.ops._c10d_functional


def graph(writes: bool = False) -> fx.GraphModule:
    """As eager runs it: sin, then a sum over ranks that needs none of it, waited for at once, then cos; with or without a
    write into what is sent, after it was sent."""
    found = fx.Graph()
    x = found.placeholder("x")
    sine = found.call_function(ATEN.sin.default, (x,))
    total = found.call_function(C10D.all_reduce.default, (x, "sum", "0"))
    waited = found.call_function(C10D.wait_tensor.default, (total,))
    if writes:
        found.call_function(ATEN.add_.Tensor, (x, 1))
    cosine = found.call_function(ATEN.cos.default, (sine,))
    found.output((found.call_function(ATEN.add.Tensor, (cosine, waited)),))
    return fx.GraphModule(nn.Module(), found)


def order(module: fx.GraphModule) -> list[str]:
    return [node.target._opname for node in module.graph.nodes if node.op == "call_function"]


def test_a_collective_is_launched_early_and_waited_for_late() -> None:
    assert order(graph()) == ["sin", "all_reduce", "wait_tensor", "cos", "add"]
    assert order(hide(graph())) == ["all_reduce", "sin", "cos", "wait_tensor", "add"]


def test_what_writes_stays_where_it_is() -> None:
    named = order(hide(graph(writes=True)))
    assert named.index("wait_tensor") < named.index("add_") < named.index("cos")


def gathering(parameters: int, sizes: int = 64) -> fx.GraphModule:
    """A forward of sharded parameters, each gathered right before the product it is for, as eager runs it."""
    found = fx.Graph()
    x = found.placeholder("x")
    shards = [found.placeholder(f"shard_{number}") for number in range(parameters)]
    x.meta["val"] = torch.empty(sizes, sizes, device="meta")
    for shard in shards:
        shard.meta["val"] = torch.empty(sizes // 2, sizes, device="meta")
        gathered = found.call_function(C10D.all_gather_into_tensor.default, (shard, 2, "0"))
        whole = found.call_function(C10D.wait_tensor.default, (gathered,))
        gathered.meta["val"] = whole.meta["val"] = torch.empty(sizes, sizes, device="meta")
        x = found.call_function(ATEN.mm.default, (x, whole))
        x.meta["val"] = torch.empty(sizes, sizes, device="meta")
    found.output((x,))
    return fx.GraphModule(nn.Module(), found)


def most_gathered(module: fx.GraphModule) -> int:
    """How many gathered tensors are alive at a time: launched, and not yet used for the last time."""
    alive = most = 0
    for name in order(module):
        alive += (name == "all_gather_into_tensor") - (name == "mm")
        most = max(most, alive)
    return most


def test_gathers_are_launched_a_little_ahead_only() -> None:
    """The next ones are under way while a product runs, but never a model's worth of them."""
    ordered = hide(gathering(40))
    assert 2 <= most_gathered(ordered) <= 6
    names = order(ordered)
    first = names.index("mm")
    assert names[:first].count("all_gather_into_tensor") > names[:first].count("wait_tensor") == 1
    between = names[first + 1 : len(names) - 3]
    assert "all_gather_into_tensor" in between, "gathers go on while products run"
    assert most_gathered(hide(gathering(2))) == 2


def test_sizes_fence_nothing() -> None:
    """Arithmetic of symbolic sizes lies between a sum over ranks and what it may hide behind."""
    found = fx.Graph()
    x = found.placeholder("x")
    size = found.call_function(ATEN.sym_size.int, (x, 0))
    size.meta["val"] = 4
    sine = found.call_function(ATEN.sin.default, (x,))
    total = found.call_function(C10D.all_reduce.default, (x, "sum", "0"))
    waited = found.call_function(C10D.wait_tensor.default, (total,))
    doubled = found.call_function(operator.mul, (size, 2))
    doubled.meta["val"] = 8
    more = found.call_function(torch.sym_max, (doubled, 3))
    more.meta["val"] = 8
    cosine = found.call_function(ATEN.cos.default, (sine,))
    wide = found.call_function(ATEN.add.Tensor, (cosine, more))
    found.output((found.call_function(ATEN.add.Tensor, (wide, waited)),))
    names = [
        getattr(node.target, "_opname", node.target.__name__)
        for node in hide(fx.GraphModule(nn.Module(), found)).graph.nodes
        if node.op == "call_function"
    ]
    assert names.index("all_reduce") < names.index("sin") and names.index("wait_tensor") == len(names) - 2


def test_an_order_that_breaks_a_dependency_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = hide_pass.captured

    def reversed_order(*given: object, **options: object) -> object:
        right = captured(*given, **options)  # type: ignore[arg-type]
        return replace(right, order=tuple(reversed(right.order)))

    monkeypatch.setattr(hide_pass, "captured", reversed_order)
    with pytest.raises(VerifyError, match="add_tensor would run before cos_default, which it needs"):
        hide(graph())


def test_an_operator_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, unused = hide_pass.captured, graph()
    first = unused.graph.find_nodes(op="call_function", target=ATEN.sin.default)[0]
    with unused.graph.inserting_before(first):
        unused.graph.call_function(ATEN.tan.default, tuple(unused.graph.find_nodes(op="placeholder")))

    def without_tangent(*given: object, **options: object) -> object:
        right = captured(*given, **options)  # type: ignore[arg-type]
        return replace(right, order=tuple(index for index in right.order if index != 0))

    monkeypatch.setattr(hide_pass, "captured", without_tangent)
    with pytest.raises(VerifyError, match="8 operators before the pass, 7 after"):
        hide(unused)
