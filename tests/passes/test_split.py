"""F, B and W are the joint graph taken apart: bitwise equal in sum, nothing saved that need not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.parts import Part, Port, Role, Split
from helixrt.passes.split import split, whole_backward
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import build_chunk

SEQ = 6
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % 17


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def chunk(family: str, tied: bool, which: int, chunks: int, dropout: bool = True) -> nn.Module:
    config = ModelConfig(family=family, layers=max(2, chunks), dim=8, heads=2, kv_heads=1, ffn=12, vocab=17, tied=tied)
    module = build_chunk(config, SEQ, which, chunks)
    for block in module.layers.values() if dropout else ():
        block.register_forward_hook(lambda m, args, out: F.dropout(out, 0.3, m.training))
    return module


def check(joint: Part, values: Any, in_three: Any, bitwise_equal: Any) -> Split:
    """F + B + W and F + whole backward against the joint graph."""
    halves = split(joint)
    torch.manual_seed(1)
    expected = joint.run(values)
    torch.manual_seed(1)
    bitwise_equal(joint, in_three(halves, values), expected)
    torch.manual_seed(1)
    forward = halves.forward.run(values)
    whole = whole_backward(halves).run(values | forward)
    results = {port: value for port, value in (forward | whole).items() if port.role is not Role.SAVED}
    bitwise_equal(joint, results, expected)
    return halves


@pytest.mark.parametrize(("family", "tied", "chunks"), [("gpt", True, 1), ("gpt", False, 3), ("llama", False, 3)])
def test_the_three_are_bitwise_the_joint(
    family: str, tied: bool, chunks: int, values_of: Any, in_three: Any, bitwise_equal: Any
) -> None:
    for which in range(chunks):
        module = chunk(family, tied, which, chunks)
        x = TOKENS if which == 0 else torch.randn(2, SEQ, 8, requires_grad=True)
        if which == chunks - 1:
            joint = capture(module, (x,), loss=cross_entropy, target=TOKENS)
            values = values_of(module, {"0": x, "target": TOKENS})
        else:
            joint = capture(module, (x,))
            values = values_of(module, {"0": x}, output=torch.randn(2, SEQ, 8))
        halves = check(joint, values, in_three, bitwise_equal)
        roles = {port.role for port in halves.forward.outputs} | {port.role for port in halves.backward.inputs}
        assert Role.GRADIENT not in roles and Role.INPUT_GRADIENT not in roles
        # every product that makes a weight's gradient is in W, and none that makes an input's; first chunk or not
        linear = [name for name, p in module.named_parameters() if p.dim() == 2 and not name.startswith(("embed", "pos"))]
        assert len(products(halves.weight)) == len(linear) + (tied and which == chunks - 1)
        assert len(products(halves.backward)) == len(products(halves.weight))


def products(part: Part) -> list[str]:
    return [node.name for node in part.graph.nodes if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]


def test_only_activations_are_saved(values_of: Any) -> None:
    """What B and W share with F: no parameter or input, no tensor twice, as many bytes as the backward needs."""
    module = chunk("gpt", False, 1, 3, dropout=False)
    x = torch.randn(2, SEQ, 8, requires_grad=True)
    halves = split(capture(module, (x,)))
    values = values_of(module, {"0": x}, output=torch.randn(2, SEQ, 8))
    outputs = halves.forward.run(values)
    lasting = {value.untyped_storage().data_ptr() for value in values.values()}
    saved = {port.name: value for port, value in outputs.items() if port.role is Role.SAVED}
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in saved.values()}
    assert not lasting & storages.keys()
    eager = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: eager.add(t.untyped_storage()) or t, lambda t: t):
        y = module(x)
    kept = {s.data_ptr(): s.nbytes() for s in eager if s.data_ptr() not in {v.data_ptr() for v in values.values()}}
    assert sum(storages.values()) <= sum(kept.values()) and y.requires_grad


def test_the_narrower_of_a_value_and_its_cast_is_saved(values_of: Any, in_three: Any, bitwise_equal: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        joint = capture(module, (x,))
    values = values_of(module, {"0": x}, output=torch.randn(3, 8, dtype=torch.bfloat16))
    halves = check(joint, values, in_three, bitwise_equal)
    saved = [halves.forward.run(values)[port] for port in halves.forward.outputs if port.role is Role.SAVED]
    assert saved and all(value.dtype is torch.bfloat16 for value in saved if value.numel() > 3)  # 3: the norm's statistics
    weights = [halves.backward.inputs.count(Port(Role.PARAMETER, name)) for name in ("0.weight", "1.weight")]
    assert weights == [1, 1]  # cast again, rather than one narrow copy per micro-batch


class TimesBuffer(torch.autograd.Function):
    """Keeps its factor where autograd does not see that it changes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Remembers(nn.Module):
    """Its backward stands on a buffer that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = TimesBuffer.apply(x * self.weight, self.scale)
        self.scale.mul_(3)
        return y.sum()


def test_a_buffer_that_changes_is_saved_as_it_was(values_of: Any, in_three: Any, bitwise_equal: Any) -> None:
    module, x = Remembers(), torch.randn(3)
    joint = capture(module, (x,))
    halves = check(joint, values_of(module, {"0": x}), in_three, bitwise_equal)
    values = values_of(module, {"0": x})
    gradient = Port(Role.GRADIENT, "weight")
    expected = joint.run(values)[gradient]
    outputs = halves.forward.run(values)
    values[Port(Role.BUFFER, "scale")].copy_(outputs[Port(Role.BUFFER, "scale")])  # as a caller does between F and B
    assert torch.equal(whole_backward(halves).run(values | outputs)[gradient], expected)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.rand_like(gradient)


class NoisyBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Noisy.apply(self.b(Noisy.apply(self.a(x)))).sum()


def test_random_numbers_in_a_backward_keep_their_order(values_of: Any, in_three: Any, bitwise_equal: Any) -> None:
    module, x = NoisyBackward(), torch.randn(2, 3)
    halves = check(capture(module, (x,)), values_of(module, {"0": x}), in_three, bitwise_equal)
    assert not any(nodes.is_random(node) for node in halves.weight.graph.nodes)


class Sine(torch.autograd.Function):
    """Saves what it is given, and computes the cosine in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].cos() * grads[0]


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Sine.apply(self.first(x)))


def test_what_a_backward_computes_of_saved_values_is_not_forward(values_of: Any, in_three: Any, bitwise_equal: Any) -> None:
    """It needs no gradient, and was computed and saved by F."""
    module, x = Waves(), torch.randn(3, 4)
    joint = capture(module, (x,), loss=lambda out, target: (out - target).square().sum(), target=x)
    halves = check(joint, values_of(module, {"0": x, "target": x}), in_three, bitwise_equal)
    of_cosine = [any(n.target is torch.ops.aten.cos.default for n in p.graph.nodes) for p in (halves.forward, halves.backward)]
    assert of_cosine == [False, True]


def test_one_parameter_alone_has_all_of_its_backward_in_w() -> None:
    halves = split(capture(nn.Embedding(4, 3), (torch.tensor([1, 2]),)))
    assert not halves.backward.outputs and halves.weight.outputs == (Port(Role.GRADIENT, "weight"),)


def test_boundaries_are_few() -> None:
    """W of a block takes in two tensors per linear layer, once each: what went in and the gradient of what came out."""
    module = chunk("gpt", False, 1, 3, dropout=False)
    halves = split(capture(module, (torch.randn(2, SEQ, 8, requires_grad=True),)))
    linears = 4
    between = [port for port in halves.backward.outputs if port.role is Role.SAVED]
    assert len(between) == linears - 1  # the last one's is the tangent
    assert len(halves.weight.inputs) == 2 * linears
