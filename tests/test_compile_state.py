"""helixrt.compile and what models do besides tensors: state in buffers and attributes, hooks, changes between steps.

Each is either trained as a plain loop trains it, or refused in a line that says where and what to change.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import helixrt
from helixrt.errors import ConfigError
from helixrt.passes.capture import check_names
from helixrt.passes.errors import CaptureError

X, Y = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(0)
MICROBATCHES = 4


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Two layers; what happens between them is the case."""

    def __init__(self, between: Callable[[Net, torch.Tensor], torch.Tensor] = lambda self, h: h) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.between = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.0), between
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("spread", torch.ones(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", None)
        self.scale, self.weights, self.calls = 2.0, torch.full((8,), 3.0, dtype=torch.float64), 0
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.between(self, torch.tanh(self.a(x)))))


def plain_loop(model: nn.Module, loss: Any = F.mse_loss, x: torch.Tensor = X) -> torch.Tensor:
    losses = []
    for a, b in zip(x.chunk(MICROBATCHES), Y.chunk(MICROBATCHES), strict=True):
        output = loss(model(a), b)
        (output / MICROBATCHES).backward()
        losses.append(output.detach())
    return torch.stack(losses).mean()


def both(model: nn.Module, plain: nn.Module) -> None:
    """A step of each, from the same random state, must leave the same."""
    torch.manual_seed(7)
    loss = model.train_step(X, target=Y)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    torch.testing.assert_close(loss, plain_loop(plain), rtol=1e-12, atol=0)
    assert torch.equal(after, torch.get_rng_state())
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert one.grad.layout == other.grad.layout
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense(), rtol=1e-10, atol=1e-13)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def compiled(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    plain = copy.deepcopy(model)
    return helixrt.compile(model, loss=F.mse_loss, microbatches=MICROBATCHES), plain


# ------------------------------------------------------------------------------------------------ state in forward


def moving_average(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen + 1
    self.mean = self.mean + (h.detach().mean(0) - self.mean) / self.seen
    return (h - self.mean) * self.spread


def old_value_is_used(self: Net, h: torch.Tensor) -> torch.Tensor:
    h = h * self.spread
    self.spread = 0.5 * self.spread + h.detach().abs().mean(0)
    return h * h


def swapped(self: Net, h: torch.Tensor) -> torch.Tensor:
    h = h * self.spread
    self.spread, self.mean = self.mean + 1, self.spread
    return h


def in_place(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.seen += 1
    with torch.no_grad():
        self.mean.mul_(0.9).add_(0.1 * h.mean(0))
    return h - self.mean


def in_place_and_assigned(self: Net, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.mean.mul_(0.9)
    self.mean = self.mean + 0.1 * h.detach().mean(0)
    return h - self.mean


def checkpointed(self: Net, h: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.dropout(torch.tanh(x), 0.3), h, use_reentrant=False)


def hooked_tensor(self: Net, h: torch.Tensor) -> torch.Tensor:
    h = 2 * h
    h.register_hook(lambda gradient: 3 * gradient)
    return h


def written(self: Net, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 0] = 0
    return F.relu_(h.mul_(2))


@pytest.mark.grid
@pytest.mark.parametrize(
    "between",
    [moving_average, old_value_is_used, swapped, in_place, in_place_and_assigned, checkpointed, hooked_tensor, written],
    ids=lambda f: f.__name__,
)
def test_what_forward_does_between_layers(between: Any) -> None:
    model, plain = compiled(Net(between))
    for _ in range(2):
        both(model, plain)
    assert model.explain().state == "woven"


def number(self: Net, h: torch.Tensor) -> torch.Tensor:
    return h * h.mean().item()


def rows(self: Net, h: torch.Tensor) -> torch.Tensor:
    return h + h[h.sum(1) > 0].mean(0)


def attribute(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.weights = 0.9 * self.weights + h.detach().mean(0)
    return h * self.weights


def attribute_in_place(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.weights.mul_(0.9)
    return h * self.weights


def other_shape(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.mean = h.detach()
    return h


def filled(self: Net, h: torch.Tensor) -> torch.Tensor:
    self.empty = h.detach().mean(0)
    return h


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (number, r"test_compile_state\.py:\d+: .*a number is read from a tensor; change: keep the value a tensor"),
        (
            rows,
            r"test_compile_state\.py:\d+: .*a size depends on the value of a tensor; change: give the result a fixed size",
        ),
        (attribute, r"forward may change the tensor 'weights', which it reads; change: make it a buffer"),
        (attribute_in_place, r"in place that is neither argument nor buffer; change: make it a buffer"),
        (other_shape, r"replaces the buffer 'mean' by a tensor of another shape"),
        (filled, r"replaces the buffer 'empty' by a tensor of another shape"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_graphs_cannot_carry(between: Any, message: str) -> None:
    model, _ = compiled(Net(between))
    with pytest.raises(CaptureError, match=message):
        model.train_step(X, target=Y)


def test_hooks_on_modules() -> None:
    net = Net()
    net.a.register_forward_hook(lambda module, args, output: 2 * output)
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    both(*compiled(net))
    net = Net()
    net.a.register_full_backward_hook(lambda module, given, made: None)
    with pytest.raises(CaptureError, match="change: hook tensors instead"):
        compiled(net)[0].train_step(X, target=Y)


# ------------------------------------------------------------------------------------------------ changes between steps


def test_changes_between_steps_are_seen() -> None:
    def scaled(self: Net, h: torch.Tensor) -> torch.Tensor:
        return h * self.scale * self.weights

    model, plain = compiled(Net(scaled))
    changes: list[Callable[[Net], Any]] = [
        lambda net: None,
        lambda net: setattr(net, "scale", 5.0),
        lambda net: setattr(net.drop, "p", 0.4),
        lambda net: setattr(net, "weights", net.weights * 2),
        lambda net: net.weights.add_(1),
        lambda net: net.a.register_forward_hook(lambda module, args, output: output + 1),
        lambda net: net.a.requires_grad_(False),
    ]
    for change in changes:
        for net in (model, plain):
            change(net)
        both(model, plain)
    assert len(model.train_step.captured) == len(changes) - 1, "a tensor changed in place needs no new graph"


def test_another_layer_or_function_is_seen() -> None:
    class Chosen(Net):
        activation, powers = torch.tanh, (1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.drop(self.activation(self.a(x))) ** self.powers[0])

    net = Chosen()
    net.activation = torch.tanh
    model, plain = compiled(net)
    changes: list[Callable[[Chosen], Any]] = [
        lambda net: setattr(net, "drop", nn.Tanh()),
        lambda net: setattr(net, "drop", nn.Sigmoid()),
        lambda net: setattr(net, "activation", torch.sigmoid),
        lambda net: setattr(net, "powers", (2, 2)),
    ]
    for change in changes:
        for each in (model, plain):
            change(each)
        both(model, plain)
    assert len(model.train_step.captured) == len(changes)


def test_a_model_that_is_dropped_is_freed() -> None:
    model, _ = compiled(Net())
    model.train_step(X, target=Y)
    held = weakref.ref(model), weakref.ref(model.a.weight)
    del model
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_capture_lets_go_of_its_batch(strict: bool) -> None:
    model = helixrt.compile(Net(number), loss=F.mse_loss, strict=strict)
    x, y = X.clone(), Y.clone()
    held = [weakref.ref(x), weakref.ref(y)]
    with pytest.raises(CaptureError) if strict else pytest.warns(UserWarning, match="number is read from a tensor"):
        model.train_step(x, target=y)
    del x, y
    gc.collect()
    assert [each() for each in held] == [None, None]
    assert strict or "number is read from a tensor" in model.explain().reason


class Config:
    """What models keep settings in: attributes, containers, other objects, itself."""

    def __init__(self) -> None:
        self.scale, self.powers, self.table, self.inner, self.own = 2.0, [1, 2], {"shift": 1.0}, OfSlots(), self


class OfSlots:
    __slots__ = ("offset",)

    def __init__(self) -> None:
        self.offset = 0.5


def test_changed_settings_are_seen() -> None:
    def configured(self: Net, h: torch.Tensor) -> torch.Tensor:
        config = self.config
        return h ** config.powers[0] * config.scale + config.table["shift"] + config.inner.offset + self.extra[0]

    net = Net(configured)
    net.config, net.extra = Config(), [1.0]
    model, plain = compiled(net)
    changes: list[Callable[[Net], Any]] = [
        lambda net: None,
        lambda net: setattr(net.config, "scale", 5.0),
        lambda net: net.config.powers.__setitem__(0, 3),
        lambda net: net.config.table.update(shift=2.0),
        lambda net: setattr(net.config.inner, "offset", 4.0),
        lambda net: net.extra.__setitem__(0, 3.0),
        lambda net: setattr(net, "config", Config()),
    ]
    for change in changes:
        for each in (model, plain):
            change(each)
        both(model, plain)
        both(model, plain)
    assert len(model.train_step.captured) == len(changes)


def test_what_is_in_a_queue_or_a_list_of_modules_is_seen() -> None:
    """Modules in a plain list are none of the model's submodules."""

    def listed(self: Net, h: torch.Tensor) -> torch.Tensor:
        return self.held[0](h) * self.factors[-1]

    model = Net(listed)
    model.factors, model.held = deque([1.0, 2.0]), [nn.Sequential(nn.Dropout(0.0))]
    model, plain = compiled(model)
    both(model, plain)
    for each in (model, plain):
        each.factors.append(3.0)
    both(model, plain)
    for each in (model, plain):
        each.held[0][0].p = 0.5
    both(model, plain)
    for each in (model, plain):
        each.held[0].eval()
    both(model, plain)
    assert len(model.train_step.captured) == 4
    both(model, plain)
    assert len(model.train_step.captured) == 4


def test_another_attention_kernel_has_graphs_of_its_own() -> None:
    def attention(self: Net, h: torch.Tensor) -> torch.Tensor:
        heads = h.view(1, 1, *h.shape)
        return F.scaled_dot_product_attention(heads, heads, heads).view_as(h)

    model, plain = compiled(Net(attention))
    both(model, plain)
    fast = model.explain().code["forward"]
    with sdpa_kernel(SDPBackend.MATH):
        both(model, plain)
        slow = model.explain().code["forward"]
    assert "flash" in fast and "flash" not in slow
    both(model, plain)
    assert model.explain().code["forward"] == fast and len(model.train_step.captured) == 2


def test_too_many_kinds_of_calls_are_told_once() -> None:
    model = helixrt.compile(nn.Linear(8, 8).double(), loss=F.mse_loss, shapes=2)
    with pytest.warns(UserWarning, match="more than shapes=2 kinds of calls") as raised:
        for rows in (2, 4, 6, 8):
            model.train_step(X[:rows], target=Y[:rows])
    assert len(raised) == 1 and len(model.train_step.captured) == 2


# ------------------------------------------------------------------------------------------------ gradients


class RandomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


def test_random_numbers_in_the_backward_keep_one_strand() -> None:
    model, plain = compiled(Net(lambda self, h: F.dropout(RandomGradient.apply(h), 0.2)))
    both(model, plain)
    explanation = model.explain()
    assert explanation.state == "single strand" and "backward draws random numbers" in explanation.reason


def test_sparse_gradients_accumulate() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, sparse=True).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table((9 * torch.sigmoid(x[:, 0])).long())

    model, plain = compiled(Looked())
    for _ in range(2):
        both(model, plain)


def test_parameters_must_not_change_in_the_midst_of_a_step() -> None:
    model, _ = compiled(Net())

    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        parameter.sub_(parameter.grad)

    model.a.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ConfigError, match=r"a\.weight=changed by a gradient hook: must stay until train_step is done"):
        model.train_step(X, target=Y)


def main_gradients(model: nn.Module) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Gradients moved to a place of their own by hooks on what accumulates them, as Megatron's data parallelism does."""
    found: dict[str, torch.Tensor] = {}
    held = []
    for name, parameter in model.named_parameters():
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def moved(*_: Any, name: str = name, parameter: nn.Parameter = parameter) -> None:
            found[name] = found.get(name, 0) + parameter.grad
            parameter.grad = None

        accumulator.register_hook(moved)
        held.append(accumulator)
    return found, held


def test_hooks_on_accumulation_are_called() -> None:
    model, plain = compiled(Net())
    both(model, plain)
    model.zero_grad(), plain.zero_grad()
    moved, expected = main_gradients(model), main_gradients(plain)
    for _ in range(2):
        both(model, plain)
    assert moved[0].keys() == expected[0].keys() and moved[0]
    for name, gradient in moved[0].items():
        torch.testing.assert_close(gradient, expected[0][name], rtol=1e-10, atol=1e-13)
    assert all(parameter.grad is None for parameter in model.parameters())
    moved[1].clear(), expected[1].clear()
    gc.collect()
    both(model, plain)


def test_targets_have_gradients() -> None:
    model, plain = compiled(Net())
    one, other = (Y.clone().requires_grad_() for _ in range(2))
    model.train_step(X, target=one)
    F.mse_loss(plain(X), other).backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("lost", [nn.Parameter(torch.ones(8).double()), torch.ones(8).double().requires_grad_()])
def test_a_tensor_outside_of_the_model_would_lose_its_gradient(lost: torch.Tensor) -> None:
    model = helixrt.compile(Net(), loss=lambda output, target: F.mse_loss(output * lost, target))
    message = r"test_compile_state\.py:\d+: .* no parameter of the model requires grad; change: make it a parameter"
    with pytest.raises(CaptureError, match=message):
        model.train_step(X, target=Y)


def test_inference_mode_has_no_gradients() -> None:
    model, _ = compiled(Net())
    with torch.inference_mode(), pytest.raises(ConfigError, match="inference_mode=True"):
        model.train_step(X, target=Y)
    with torch.no_grad():
        model.train_step(X, target=Y)
    assert model.a.weight.grad is not None


# ------------------------------------------------------------------------------------------------ arguments and outputs


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def test_arguments_and_outputs_of_many_kinds() -> None:
    """Constants, containers, a tensor of no dimensions, one tensor twice; the model returns a dataclass."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8).double()

        def forward(self, x: Any, *, labels: torch.Tensor, times: Any, extra: Any, mode: str | None = None) -> Output:
            logits = self.a(x[0] + x[1]["again"]) * times + (1 if mode == "up" else 0) + extra[labels[:, 0]].unsqueeze(1)
            return Output(F.mse_loss(logits, labels.double()), logits)

    model = Model()
    plain = copy.deepcopy(model)
    helixrt.compile(model, microbatches=MICROBATCHES, chunk_dims={"extra": None})
    labels, extra = torch.arange(64).view(8, 8) % 5, torch.randn(5, dtype=torch.float64)
    for times, mode in ((2, None), (2.5, "up"), (torch.tensor(3.0, dtype=torch.float64), None)):
        loss = model.train_step([X, {"again": X}], labels=labels, times=times, extra=extra, mode=mode)
        parts = zip(X.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True)
        losses = [plain([x, {"again": x}], labels=y, times=times, extra=extra, mode=mode).loss for x, y in parts]
        (sum(losses) / MICROBATCHES).backward()
        torch.testing.assert_close(loss, torch.stack(losses).mean().detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.a.weight.grad, plain.a.weight.grad, rtol=1e-10, atol=1e-13)


class Weighted(nn.CrossEntropyLoss):
    """A loss of the user's own that is a module with a buffer."""


def test_a_submodule_called_loss_is_not_taken_for_the_loss() -> None:
    """Ports go by name, and both have a buffer `loss.weight`."""
    model = Net(lambda self, h: h + 0 * self.loss(h, h.detach().softmax(1)))
    model.loss = nn.CrossEntropyLoss(weight=torch.linspace(1.0, 2.0, 8, dtype=torch.float64))
    other = Weighted(weight=torch.linspace(2.0, 3.0, 8, dtype=torch.float64))
    both_have = helixrt.compile(model, loss=other, microbatches=MICROBATCHES, strict=True)
    with pytest.raises(CaptureError, match="the model's submodule 'loss' and the loss function both have 'weight'"):
        both_have.train_step(X, target=Y.softmax(1))
    check_names(model, model.loss)  # one tensor under both names
