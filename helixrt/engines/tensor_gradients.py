"""Gradients over the tp ranks of one replica: of parameters that all of them hold whole, the sum.

In: parameters, of which DTensors are cut over tp and all others are whole on every rank; gradients as backward gives them. Out:
in the flat buckets of whole parameters, the same bits on all tp ranks. A bucket is summed by one asynchronous all-reduce, as
soon as its gradients are final: backward goes on meanwhile. Each rank gives its term where a rank's gradient is one (a
DTensor's `Partial`; parameters whose entry in the plan says so), and else rank 0 gives its gradient and the others zeros, so
that ranks whose kernels round differently keep equal parameters.

The first gradients of parameters that all ranks compute are compared over the ranks: if they differ, each rank had a part of
the batch, the heads or the sequence, and the plan does not declare it. That raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from helixrt.engines.inner_group import InnerGroup, PendingSum
from helixrt.engines.sharded import is_sharded, local, placement_on
from helixrt.errors import MisuseError

_ELEMENTS = 64  # of a gradient that are compared, and as many norms of parts of it
_TOLERANCE = 0.02  # relative; gradients of the same computation differ by rounding, those of different parts by about 1


@dataclass(frozen=True)
class TensorRanks:
    """The tp ranks of one replica. `terms`: places (module, key) of parameters that are whole on every rank, and of whose
    gradient each rank computes one term."""

    group: InnerGroup
    terms: Sequence[tuple[nn.Module, str]] = ()

    def cuts(self, tensor: torch.Tensor) -> bool:
        """Whether each tp rank holds another part of it."""
        if not is_sharded(tensor):
            return False
        placement = placement_on(tensor, self.group.mesh)
        return placement is not None and not placement.is_replicate()


class _Form(Enum):
    """What a rank's gradient of a whole parameter is; fixed by the first one."""

    TERM = "one term of the sum"
    WHOLE = "all of it"


class TensorGradients:
    """Of the parameters `named`, in that order. `begin`, `part` for each gradient, `start` for each bucket of whole parameters,
    `finished` until it is; all ranks in the same order, which that of backward is."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], ranks: TensorRanks) -> None:
        self._names = [name for name, _ in named]
        self._group = ranks.group
        self.whole = [not ranks.cuts(parameter) for _, parameter in named]
        terms = {id(module._parameters[key]) for module, key in ranks.terms}
        self._forms: dict[int, _Form] = {i: _Form.TERM for i, (_, p) in enumerate(named) if id(p) in terms and self.whole[i]}
        self._unchecked = [index for index, whole in enumerate(self.whole) if whole and index not in self._forms]
        self._samples: dict[int, torch.Tensor] = {}
        self._pending: dict[int, PendingSum] = {}

    def begin(self) -> None:
        self._pending.clear()
        self._samples.clear()

    def part(self, index: int, gradient: Any, parameter: Any) -> torch.Tensor:
        """This rank's part of the gradient of a DTensor, for the parameter's own part: its term of it, where it is one."""
        from torch.distributed.tensor import Partial

        wanted = parameter.placements
        if self.whole[index]:
            (placement,) = gradient.placements
            given = _Form.TERM if placement.is_partial() else _Form.WHOLE
            if self._forms.setdefault(index, given) is _Form.TERM:
                wanted = (Partial(),)
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return local(gradient)

    def start(self, bucket: int, flat: torch.Tensor, views: Sequence[tuple[int, int, torch.Tensor, bool]]) -> None:
        """Begin the sum of a bucket of whole parameters. `views`: (index, start, local gradient, present) of each in it."""
        for index, start, view, present in views:
            if self._forms.get(index) is not _Form.TERM:
                if present and index in self._unchecked:
                    self._samples[index] = _sample(view)
                if self._group.rank:
                    flat[start : start + view.numel()].zero_()
        self._pending[bucket] = self._group.start_sum(flat)

    def finished(self, bucket: int, wait: bool) -> bool:
        """Whether the bucket's sum is there; `wait`: until it is. Raises Retryable if a rank is lost, when it waits."""
        pending = self._pending.get(bucket)
        if pending is None:
            return True
        if not wait and not pending.is_done():
            return False
        pending.wait()
        del self._pending[bucket]
        return True

    def check(self) -> None:
        """Raises MisuseError for a parameter whose first gradients differ over the ranks. All ranks call it after a batch."""
        self._unchecked = [index for index in self._unchecked if self._forms.get(index) is not _Form.TERM]
        if not self._unchecked:
            return
        device = torch.device(self._group.mesh.device_type)
        nothing = torch.zeros(2 * _ELEMENTS, dtype=torch.float64, device=device)
        mine = torch.stack([self._samples.get(index, nothing).to(device) for index in self._unchecked])
        every = torch.stack(list(self._group.gather(mine))).cpu()
        every = every.view(self._group.size, len(self._unchecked), 2, _ELEMENTS)  # elements, norms
        scale = every.abs().amax((0, 3))
        far = ((every - every[0]).abs().amax((0, 3)) > _TOLERANCE * scale).any(1).tolist()
        seen = (scale > 0).any(1).tolist()
        for index, differs in zip(self._unchecked, far, strict=True):
            if differs:
                raise MisuseError(
                    f"the gradients of {self._names[index]} differ between the tp ranks, each of which holds it whole: it sees "
                    "a part of the heads, of the sequence or of other cut activations. Give its module the style "
                    "'replicated_with_grad_allreduce' in tp_plan, or correct the plan around it"
                )
        self._unchecked = [index for index, known in zip(self._unchecked, seen, strict=True) if not known]
        self._samples.clear()


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Some elements, evenly spaced, and norms of as many parts; 2 * _ELEMENTS numbers in float64."""
    flat = gradient.detach().reshape(-1).double()
    size = flat.numel()
    if size == 0:
        return flat.new_zeros(2 * _ELEMENTS)
    places = torch.arange(_ELEMENTS, device=flat.device) * size // _ELEMENTS
    parts = torch.nn.functional.pad(flat, (0, -size % _ELEMENTS)).view(_ELEMENTS, -1)
    return torch.cat((flat[places], parts.norm(dim=1)))
