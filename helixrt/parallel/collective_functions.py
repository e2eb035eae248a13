"""Functional collectives with the gradients that parallel layers need.

In: a tensor and a group's name (and size, and rank). Out: a tensor; every collective is waited for at once, and a
compiler that sees the `_c10d_functional` operators may move the wait. Each function's backward is the conjugate of its
forward (Shoeybi et al., 2019, f and g; Korthikanti et al., 2022). Operators rather than
`torch.distributed._functional_collectives`: outside of tracing those give a tensor subclass that waits when it is used.

"Replicated" below means that every rank holds the same tensor and computes the same gradient for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Sum over the group; no gradient of its own."""
    return _ops.wait_tensor(_ops.all_reduce(x, "sum", group))


def _gather(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """Concatenate the ranks' tensors along `dim`."""
    out = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
    return out if dim == 0 else out.unflatten(0, (size, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """This rank's slice along `dim` of the sum over the group."""
    if dim:
        x = x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim, 0).flatten(0, 1)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def _slice(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return x.narrow(dim, rank * (x.shape[dim] // size), x.shape[dim] // size).clone(memory_format=torch.contiguous_format)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, size
        return _gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _reduce_scatter(grads[0], ctx.dim, ctx.group, ctx.size), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, size
        return _reduce_scatter(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], ctx.dim, ctx.group, ctx.size), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str, rank: int, size: int) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.size = dim, group, size
        return _slice(x, dim, rank, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _gather(grads[0], ctx.dim, ctx.group, ctx.size), None, None, None, None


class _Uncut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: str, rank: int, size: int) -> torch.Tensor:
        ctx.dim, ctx.rank, ctx.size = dim, rank, size
        return _gather(x, dim, group, size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return _slice(grads[0], ctx.dim, ctx.rank, ctx.size), None, None, None, None


def all_to_all(x: torch.Tensor, group: str, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """The next `sent[i]` rows of dim 0 go to rank i; the result has `received[i]` from it; no gradient of its own."""
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return all_to_all(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], grads[0].new_ones((), dtype=ctx.dtype)


def enter(x: torch.Tensor, group: str) -> torch.Tensor:
    """A replicated tensor goes into computation that each rank does a part of: its gradients are summed."""
    return _Enter.apply(x, group)


def leave(x: torch.Tensor, group: str) -> torch.Tensor:
    """Summands become their sum, replicated."""
    return _Leave.apply(x, group)


def gather(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """Slices along `dim` become whole, for computation that each rank does a part of: gradients are reduce-scattered."""
    return _Gather.apply(x, dim, group, size)


def scatter(x: torch.Tensor, dim: int, group: str, size: int) -> torch.Tensor:
    """Summands become this rank's slice of their sum; gradients are gathered."""
    return _Scatter.apply(x, dim, group, size)


def cut(x: torch.Tensor, dim: int, group: str, rank: int, size: int) -> torch.Tensor:
    """A replicated tensor becomes this rank's slice; gradients are gathered, and replicated again."""
    return _Cut.apply(x, dim, group, rank, size)


def uncut(x: torch.Tensor, dim: int, group: str, rank: int, size: int) -> torch.Tensor:
    """Slices become whole, for replicated computation: of its gradient each rank takes its slice."""
    return _Uncut.apply(x, dim, group, rank, size)


def exchange(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """All-to-all: piece i of dim 0 goes to rank i, and piece i of the result came from rank i; so do gradients."""
    each = [x.shape[0] // size] * size
    return _Exchange.apply(x, group, each, each)


def exchange_uneven(x: torch.Tensor, group: str, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """As `exchange`, with pieces of `sent[i]` rows for rank i and of `received[i]` from it, none perhaps."""
    return _Exchange.apply(x, group, sent, received)


def attach(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """`x`, unchanged; in backward the scalar `loss` gets gradient 1, as if it were added to the model's loss.

    So a loss of a layer in the middle of a pipeline needs no way to its end. Backward must not be scaled; who divides
    the model's loss by the number of micro-batches divides `loss` as well.
    """
    return _Attach.apply(x, loss)
