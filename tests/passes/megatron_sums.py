"""Megatron's f and g over the default group, as autograd functions: tensor parallelism written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol


class SumForward(torch.autograd.Function):
    """Megatron's g: sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class SumBackward(torch.autograd.Function):
    """Megatron's f: nothing in forward, sum in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(funcol.all_reduce(gradient.contiguous(), "sum", dist.group.WORLD))
