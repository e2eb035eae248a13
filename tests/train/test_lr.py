"""The learning rate: linear warm-up to the peak, cosine to the minimum, as the job's own formula had it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from helixrt.train.config import OptimConfig
from helixrt.train.optimizer import adamw, cosine_with_warmup

OPTIM = OptimConfig(lr=0.4, min_lr_ratio=0.25, warmup_steps=10)


def formula(step: int, steps: int, optim: OptimConfig) -> float:
    """The rate of update `step`, from 1."""
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    lowest = optim.lr * optim.min_lr_ratio
    return lowest + (optim.lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))


def rates(count: int, steps: int, optim: OptimConfig) -> list[list[float]]:
    """Of `count` updates, one of each parameter group."""
    model = nn.Linear(2, 2)
    optimizer = adamw(model.parameters(), optim)
    scheduler = cosine_with_warmup(optimizer, steps, optim)
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup,steps", [(10, 50), (0, 1), (0, 10), (5, 5), (10, 3), (1, 2)])
def test_the_rates_are_those_of_the_formula(warmup: int, steps: int) -> None:
    optim = OptimConfig(lr=0.4, min_lr_ratio=0.25, warmup_steps=warmup)
    for step, found in enumerate(rates(steps + 12, steps, optim), start=1):
        assert found == [pytest.approx(formula(step, steps, optim), rel=1e-12)] * 4


def test_shape() -> None:
    found = [first for first, *_ in rates(60, 50, OPTIM)]
    assert found[0] == pytest.approx(0.04) and found[9] == pytest.approx(0.4) == max(found)
    assert found[29] == pytest.approx((0.4 + 0.1) / 2)  # half way between step 10 and 50
    assert found[49] == pytest.approx(0.1) == min(found[10:])
    assert found[50:] == [found[49]] * 10


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Linear(2, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = adamw(model.parameters(), OptimConfig(lr=0.5, weight_decay=0.1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.weight, before[0] * (1 - 0.5 * 0.1)) and torch.equal(model.bias, before[1])
