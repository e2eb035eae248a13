"""The learning rate as a function of the step alone: linear warm-up, then a cosine down to the minimum."""

from __future__ import annotations

import math

from helixrt.train.config import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """The rate of update `step` (1 to `steps`; later ones keep the minimum).

    Reaches `optim.lr` at `warmup_steps` and `optim.lr * optim.min_lr_ratio` at `steps`.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    lowest = optim.lr * optim.min_lr_ratio
    return lowest + (optim.lr - lowest) * 0.5 * (1.0 + math.cos(math.pi * progress))
