"""What ranks hold of a model in part, made whole: parameters, and the gradients after the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from helixrt.parallel.collective_functions import all_reduce
from helixrt.parallel.group import Group
from helixrt.train.models.parallel import ParallelGroups, Shard, layouts


def join(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """The full tensor; inverse of `take` for parts in the order of ranks."""
    size = parts[0].shape[shard.dim]
    own = [length // len(parts) for length in shard.sections] or [size]
    by_section = zip(*(part.split(own, dim=shard.dim) for part in parts), strict=True)
    return torch.cat([piece for section in by_section for piece in section], dim=shard.dim)


def reduce_gradients(module: nn.Module, groups: ParallelGroups) -> None:
    """Make the gradients of a step those of the mean loss over all tokens of cp and ep. In place.

    The oracle of a session, which sums by `parameter_layouts` while backward runs.
    Call it on every rank after the last micro-batch, when `p.grad` holds gradients of this rank's mean loss. Sums what
    sequence parallelism and routing leave in parts over tp, averages over cp and ep; an expert's gradient has every
    token of ep in it and is only divided. One all-reduce per group and dtype.
    """
    known = layouts(module)
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = parameter.grad
    if groups.tp is not None:
        _sum([g for n, g in gradients.items() if known[n].partial], groups.tp, 1)
    same = groups.ep is not None and groups.ep == groups.cp
    shared = [g for n, g in gradients.items() if not known[n].expert]
    experts = [g for n, g in gradients.items() if known[n].expert]
    if groups.cp is not None:
        _sum(shared if same else [*shared, *experts], groups.cp, groups.cp.size)
    if groups.ep is not None:
        if not same:
            _sum(shared, groups.ep, groups.ep.size)
        for gradient in experts:
            gradient.div_(groups.ep.size)


@torch.no_grad()
def _sum(gradients: Iterable[torch.Tensor], group: Group, divisor: int) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for members in by_dtype.values():
        total = all_reduce(torch.cat([g.flatten() for g in members]), group.name).div_(divisor)
        for gradient, part in zip(members, total.split([g.numel() for g in members]), strict=True):
            gradient.copy_(part.view_as(gradient))
