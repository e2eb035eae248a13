"""The memory for catch-up is divided by the state as it is after the first update, which optimizers fill."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from helixrt.engines.first_step import growth_of
from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.job.config import CatchupConfig, JobConfig, MeshConfig
from helixrt.job.step_rules import publish_memory
from helixrt.protocol.catchup_memory import GB
from tests.engines.test_optimizer_own_state import Kept

ADAM = partial(torch.optim.Adam, lr=0.1)


class OneByOne(torch.optim.SGD):
    """Looks at a value before the next parameter has state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)
            float(parameter.sum())


class Handle(torch.optim.SGD):
    def __del__(self) -> None:
        pass


def nbytes(optimizer: torch.optim.Optimizer) -> int:
    entries = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, dtype=torch.bfloat16))
    made[0].bias.requires_grad_(False)
    return made


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        ADAM,
        partial(ADAM, fused=True),
        partial(ADAM, amsgrad=True, lr=torch.tensor(0.1)),
        partial(torch.optim.Adafactor, lr=0.1),
        partial(torch.optim.NAdam, lr=0.1),
        Kept,
    ],
)
def test_it_is_what_the_first_step_makes(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    parameters = list(model().parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer, calls = make(parameters if make is Kept else groups), list[object]()
    optimizer.register_step_post_hook(lambda *arguments: calls.append(arguments))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    settings = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    expected = growth_of([optimizer])
    assert not calls and not optimizer.state and all(parameter.grad is None for parameter in parameters)
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == settings
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert expected == nbytes(optimizer)
    assert growth_of([optimizer]) == 0 or not optimizer.state, "it has its state"


@pytest.mark.parametrize("make", [OneByOne, Handle])
def test_where_no_copy_can_step_it_is_that_of_adam(make: Callable[..., torch.optim.Optimizer]) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    assert growth_of([make(parameters, lr=0.1)]) == 8 * 8


def test_snapshots_of_a_donor_fit_with_what_the_optimizer_will_hold() -> None:
    layer = nn.Linear(1 << 8, 1 << 8, bias=False)  # parameters and sums of 256 KiB each
    said = dict[str, str]()
    store = cast(Any, SimpleNamespace(put_if_absent=said.__setitem__))
    room = CatchupConfig(memory_gb=10.5 * 256 * 1024 / GB)  # two sums are always there
    config = JobConfig(mesh=MeshConfig(replicas=9), catchup=room)
    for life, optimizer in (("adam", ADAM(layer.parameters())), ("sgd", torch.optim.SGD(layer.parameters(), lr=0.1))):
        engine = ModuleEngine(Registered.of(layer, [optimizer]))
        publish_memory(config, engine, store, life, 0)
        engine.close()
    assert [json.loads(text) for text in said.values()] == [[5, 2], [7, 8]]  # sums to replay, states of three and of one
