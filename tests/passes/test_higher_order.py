"""Operators that run a graph or a kernel of the user's take time, and are measured; flex_attention is refused."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import fx, nn
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch.nn.attention.flex_attention import flex_attention

import helixrt
from helixrt.passes import communication, nodes
from helixrt.passes.capture import capture
from helixrt.passes.classify import classify, strand
from helixrt.passes.communication import register
from helixrt.passes.errors import CaptureError, VerifyError
from helixrt.passes.operators import Kind
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.profile import profile
from helixrt.passes.signatures import signature
from helixrt.passes.split import split
from helixrt.passes.verify import verify

CALLS: list[str] = []


@torch.library.custom_op("helixtest::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, by: float) -> None:
    CALLS.append("scale")
    x.mul_(by)


@torch.library.custom_op("helixtest::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, by: float) -> None:
    CALLS.append("shift")
    x.add_(by)


@torch.library.custom_op("helixtest::sum_", mutates_args=("x",))
def sum_(x: torch.Tensor, group_name: str) -> None:
    CALLS.append("sum")


class InPlace(nn.Linear):
    """Two operators of the user's that write, which torch makes functional, and a condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).detach().clone()
        scale_(y, 2.0)
        shift_(y, 3.0)
        y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos() + 1, (y,))
        return (super().forward(x) * y).sum()


@pytest.fixture(scope="module")
def forward() -> Part:
    torch.manual_seed(0)
    return split(capture(InPlace(16, 16), (torch.ones(4, 16),))).forward


def test_they_are_compute_and_measured(forward: Part, tmp_path: Path) -> None:
    kinds = classify(forward, {})
    found = [node for node in strand(forward) if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert sorted(node.target.name() for node in found) == ["auto_functionalized_v2", "auto_functionalized_v2", "cond"]
    assert {kinds[node] for node in found} == {Kind.COMPUTE}
    CALLS.clear()
    measured = profile(forward, cache=tmp_path)
    names = [signature(node, {}) for node in found]
    assert all(measured.times[name].measured and measured.times[name].time_us > 0 for name in names)
    assert set(CALLS) == {"scale", "shift"}, "both ran"
    listed = {operator.node: operator for operator in measured.operators(forward)}
    assert all(listed[node.name].time_us > 0 for node in found)


def test_what_they_run_is_part_of_their_signature(forward: Part) -> None:
    found = [signature(node, {}) for node in strand(forward) if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert len(set(found)) == 3
    assert any("helixtest.scale_.default" in name and "by=2.0" in name for name in found)
    assert any("helixtest.shift_.default" in name and "by=3.0" in name for name in found)
    again = split(capture(InPlace(16, 16), (torch.ones(4, 16),))).forward
    same = [signature(node, {}) for node in strand(again) if isinstance(node.target, torch._ops.HigherOrderOperator)]
    assert same == found, "the same in every capture, so that what is on disk is found"

    class Other(InPlace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.Linear.forward(self, x).detach().clone()
            y = torch.cond(x.sum() > 0, lambda t: t.tan(), lambda t: t.cos() + 1, (y,))
            return (nn.Linear.forward(self, x) * y).sum()

    other = split(capture(Other(16, 16), (torch.ones(4, 16),))).forward
    (branch,) = (signature(node, {}) for node in strand(other) if isinstance(node.target, torch._ops.HigherOrderOperator))
    assert branch not in found and branch.startswith("cond(")


def test_an_operator_that_draws_inside_a_branch_draws() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.detach().clone()
            y = torch.cond(x.sum() > 0, lambda t: t + torch.randn_like(t), lambda t: t.cos(), (y,))
            return (super().forward(x) * y).sum()

    part = split(capture(Noisy(16, 16), (torch.ones(4, 16),))).forward
    assert [node.target.name() for node in strand(part) if nodes.is_random(node)] == ["cond"]


def test_a_communicating_operator_on_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sums(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.detach().clone()
            sum_(y, "0")
            return (super().forward(x) * y).sum()

    CALLS.clear()
    with pytest.raises(VerifyError, match="helixtest::sum_, which takes a process group"):
        capture(Sums(16, 16), (torch.ones(4, 16),))
    monkeypatch.setattr(communication, "REGISTERED", {})
    register("helixtest::sum_", "blocks")
    with pytest.raises(VerifyError, match="runs helixtest::sum_, which communicates and writes into its arguments"):
        capture(Sums(16, 16), (torch.ones(4, 16),))
    assert not CALLS


# ------------------------------------------------------------------------------------------------ Triton


@triton.jit
def doubled(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def tripled(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 3 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def launching(kernel: Any, constants: dict[str, Any], wrapper: Any = triton_kernel_wrapper_functional, size: int = 64) -> Part:
    """A part that launches a kernel, as torch captures it."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(torch.ops.aten.empty_like.default, (x,))
    said: dict[str, Any] = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),
        "constant_args_idx": kernel_side_table.add_constant_args(constants),
        "grid": [(1, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {"x_ptr": x, "out_ptr": out},
    }
    if wrapper is triton_kernel_wrapper_functional:
        said["tensors_to_clone"] = ["out_ptr"]
    launch = graph.call_function(wrapper, kwargs=said)
    result = graph.call_function(operator.getitem, (launch, "out_ptr"))
    graph.output((result if wrapper is triton_kernel_wrapper_functional else out,))
    value = torch.empty(size)
    for node in graph.nodes:
        node.meta["val"] = value
    launch.meta["val"] = {"out_ptr": value}
    module = fx.GraphModule(nn.Module(), graph)
    return Part(module, (Port(Role.INPUT, "0"),), (Port(Role.OUTPUT, "output"),))


def launch_of(part: Part) -> fx.Node:
    (found,) = (node for node in strand(part) if isinstance(node.target, torch._ops.HigherOrderOperator))
    return found


def test_a_kernel_is_compute_by_its_source_and_constants(tmp_path: Path) -> None:
    constants = {"n": 64, "BLOCK": 64}
    first, again = launching(doubled, constants), launching(doubled, dict(constants))
    assert classify(first, {})[launch_of(first)] is Kind.COMPUTE
    name = signature(launch_of(first), {})
    assert "doubled" in name and "'BLOCK': 64" in name and "kernel_idx" not in name
    assert signature(launch_of(again), {}) == name, "numbers of tables are of one process"
    smaller = launching(doubled, {"n": 64, "BLOCK": 32})
    others = [launching(tripled, constants), smaller, launching(doubled, constants, size=128)]
    assert len({name, *(signature(launch_of(part), {}) for part in others)}) == 4


def test_a_kernel_that_cannot_run_here_is_estimated_not_free(tmp_path: Path) -> None:
    part = launching(doubled, {"n": 64, "BLOCK": 64})
    measured = profile(part, mode="estimate", cache=tmp_path)
    (time,) = (time for name, time in measured.times.items() if name.startswith("triton_kernel"))
    assert time.time_us > 0 and not time.measured
    listed = {operator.node: operator for operator in measured.operators(part)}
    assert listed[launch_of(part).name].time_us == time.time_us


def test_a_kernel_that_writes_in_place_is_refused() -> None:
    with pytest.raises(VerifyError, match="triton_kernel_wrapper_mutation.*writes into"):
        verify(launching(doubled, {"n": 64, "BLOCK": 64}, triton_kernel_wrapper_mutation))


class Launching(nn.Linear):
    """A layer whose output is multiplied by what a kernel of the user's makes of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        doubled[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return (super().forward(x) * out).sum()


@pytest.mark.gpu
def test_a_users_kernel_runs_in_the_graph_and_is_measured(tmp_path: Path) -> None:
    model, x = Launching(1024, 1024).cuda(), torch.randn(4096, 1024, device="cuda")
    step = helixrt.compile(copy.deepcopy(model), microbatches=2)
    found = step.train_step(x)
    for half in x.chunk(2):
        (model(half) / 2).backward()
    torch.testing.assert_close(step.weight.grad, model.weight.grad)
    assert torch.isfinite(found)
    measured = profile(split(capture(Launching(1024, 1024).cuda(), (x,))).forward, cache=tmp_path)
    (time,) = (time for name, time in measured.times.items() if name.startswith("triton_kernel"))
    assert time.measured and time.time_us > 0


# ------------------------------------------------------------------------------------------------ flex_attention


class Flexible(nn.Module):
    """Attention of a frozen input: torch has no backward of flex_attention on a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(flex_attention(x, x, x, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)).sum()


def test_flex_attention_does_not_become_dense_attention() -> None:
    x = torch.randn(1, 2, 128, 8)
    with pytest.raises(CaptureError, match="in a captured graph runs uncompiled.*scaled_dot_product_attention"):
        capture(Flexible(), (x,))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="flex_attention in a captured graph runs uncompiled"):
        torch.compile(Flexible(), backend="helixrt")(x)


def test_a_model_with_flex_attention_is_trained_by_a_plain_loop_and_told() -> None:
    from helixrt.compile.options import Options
    from helixrt.compile.train_step import TrainStep

    model = Flexible()
    with pytest.warns(UserWarning, match="trained by a plain loop, without strands: .*flex_attention"):
        loss = TrainStep(model, Options(microbatches=2, strict=False))(torch.randn(2, 2, 128, 8))
    assert torch.isfinite(loss) and model.out.weight.grad is not None


@pytest.mark.gpu
def test_compiled_flex_attention_on_a_gpu_is_refused_or_trained_by_a_plain_loop() -> None:
    """Compiled as its users compile it, the loop has its kernels; a graph would hold all scores."""
    compiled = torch.compile(flex_attention)

    class Attending(nn.Module):
        def __init__(self, attention: Any) -> None:
            super().__init__()
            self.attention, self.qkv = attention, nn.Linear(128, 384, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, wide = x.shape
            heads = self.qkv(x).view(batch, length, 3, 2, 64).permute(2, 0, 3, 1, 4)
            return self.attention(*heads.unbind(0)).square().mean()

    torch.manual_seed(0)
    model, x = Attending(compiled).cuda(), torch.randn(4, 256, 128, device="cuda")
    other = Attending(nn.functional.scaled_dot_product_attention).cuda()
    other.load_state_dict(model.state_dict())
    with pytest.raises(CaptureError, match="flex_attention in a captured graph runs uncompiled"):
        helixrt.compile(model, microbatches=2).train_step(x)
    with pytest.warns(UserWarning, match="trained by a plain loop, without strands: .*flex_attention"):
        helixrt.compile(model, microbatches=2, strict=False).train_step(x)
    helixrt.compile(other, microbatches=2).train_step(x)
    found, wanted = model.qkv.weight.grad, other.qkv.weight.grad
    assert found is not None and wanted is not None
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-2, "TF32 at most"
