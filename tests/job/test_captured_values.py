"""Python values that a captured graph has in it: a change is followed from its step on, or refused with the value's name."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.engines.captured import CapturedModel
from helixrt.engines.captured_engine import CapturedEngine
from helixrt.errors import MisuseError
from tests.job.test_captured import STEPS, WIDTH, Perceptron, started, vectors


class Settings:
    """What forward reads and is no attribute of a module."""

    gain, weights, powers = 1.0, torch.ones(WIDTH, dtype=torch.float64), [1.0]


SCALE = 1.0


class Alterable(Perceptron):
    """Numbers, tensors and a random layer that graphs have in them."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.factor, self.plain, self.dropout = 2.0, torch.ones(WIDTH, dtype=torch.float64), nn.Dropout(0.5)
        self.settings = Settings()
        self.register_buffer("passing", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        settings = self.settings
        x = self.dropout(x) * self.factor * self.plain * self.passing * SCALE * settings.gain * Settings.weights
        return super().forward(x * sum(settings.powers), scale)


class Weighed(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0
        self.penalty = self.made()

    def made(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function whose closure has a number, which `beta` sets."""
        beta = 0.0

        def penalty(output: torch.Tensor, power: float = 2.0) -> torch.Tensor:
            return beta * output.abs().pow(power).mean()

        return penalty

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target) * self.factor + self.penalty(output)


def closed_over(part: Weighed) -> None:
    part.penalty.__closure__[0].cell_contents = 0.5


FOLLOWED: dict[str, tuple[Callable[[Any], object], str]] = {  # changes of the model, and the name of the value
    "dropout": (lambda model: setattr(model.dropout, "p", 0.0), r"^dropout\.p$"),
    "number": (lambda model: setattr(model, "factor", 1.0), "^factor$"),
    "tensor": (lambda model: setattr(model, "plain", model.plain * 2), "^plain$"),
    "hook": (lambda model: model.head.register_forward_hook(lambda *all: 2 * all[2]), r"^head\._forward_hooks$"),
    "loss": (lambda model: setattr(loss_of(model), "factor", 2.0), r"^loss\.factor$|^loss$"),
    "closure": (lambda model: closed_over(loss_of(model)), r"^beta in the closure of loss\.penalty$"),
    "default": (
        lambda model: (setattr(loss_of(model).penalty, "__defaults__", (1.0,)), closed_over(loss_of(model))),
        r"loss\.penalty",
    ),
    "settings": (lambda model: setattr(model.settings, "gain", 3.0), r"^settings\.gain|^settings$"),
    "list": (lambda model: setattr(model.settings, "powers", [1.0, 2.0]), r"^settings\.powers|^settings$"),
    "global": (lambda model: setattr(sys.modules[__name__], "SCALE", 4.0), r"^tests\.job\.test_captured_values\.SCALE$"),
    "tensor of a class": (
        lambda model: setattr(Settings, "weights", Settings.weights * 2),
        r"^tests\.job\.test_captured_values\.Settings\.weights$",
    ),
}


def loss_of(model: nn.Module) -> Any:
    return model.train_step.options.loss


def losses_of(change: Callable[[Any], object] | None, *, after: int) -> tuple[list[float], CapturedModel]:
    """By step, with a change after some steps; nothing is learnt."""
    torch.manual_seed(5)
    model = Alterable().double()
    session, part = started(model, Weighed(), rate=0.0, change=change if after == 0 else None)
    found = []
    for number, step in enumerate(session.steps(vectors(), until=STEPS)):
        if change is not None and number == after > 0:
            change(model)
        for inputs, named, target in step:
            found.append(step.train(part, *inputs, target=target, **named))
        assert step.commit().committed
    return found, part


@pytest.mark.parametrize("case", FOLLOWED)
def test_a_value_that_changes_after_the_capture_is_followed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been so from the start, from the very step on."""
    change, name = FOLLOWED[case]
    monkeypatch.setattr(sys.modules[__name__], "SCALE", SCALE)
    monkeypatch.setattr(Settings, "weights", Settings.weights)
    before, _ = losses_of(None, after=0)
    found, part = losses_of(change, after=1)
    engine = part._engine
    assert isinstance(engine, CapturedEngine)
    (captured,) = [value for value, calls in engine._training._captures.items() if calls]
    assert re.search(name, captured), captured
    monkeypatch.undo()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", SCALE)
    monkeypatch.setattr(Settings, "weights", Settings.weights)
    expected, _ = losses_of(change, after=0)
    assert found[:1] == before[:1] and found[1:] == expected[1:] and found[1:] != before[1:]


def test_with_a_copy_for_tp_or_cp_ranks_values_of_the_model_are_refused_and_others_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Alterable().double()
    session, part = started(model, rate=0.0)
    part._engine._captured_parts = replace(part._engine._captured_parts, copied=True)
    found = []
    with pytest.raises(MisuseError, match=r"^factor was changed after session\.parallelize, which has cut the model over tp"):
        for number, step in enumerate(session.steps(vectors(), until=STEPS)):
            if number == 1:
                monkeypatch.setattr(sys.modules[__name__], "SCALE", 4.0)
            if number == 2:
                model.factor = 5.0
            for inputs, named, target in step:
                found.append(step.train(part, *inputs, target=target, **named))
            assert step.commit().committed
    assert len(found) == 2 and part._engine._training._captures.keys() == {"tests.job.test_captured_values.SCALE"}


def test_a_value_that_changes_in_each_step_is_refused_by_its_name() -> None:
    model = Alterable().double()
    session, part = started(model)
    message = r"factor is no tensor, and it has changed for the third time.*pass it as an input"
    with pytest.raises(MisuseError, match=message):
        for number, step in enumerate(session.steps(vectors() * 2, until=2 * STEPS)):
            model.factor = float(number)
            for inputs, named, target in step:
                step.train(part, *inputs, target=target, **named)
            assert step.commit().committed and number < 4
