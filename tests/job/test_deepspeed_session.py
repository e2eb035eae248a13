"""`session.deepspeed`: what is refused before any rank connects, and an engine's own calls in the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helixrt.errors import ConfigError, MisuseError
from helixrt.job.deepspeed import wrap_calls
from helixrt.job.mesh import Mesh
from tests.job.session_world import LocalHost, session_with


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "mesh.dp_shard=1: must be above 1 with DeepSpeed"),
        ({"mesh": Mesh(dp_shard=2, tp=2)}, "mesh.tp=2: must be 1 with DeepSpeed"),
        ({"mesh": Mesh(dp_shard=2, pp=2)}, "mesh.pp=2: "),
        ({"mesh": Mesh(dp_shard=2, cp=2)}, "mesh.cp=2: "),
        ({"mesh": Mesh(dp_shard=2), "dtype": "bfloat16"}, "dtype=bfloat16: is that of DeepSpeed's own configuration"),
    ],
)
def test_what_deepspeed_cannot_train_is_refused_before_an_engine_is_made(settings: dict[str, Any], rule: str) -> None:
    def made() -> None:
        raise AssertionError("the engine was made")

    with pytest.raises(ConfigError, match=rule):
        session_with(LocalHost(), **settings).deepspeed(made)


def test_it_comes_in_place_of_register() -> None:
    session, model = session_with(LocalHost()), nn.Linear(2, 1)
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(MisuseError, match="in place of session.register"):
        session.deepspeed(nn.Linear(2, 1))


class Step:
    def __init__(self) -> None:
        self.calls: list[tuple[float, Any]] = []

    def backward(self, loss: torch.Tensor, weight: Any) -> None:
        self.calls.append((float(loss), weight))

    def micro_batch_done(self) -> None:
        self.calls.append((0.0, "done"))


class Engine:
    def gradient_accumulation_steps(self) -> int:
        return 4


def test_the_calls_of_an_engine_act_on_the_step() -> None:
    engine: Any = Engine()
    step = Step()
    steps: list[Any] = [step]
    wrap_calls(engine, lambda: steps[-1])
    loss = torch.tensor(6.0)
    assert float(engine.backward(loss)) == 1.5, "as DeepSpeed returns it"
    engine.backward(loss, weight=3)
    engine.step()
    assert step.calls == [(6.0, None), (6.0, 3), (0.0, "done")]
    with pytest.raises(MisuseError, match="takes the loss"):
        engine.backward(loss, retain_graph=True)
    with pytest.raises(MisuseError, match="takes no arguments"):
        engine.step({"epoch": 1})
    steps.append(None)
    with pytest.raises(MisuseError, match="engine.step was called outside the loop"):
        engine.step()
