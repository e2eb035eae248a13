"""Parameters that a loop trains and has not registered are named in the first step; what is legal is not refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import MisuseError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).relu())


def engine_of(*models: nn.Module) -> ModuleEngine:
    named = {str(number): model for number, model in enumerate(models)}
    parameters = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
    return ModuleEngine(Registered.of(named, [torch.optim.SGD(parameters, lr=0.1)]))


def work(engine: ModuleEngine, loss: Callable[[], torch.Tensor], weight: float | None = None) -> None:
    engine.begin(lambda bucket: None)
    engine.backward(loss(), weight, last=True)
    engine.end()


def x() -> torch.Tensor:
    return torch.ones(2, 3)


def a_copy() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net = Net()
    used = copy.deepcopy(net)
    return engine_of(net), lambda: used(x()).sum()


def a_head() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net = Net()
    return engine_of(net.body), lambda: net(x()).sum()


def a_part_made_later() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net = Net()

    def loss() -> torch.Tensor:
        net.prompt = nn.Parameter(torch.ones(2, 3))
        return net(net.prompt).sum()

    return engine_of(net), loss


def a_teacher_that_is_not_frozen() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net, teacher = Net(), Net()
    return engine_of(net), lambda: (net(x()) - teacher(x())).square().sum()


def a_parameter_of_no_module() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net, prompt = Net(), nn.Parameter(torch.ones(2, 3))
    return engine_of(net), lambda: net(prompt).sum()


def a_copy_within_a_compiled_part() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net, other = Net(), nn.Linear(1, 1)
    compiled = torch.compile(other, backend="aot_eager")
    return engine_of(net), lambda: compiled(net(x())).sum()


def a_copy_behind_a_checkpoint() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net, other = Net(), nn.Linear(1, 1)
    return engine_of(net), lambda: checkpoint(other, net(x()), use_reentrant=True).sum()


def tensors_in_place_of_parameters() -> tuple[ModuleEngine, Callable[[], torch.Tensor]]:
    net = Net()
    engine = engine_of(net)
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in net.named_parameters()}
    return engine, lambda: functional_call(net, weights, x()).sum()


WRONG: dict[Callable[[], Any], str] = {
    a_copy: r"the loss depends on parameter (body|head)\.\w+ of a module Net, which .* is not registered; register its module",
    a_head: r"parameter head\.\w+ of a module Net, which requires a gradient and is not registered",
    a_part_made_later: r"parameter prompt of a module Net",
    a_teacher_that_is_not_frozen: r"of a module Net, .*freeze it with requires_grad_\(False\), or detach",
    a_parameter_of_no_module: r"an nn\.Parameter of shape \[2, 3\]",
    a_copy_within_a_compiled_part: r"parameter (_orig_mod\.)?(weight|bias) of a module",
    a_copy_behind_a_checkpoint: "parameter (weight|bias) of a module Linear, which .* is not registered",
    tensors_in_place_of_parameters: "no registered parameter has a gradient after the first step",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_what_is_trained_without_being_registered_is_named_in_the_first_step(wrong: Callable[[], Any]) -> None:
    engine, loss = wrong()
    with pytest.raises(MisuseError, match=WRONG[wrong]):
        work(engine, loss)


def test_a_part_that_joins_later_is_found() -> None:
    """Losses are looked at in backwards 1, 2, 3, 4, 8, 16, …"""
    net, other = Net(), nn.Linear(1, 1)
    engine = engine_of(net)
    for _ in range(5):
        work(engine, lambda: net(x()).sum())
    with pytest.raises(MisuseError, match="of a module Linear"):
        for _ in range(3):
            work(engine, lambda: other(net(x())).sum())


def test_inputs_that_require_a_gradient_and_frozen_modules_are_legal() -> None:
    net, teacher = Net(), Net().requires_grad_(False)
    engine = engine_of(net)
    change = torch.zeros(2, 3, requires_grad=True)
    for _ in range(3):
        work(engine, lambda: (net(x() + change) - teacher(x() + change)).square().sum())
    assert change.grad is not None


def test_an_unregistered_module_may_be_trained_by_a_backward_of_its_own() -> None:
    net, probe = Net(), nn.Linear(1, 1)
    engine = engine_of(net)
    engine.begin(lambda bucket: None)
    engine.backward((y := net(x())).sum(), last=True)
    probe(y.detach()).sum().backward()
    engine.end()


def test_a_registered_model_may_be_unused_in_some_steps() -> None:
    """A GAN by turns."""
    generator, judge = Net(), Net()
    engine = engine_of(generator, judge)
    for turn in range(4):
        work(engine, lambda turn=turn: (generator, judge)[turn % 2](x()).sum())  # type: ignore[misc]


def test_a_batch_without_weight_may_use_nothing() -> None:
    net = Net()
    engine = engine_of(net)
    work(engine, lambda: torch.zeros((), requires_grad=True).sum(), weight=0)
    with pytest.raises(MisuseError, match="no registered parameter has a gradient"):
        work(engine, lambda: torch.zeros((), requires_grad=True).sum())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_are_not_refused(reentrant: bool) -> None:
    net = Net()
    inputs = x().requires_grad_()
    work(engine_of(net), lambda: checkpoint(net, inputs, use_reentrant=reentrant).sum())
