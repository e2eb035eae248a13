"""How many bytes of state optimizers will make in their first step.

In: optimizers as they were registered. Out: the bytes of this rank's part. A copy of each optimizer steps on parameters without
memory; where that fails (a step that reads values), its state is taken for two float32 numbers for each element, as Adam's.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from helixrt.engines.sharded import local
from helixrt.engines.state_tree import flatten

_IN_DOUBT = 8  # bytes for each element
_FOR_DEVICES = ("foreach", "fused", "capturable")  # settings that the meta device does not have


def growth_of(optimizers: Iterable[Optimizer]) -> int:
    """For parameters that have no state yet. The optimizers are left as they are, and their hooks do not run."""
    return sum(_growth(optimizer) for optimizer in optimizers)


@torch.no_grad()
def _growth(optimizer: Optimizer) -> int:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stand_ins = {id(p): nn.Parameter(torch.empty_like(local(p), device="meta"), p.requires_grad) for p in parameters}
    new = {id(stand_ins[id(p)]) for p in parameters if p.requires_grad and not optimizer.state.get(p)}
    elements = sum(p.numel() for p in stand_ins.values() if id(p) in new)
    if not elements or hasattr(type(optimizer), "__del__"):  # which would free what a copy shares
        return _IN_DOUBT * elements
    try:
        twin = _copied(optimizer, {**stand_ins, id(optimizer.state): defaultdict(dict)})
    except Exception:  # of a user's class, which cannot be copied
        return _IN_DOUBT * elements
    return sum(_first_step(twin, group, [p for p in group["params"] if id(p) in new]) for group in twin.param_groups)


def _copied(optimizer: Optimizer, known: dict[int, Any]) -> Optimizer:
    """With `known` in the place of what has these ids."""
    twin = copy.deepcopy(optimizer, known)
    own = {key: value for key, value in vars(optimizer).items() if key not in vars(twin)}  # `Optimizer` copies none of these
    own.pop("step", None)  # of a scheduler, around the original's
    vars(twin).update(copy.deepcopy(own, known))
    return twin


def _first_step(twin: Optimizer, group: dict[str, Any], new: list[nn.Parameter]) -> int:
    for parameter in new:
        parameter.grad = torch.empty_like(parameter)
    twin.param_groups = [group]
    group.update({key: False for key in _FOR_DEVICES if key in group})
    made: dict[str, torch.Tensor] = {}
    try:
        inspect.unwrap(type(twin).step)(twin)
        complete = True
    except Exception:  # of a user's class, or of an operator that the meta device lacks
        complete = all(twin.state.get(parameter) for parameter in new)  # torch's optimizers make state before they compute
    if complete:
        flatten("", [twin.state.get(parameter, {}) for parameter in new], made, {})
    return sum(tensor.nbytes for tensor in made.values()) if complete else _IN_DOUBT * sum(p.numel() for p in new)
