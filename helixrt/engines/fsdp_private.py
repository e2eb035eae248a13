"""State of a backward in FSDP2 (torch 2.13) that has no public call; the one file that uses its private parts.

- `_get_fsdp_state()._fsdp_param_groups`: the groups of parameters that are gathered and reduced together;
- a group's `post_backward()`, called once its gradients are computed, before they are reduced: replaced on the instance;
- a parameter's `_unsharded_param`, `unsharded_accumulated_grad` and `sharded_param`;
- a group's `reduce_grads`, which `set_requires_gradient_sync(False)` switches off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def watch_used(module: Any, used: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Have `used(sharded parameter)` called in each backward for the parameters of this `FSDPModule` that this rank's backward
    gave a gradient, before the reduction. Returns what ends it."""
    groups = list(module._get_fsdp_state()._fsdp_param_groups)
    for group in groups:
        group.post_backward = _post_backward(group, used)

    def end() -> None:
        for group in groups:
            group.__dict__.pop("post_backward", None)

    return end


def _post_backward(group: Any, used: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is not None and (whole.grad is not None or parameter.unsharded_accumulated_grad is not None):
                used(parameter.sharded_param)
        original(*unused)

    return post_backward


def reduces(module: Any) -> bool:
    """Whether this `FSDPModule` reduces its gradients in each backward."""
    return all(group.reduce_grads for group in module._get_fsdp_state()._fsdp_param_groups)
