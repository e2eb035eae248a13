"""Hyperparameters of a script that resumes a checkpoint with others: which are used, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim import lr_scheduler as schedulers

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State
from tests.engines.scenarios import same_state

MakeScheduler = Callable[[Optimizer], Any]


class Script:
    def __init__(self, takes: str, scheduler: MakeScheduler | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = AdamW(self.model.parameters(), **options)
        self.scheduler = scheduler and scheduler(self.optimizer)
        given = [self.scheduler] if self.scheduler else []
        self.engine = ModuleEngine(Registered.of(self.model, [self.optimizer], given, hyperparameters=takes))
        self.steps = 0

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    def step(self, number: int) -> None:
        self.engine.begin(lambda bucket: None)
        self.engine.backward(self.model(torch.full((4, 3), float(number))).square().sum(), last=True)
        self.engine.end()
        record = CommitRecord(number, number, "", ((0, 0),))
        self.engine.apply(record, [bucket.clone() for bucket in self.engine.buckets])

    def resume(self, other: Script) -> str:
        state = other.engine.state()
        self.engine.load(State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars)))
        return self.engine.resumed()


def trained(steps: int = 3, scheduler: MakeScheduler | None = None, **options: Any) -> Script:
    script = Script("checkpoint", scheduler, **options)
    for number in range(1, steps + 1):
        script.step(number)
    return script


def test_those_of_the_checkpoint_are_used_and_both_values_are_told() -> None:
    script = Script("checkpoint", lr=0.1, weight_decay=0.5, betas=(0.8, 0.99))
    text = script.resume(trained(lr=0.001, weight_decay=0.5))
    assert text == (
        "the checkpoint has other hyperparameters than the script: lr of group 0 of optimizer 0 is 0.001 there and 0.1 in "
        "the script, betas of group 0 of optimizer 0 is (0.9, 0.999) there and (0.8, 0.99) in the script; the checkpoint's are "
        "used; register(hyperparameters='script') takes the script's"
    )
    assert script.group["lr"] == 0.001 and script.group["betas"] == (0.9, 0.999)
    script.step(4)


@pytest.mark.parametrize("rate", [float, torch.tensor], ids=["number", "tensor"])
def test_those_of_the_script_are_used_where_it_says_so(rate: Callable[[float], Any]) -> None:
    scripts = [Script("script", lr=rate(0.5), weight_decay=0.5) for _ in range(2)]
    before = trained(lr=rate(0.25), weight_decay=0.1)
    for script in scripts:
        assert script.resume(before).endswith("; the script's are used")
        assert float(script.group["lr"]) == 0.5 and script.group["weight_decay"] == 0.5
        script.step(4)
    same_state(scripts[0].engine.state(), scripts[1].engine.state())


def test_a_script_that_changes_nothing_is_told_nothing() -> None:
    """Also where the training has changed rates and momenta meanwhile."""
    cycle = lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=9)  # noqa: E731
    for takes in ("checkpoint", "script"):
        for make in (None, cycle, lambda o: schedulers.ExponentialLR(o, 0.5)):
            script, before = Script(takes, make, lr=0.5), trained(scheduler=make, lr=0.5)
            assert script.resume(before) == ""
            same_state(script.engine.state(), before.engine.state())


SCHEDULES: dict[str, MakeScheduler] = {
    "recursive": lambda o: schedulers.ExponentialLR(o, 0.5),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.5**step),
    "in turn": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 1.0, 1), schedulers.ExponentialLR(o, 0.5)], milestones=[1]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_with_a_schedule_follows_the_script_from_where_the_schedule_is(name: str) -> None:
    script = Script("script", SCHEDULES[name], lr=0.8)
    text = script.resume(trained(2, SCHEDULES[name], lr=0.4))
    assert "initial_lr of group 0 of optimizer 0 is 0.4 there and 0.8 in the script" in text
    plain = trained(2, SCHEDULES[name], lr=0.8)
    for number in (3, 4):
        script.step(number)
        plain.step(number)
        assert script.group["lr"] == pytest.approx(plain.group["lr"])


def test_settings_of_a_schedule_are_told_and_taken() -> None:
    before = trained(2, lambda o: schedulers.CosineAnnealingLR(o, T_max=10), lr=0.4)
    kept = Script("checkpoint", lambda o: schedulers.CosineAnnealingLR(o, T_max=100), lr=0.4)
    assert "T_max of scheduler 0 is 10 there and 100 in the script; the checkpoint's are used" in kept.resume(before)
    assert kept.scheduler.T_max == 10
    taken = Script("script", lambda o: schedulers.CosineAnnealingLR(o, T_max=100), lr=0.4)
    assert taken.resume(before) and taken.scheduler.T_max == 100


def test_a_replica_that_joins_a_running_run_takes_the_run_s() -> None:
    running, script = trained(lr=0.1), Script("script", lr=0.5)
    script.engine.load(running.engine.state())
    assert script.group["lr"] == 0.1


def test_another_choice_is_refused() -> None:
    with pytest.raises(MisuseError, match="hyperparameters='both': must be 'checkpoint' or 'script'"):
        Script("both", lr=0.1)
