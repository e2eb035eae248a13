"""helixrt.compile: one line, any model; what was true of the model stays true of it."""

from __future__ import annotations

import copy
import importlib
import pickle
import warnings
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import helixrt
from helixrt.errors import ConfigError
from helixrt.passes.errors import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """A little of everything: dropout, buffers that change, an unused and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((8,), 2.0), requires_grad=False)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        h = F.dropout(F.relu(self.bn(self.a(x))), 0.2, self.training)
        return self.b(h * self.frozen) * scale


@helixrt.compile(loss=F.mse_loss, microbatches=2)
class Decorated(Net):
    pass


@helixrt.compile
class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).pow(2).mean()


X, Y = torch.randn(8, 4), torch.randn(8, 3)


def plain_loop(model: nn.Module, microbatches: int, x: torch.Tensor = X, **kwargs: Any) -> torch.Tensor:
    losses = []
    for a, b in zip(x.chunk(microbatches), Y.chunk(microbatches), strict=True):
        loss = F.mse_loss(model(a, **kwargs), b)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")
    for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_is_a_plain_loop() -> None:
    """Loss, gradients over three calls, buffers and random state; in train, then eval mode, then another shape."""
    model = Decorated()
    plain = copy.deepcopy(model)
    for mode, size in ((True, 8), (False, 8), (True, 4)):
        model.train(mode), plain.train(mode)
        for _ in range(3 if mode else 1):
            state = torch.get_rng_state()
            loss = model.train_step(X[:size], target=Y[:size], scale=0.5)
            after = torch.get_rng_state()
            torch.set_rng_state(state)
            halves = zip(X[:size].chunk(2), Y[:size].chunk(2), strict=True)
            losses = [F.mse_loss(plain(a, scale=0.5), b) for a, b in halves]
            sum(each / 2 for each in losses).backward()
            assert torch.equal(after, torch.get_rng_state())
            torch.testing.assert_close(loss, torch.stack(losses).mean().detach())
            assert loss.shape == () and not loss.requires_grad
            assert_same_state(model, plain)
    assert len(model.train_step.captured) == 3, "other shapes and modes have graphs of their own"
    explanation = model.explain()
    assert explanation.state == "woven" and explanation.counts["woven"]["compute"] > 0
    assert explanation.measured_ms.keys() == {"forward", "backward", "woven"}
    assert "class Woven" in explanation.code["woven"] and "woven" in str(explanation)


def test_autocast_is_the_callers() -> None:
    model = helixrt.compile(Net().eval(), loss=F.mse_loss, microbatches=2)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.train_step(X, target=Y)
        losses = [F.mse_loss(plain(a), b) for a, b in zip(X.chunk(2), Y.chunk(2), strict=True)]
    sum(each / 2 for each in losses).backward()
    assert torch.equal(loss, torch.stack(losses).mean().detach())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3)
    model.train_step(X, target=Y)
    assert len(model.train_step.captured) == 2, "without autocast there is another graph"


def test_the_model_stays_what_it_was() -> None:
    keys = list(Net().state_dict())
    model = Decorated()
    assert isinstance(model, Net) and type(model) is Decorated and list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Net().named_parameters()]
    before = model.eval()(X)
    model.train().train_step(X, target=Y)
    model.load_state_dict(Net().state_dict())
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is Decorated and torch.equal(copied.eval()(X), model.eval()(X)) and before.shape == (8, 3)
    cloned = copy.deepcopy(model)
    for other in (copied, cloned):
        other.train().zero_grad()
        other.train_step(X, target=Y)
        assert other.train_step.model is other and other.a.weight.grad is not model.a.weight.grad
    assert Decorated().train_step is not model.train_step


def test_type_checkers_know_the_options_that_there_are() -> None:
    from helixrt.compile.options import Keywords, Options

    typed = {name: getattr(kind, "__forward_arg__", kind) for name, kind in Keywords.__annotations__.items()}
    assert typed == Options.__annotations__


def test_forms_of_the_decorator() -> None:
    bare = Bare()
    assert bare.train_step(X).shape == () and bare.a.weight.grad is not None
    assert bare.explain().reason == "microbatches=1: nothing to weave with"
    net = Net()
    assert helixrt.compile(net, loss=F.mse_loss, microbatches=4) is net and type(net) is Net
    net.train_step(X, target=Y)
    assert net.explain().state == "woven"
    helixrt.compile(net, loss=F.mse_loss, strands=1, microbatches=2)  # compiled anew
    net.train_step(X, target=Y)
    assert (net.explain().state, net.explain().reason) == ("single strand", "strands=1")
    copied = pickle.loads(pickle.dumps(helixrt.compile(Net(), loss=lambda o, t: (o - t).abs().mean())))
    with pytest.raises(ConfigError, match="lambda or local function"):
        copied.train_step(X, target=Y)


def test_the_module_can_be_called_as_the_function() -> None:
    """`import helixrt.compile` puts the module where `helixrt.compile` was the function."""
    module = importlib.import_module("helixrt.compile")
    assert module(Net(), loss=F.mse_loss).train_step.options.loss is F.mse_loss
    assert module(microbatches=3)(Net()).train_step.options.microbatches == 3


def test_replaced_parameters_and_buffers_are_read_in_place() -> None:
    model = Decorated()
    model.train_step(X, target=Y)
    model.double()
    model.bn.running_mean = torch.ones(8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    model.zero_grad(), plain.zero_grad()
    state = torch.get_rng_state()
    x, y = X.double(), Y.double()
    model.train_step(x, target=y)
    torch.set_rng_state(state)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(plain(a), b) / 2).backward()
    assert_same_state(model, plain)
    model.a.requires_grad_(False)
    model.zero_grad()
    model.train_step(x, target=y)
    assert model.a.weight.grad is None and model.b.weight.grad is not None


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, batch: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
        return self.a(batch["x"] * mask)


def test_batches_are_split_as_asked() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    model = helixrt.compile(Masked(), loss=F.mse_loss, microbatches=4, chunk_dims={1: None})
    plain = copy.deepcopy(model)
    x = X.clone().requires_grad_()
    model.train_step({"x": x}, mask, target=Y)
    z = X.clone().requires_grad_()
    F.mse_loss(plain({"x": z}, mask), Y).backward()
    assert_same_state(model, plain)
    torch.testing.assert_close(x.grad, z.grad)
    sideways = helixrt.compile(copy.deepcopy(plain), loss=lambda o, t: F.mse_loss(o, t.t()), microbatches=2)
    sideways.train_step.options = sideways.train_step.options.of(
        {"loss": sideways.train_step.options.loss, "microbatches": 2, "chunk_dims": {"mask": None, "target": 1}}
    )
    plain.zero_grad(), sideways.zero_grad()
    F.mse_loss(plain({"x": X}, mask), Y).backward()
    sideways.train_step({"x": X}, mask=mask, target=Y.t())
    assert_same_state(sideways, plain)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"microbatches": 0}, None, r"microbatches=0: must be a whole number"),
        ({"strands": 3}, None, r"strands=3: must be one of 1, 2"),
        ({"memory_gb": -1.0}, None, r"memory_gb=-1.0: must be a number of GiB, at least 0"),
        ({"microbatch": 2}, None, r"microbatch=2: is no option"),
        ({"schedule": "2f2b"}, None, r"schedule=2f2b: must be auto, a Schedule, or one of gpipe, 1f1b"),
        ({"schedule": "1f1b"}, (X, Y), r"schedule=1f1b: is for a pipeline"),
        ({"cuts": ["layers.1"]}, (X, Y), r"cuts=.*: is for a pipeline"),
        ({"memory_gb": 8.0}, (X, Y), r"memory_gb=8.0: is for a pipeline"),
        ({"context": "ring"}, (X, Y), r"context=ring: is for a pipeline"),
        ({"context": "rings"}, None, r"context=rings: must be one of gathered, ring"),
        ({"memory_gb": 8.0, "cuts": ["layers.1"]}, None, r"memory_gb=8.0: is for chunks that are balanced"),
        ({"memory_gb": 8.0, "adapt": helixrt.Adaptation()}, None, r"memory_gb=8.0: would hold for the first order alone"),
        ({"adapt": helixrt.Adaptation()}, (X, Y), r"adapt=.*: is for a pipeline"),
        ({"cuts": "layers.1"}, None, r"cuts=layers\.1: must be a list"),
        ({"microbatches": 3}, (X, Y), r"8 rows.*must be a multiple of microbatches=3"),
        ({"microbatches": 2}, (X, Y[:6]), r"6 rows.*0 has 8 rows"),
        ({"microbatches": 2, "loss": None}, (X, Y), r"target=Tensor: needs a loss"),
        ({"microbatches": 2, "loss": None}, (X, None), r"loss=None: must be given"),
        ({"loss": lambda o, t: (o - t).abs()}, (X, Y), r"must be a scalar"),
        ({"microbatches": 2, "chunk_dims": {"y": 1}}, (X, Y), r"chunk_dims=y: names no argument"),
        ({"microbatches": 2}, (X.clone().requires_grad_() * 2, Y), r"detach it"),
        ({"strands": True}, None, r"strands=True: must be one of 1, 2"),
        ({"strict": 1}, None, r"strict=1: must be one of True, False"),
        ({"chunk_dims": [0]}, None, r"chunk_dims=\[0\]: must map"),
        ({"chunk_dims": {0: True}}, None, r"chunk_dims=\{0: True\}: must map"),
        ({"microbatches": 2}, (UserDict(x=X), Y), r"UserDict: is not split into micro-batches; pass tensors"),
        ({"microbatches": 2}, (SimpleNamespace(x=X), Y), r"SimpleNamespace: is not split into micro-batches"),
        ({"microbatches": 2}, (X.numpy(), Y), r"ndarray: is not split into micro-batches"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model = helixrt.compile(Net(), **{"loss": F.mse_loss, **options})
        model.train_step(call[0], target=call[1])


def test_models_that_cannot_train_are_told_in_a_line() -> None:
    with pytest.raises(ConfigError, match="RecursiveScriptModule: is TorchScript; give the module it was made from"):
        helixrt.compile(torch.jit.script(nn.Linear(4, 3)), loss=F.mse_loss)
    with pytest.raises(ConfigError, match="weight=not initialized: lazy modules .* call model"):
        helixrt.compile(nn.LazyLinear(3), loss=F.mse_loss).train_step(X, target=Y)


@pytest.mark.parametrize(
    ("model", "loss", "keywords", "message"),
    [
        (nn.Linear(4, 3), lambda o, t: (F.mse_loss(o, t), o), {}, r"raises TypeError\('the loss is no tensor but .* tuple'\)"),
        (nn.Linear(4, 3), lambda o, t: None, {}, r"no tensor but of type NoneType"),
        (nn.Linear(5, 3), F.mse_loss, {}, r"raises RuntimeError\('a and b must have same reduction dim.*mend it first"),
        (nn.Linear(4, 3), F.mse_loss, {"bogus": 1}, r"not called with the arguments it takes: .*bogus"),
        (nn.LSTM(4, 3), F.mse_loss, {}, r"change: use nn\.LSTMCell"),
    ],
    ids=["tuple", "None", "shapes", "keyword", "LSTM"],
)
def test_the_models_own_errors_are_told(model: Any, loss: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        helixrt.compile(model, loss=loss).train_step(X, target=Y, **keywords)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if y.sum() > 0:
            y = 2 * y
        return y


def test_what_cannot_be_captured_says_where_or_falls_back() -> None:
    with pytest.raises(CaptureError, match=r"test_compile\.py:\d+: cannot be captured: .*; change: "):
        model = helixrt.compile(Branching(), loss=F.mse_loss)
        model.train_step(X, target=Y)
    model = helixrt.compile(Branching(), loss=F.mse_loss, microbatches=2, strict=False)
    plain = copy.deepcopy(model)
    x = X.clone().requires_grad_()
    with pytest.warns(UserWarning, match="trained by a plain loop, without strands: .*test_compile.py"):
        loss = model.train_step(x, target=Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train_step(x, target=Y)
    z = X.clone().requires_grad_()
    for _ in range(2):
        assert torch.equal(loss, plain_loop(plain, 2, z))
    assert_same_state(model, plain)
    torch.testing.assert_close(x.grad, z.grad)
    assert model.explain().state == "fallback" and "cannot be captured" in model.explain().reason
    wrong = helixrt.compile(Branching(), loss=lambda o, t: (o - t) ** 2, strict=False)
    with pytest.warns(UserWarning, match="plain loop"), pytest.raises(ConfigError, match=r"loss=of shape \[8, 3\]: must be"):
        wrong.train_step(X, target=Y)
    wrong.train_step.options = wrong.train_step.options.of({"loss": F.mse_loss, "strict": False})
    with pytest.raises(ConfigError, match="loss=without a gradient"):
        wrong.requires_grad_(False).train_step(X, target=Y)
