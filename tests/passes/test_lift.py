"""Casts of parameters leave the graphs: values stay, each cast is made once per step, and again when its parameter changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import helixrt
from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.capture import capture
from helixrt.passes.lift import lift
from helixrt.passes.parts import Part, Port, Role
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.held import lasting_of

MICROBATCHES, WIDTH = 4, 16
ATEN = torch.ops.aten


class Block(nn.Module):
    """A norm, two linear layers, and a weight that the model casts itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return (h.bfloat16() @ self.own.t().to(torch.bfloat16)).float()


class Twice(Block):
    """Uses two weights twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        return h + self.narrow(torch.relu(self.wide(h)))


X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))


class ParameterCasts(TorchDispatchMode):
    """Counts casts of tensors with these shapes to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes = {parameter.shape for parameter in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        source = args[1] if operator is ATEN.copy_.default else args[0] if operator is ATEN._to_copy.default else None
        if source is not None and source.dtype is torch.float32 and result.dtype is torch.bfloat16:
            self.count += result.shape in self.shapes or result.t().shape in self.shapes
        return result


@contextmanager
def forward_in(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        yield


def plain_step(model: nn.Module, dtype: torch.dtype | None = torch.bfloat16) -> float:
    losses = []
    for x, y in zip(X.chunk(MICROBATCHES), Y.chunk(MICROBATCHES), strict=True):
        kind = next(model.parameters()).dtype
        with forward_in(dtype):
            loss = mse_loss(model(x.to(kind)).to(kind), y.to(kind))
        (loss / MICROBATCHES).backward()
        losses.append(loss.item())
    return sum(losses) / MICROBATCHES


def given(joint: Part, module: nn.Module) -> dict[Port, torch.Tensor]:
    values = {Port(Role.INPUT, "0"): X, Port(Role.TARGET, "target"): Y, Port(Role.TANGENT, "loss"): torch.ones(())}
    return values | lasting_of(module)


@pytest.mark.parametrize("build", [Block, Twice])
def test_the_part_without_casts_gives_the_same_bits(build: Callable[[], nn.Module]) -> None:
    model = build()
    with forward_in(torch.bfloat16):
        joint = capture(model, (X,), loss=mse_loss, target=Y)
    lifted = lift(joint)
    assert {(cast.name, cast.dtype) for cast in lifted.casts} == {
        (name, torch.bfloat16) for name, _ in model.named_parameters() if not name.startswith("norm")
    }
    values = given(joint, model)
    Casts(values, lifted.casts).refresh()
    expected, found = joint.run(values), lifted.part.run(values)
    assert expected.keys() == found.keys() and all(torch.equal(found[port], expected[port]) for port in expected)
    left = [node for node in lifted.part.graph.nodes if nodes.is_cast(node) and node.args[0].op == "placeholder"]
    assert all(node.args[0].name in ("input_0", "target") for node in left)


def test_a_cast_to_a_wider_type_and_one_of_a_part_of_a_parameter_stay() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.double() @ self.weight.double().t()).float() + x[:, :4] * self.weight[0, :4].bfloat16()

    joint = capture(Odd(), (X,), loss=mse_loss, target=Y[:, :4])
    assert lift(joint).part is joint


def test_each_weight_is_cast_once_in_a_step_and_gradients_are_those_of_eager_autocast() -> None:
    plain = Block()
    model = helixrt.compile(copy.deepcopy(plain), loss=mse_loss, microbatches=MICROBATCHES, autocast=torch.bfloat16)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(3):  # the update changes parameters, so casts have to be made again
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain_step(plain)
        with ParameterCasts(model) as casts:
            loss = model.train_step(X, target=Y)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None and parameter.grad.dtype is torch.float32
            assert torch.equal(parameter.grad, other.grad), name
        for optimizer in optimizers:
            optimizer.step()
    assert casts.count == 5  # two weights, two biases, and the model's own; the plain loop casts them in each micro-batch


def test_around_train_step_autocast_is_taken_over() -> None:
    plain = Block()
    model = helixrt.compile(copy.deepcopy(plain), loss=mse_loss, microbatches=MICROBATCHES)
    plain_step(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.train_step(X, target=Y)
        model.zero_grad()
        with ParameterCasts(model) as casts:
            model.train_step(X, target=Y)
    assert casts.count == 5
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_weight_that_is_used_twice_is_no_further_from_float64_than_eager_is() -> None:
    """Eager adds its two gradients in bfloat16, graphs in the type of the parameter."""
    eager = Twice()
    model = helixrt.compile(copy.deepcopy(eager), loss=mse_loss, microbatches=MICROBATCHES, autocast=torch.bfloat16)

    class Exact(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x + self.narrow(torch.relu(self.wide(self.norm(x))))
            h = h @ self.own.t()
            return h + self.narrow(torch.relu(self.wide(h)))

    exact = Exact().double()
    exact.load_state_dict(eager.state_dict())
    plain_step(exact, None)
    plain_step(eager)
    model.train_step(X, target=Y)

    def error(of: nn.Module) -> float:
        pairs = zip(of.parameters(), exact.parameters(), strict=True)
        return sum(((a.grad - b.grad) ** 2).sum().item() for a, b in pairs) ** 0.5

    assert 0 < error(model) <= 1.02 * error(eager)


def test_casts_are_made_again_only_for_what_has_changed() -> None:
    model = Block()
    with forward_in(torch.bfloat16):
        joint = capture(model, (X,), loss=mse_loss, target=Y)
    casts = Casts(lasting_of(model), lift(joint).casts)
    casts.refresh()
    assert casts.made == 5
    assert casts.size_bytes == sum(2 * p.numel() for name, p in model.named_parameters() if not name.startswith("norm"))
    before = {port: value.data_ptr() for port, value in casts.lasting.items() if port.role is Role.CAST}
    with torch.no_grad():
        model.wide.weight.mul_(2)
    casts.refresh()
    assert casts.made == 6
    wide = casts.lasting[Port(Role.CAST, "wide.weight as bfloat16")]
    assert torch.equal(wide, model.wide.weight.bfloat16())
    model.wide.weight.data.mul_(2)  # counts no version
    casts.forget()
    casts.refresh()
    assert casts.made == 11 and torch.equal(wide, model.wide.weight.bfloat16())
    assert {port: value.data_ptr() for port, value in casts.lasting.items() if port.role is Role.CAST} == before


def test_other_types_of_autocast_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"autocast.*must be torch\.bfloat16, or None"):
        helixrt.compile(Block(), loss=mse_loss, autocast=torch.float16)
