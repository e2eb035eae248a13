"""Inside one micro-batch collectives are launched early and waited for late, and nothing runs before what it needs."""

from __future__ import annotations

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
