"""The built-in job's optimizer and learning rates, as `torch.optim` has them.

In: the model's parameters and `OptimConfig`. Out: AdamW (Loshchilov & Hutter, 2019) with decay of matrices only, and a
scheduler: linear warm-up, then a cosine down to the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from helixrt.train.config import OptimConfig


def adamw(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Decoupled weight decay on parameters with two or more dimensions, none on the others. Experts that dp_shard ranks share
    are plain tensors where all else is sharded by FSDP2; one call cannot update both, so they have groups of their own. There
    are always four groups, some of them empty: schedulers have a state for each, which any mesh can load."""
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {(m, sharded): [] for m in (True, False) for sharded in (False, True)}
    for parameter in parameters:
        kinds[parameter.dim() >= 2, hasattr(parameter, "device_mesh")].append(parameter)
    groups = [
        {"params": members, "weight_decay": optim.weight_decay if matrices else 0.0} for (matrices, _), members in kinds.items()
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def cosine_with_warmup(optimizer: torch.optim.Optimizer, steps: int, optim: OptimConfig) -> LambdaLR:
    """Stepped once per update, which it counts: those that were not applied change neither parameters nor rate.

    The rate reaches `optim.lr` at update number `warmup_steps`, and `optim.lr * optim.min_lr_ratio` at `steps`; later updates
    keep it.
    """

    def factor(done: int) -> float:
        step = done + 1
        if step <= optim.warmup_steps:
            return step / optim.warmup_steps
        progress = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
        return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
