"""The learning rate: linear warm-up to the peak, cosine to the minimum, a function of the step alone."""

from __future__ import annotations

import pytest

from helixrt.train.config import OptimConfig
from helixrt.train.lr import learning_rate

OPTIM = OptimConfig(lr=0.4, min_lr_ratio=0.25, warmup_steps=10)


def test_shape() -> None:
    rates = [learning_rate(step, 50, OPTIM) for step in range(1, 61)]
    assert rates[0] == pytest.approx(0.04) and rates[9] == pytest.approx(0.4) == max(rates)
    assert rates[29] == pytest.approx((0.4 + 0.1) / 2)  # half way between step 10 and 50
    assert rates[49] == pytest.approx(0.1) == min(rates[10:])
    assert rates[50:] == [rates[49]] * 10
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("warmup,steps", [(0, 1), (0, 10), (5, 5), (10, 3)])
def test_odd_lengths(warmup: int, steps: int) -> None:
    optim = OptimConfig(lr=0.4, warmup_steps=warmup)
    assert all(0 < learning_rate(step, steps, optim) <= 0.4 for step in range(1, steps + 5))
