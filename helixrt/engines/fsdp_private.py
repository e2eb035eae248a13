"""State of a backward in FSDP2 (torch 2.13 to 2.15) that has no public call; the one file that uses its private parts.

- `_get_fsdp_state()._fsdp_param_groups`: the groups of parameters that are gathered and reduced together;
- a group's `post_backward()`, called once its gradients are computed, before they are reduced: replaced on the instance;
- a parameter's `_unsharded_param`, `unsharded_accumulated_grad` and `sharded_param`;
- a group's `reduce_grads`, which `set_requires_gradient_sync(False)` switches off.

Where FSDP2 has another shape, hooks of the sharded parameters stand in: all parameters that were reduced count as used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from helixrt.private_api import FSDP_BACKWARD, tell_once, usable

_GROUP = ("post_backward", "fsdp_params", "reduce_grads")  # what a group of parameters must have


def _groups(module: Any) -> list[Any] | None:
    """The groups of parameters of this `FSDPModule`; None, and a line in the log, where they have another shape."""
    if not usable(FSDP_BACKWARD):
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None or not all(hasattr(group, name) for group in groups for name in _GROUP):
        tell_once(FSDP_BACKWARD, "has another FSDPState or FSDPParamGroup")
        return None
    return list(groups)


def watch_used(module: Any, used: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Have `used(sharded parameter)` called in each backward for the parameters of this `FSDPModule` that this rank's backward
    gave a gradient, before the reduction. Returns what ends it."""
    groups = _groups(module)
    if groups is None:
        sharded = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return _end_of([parameter.register_post_accumulate_grad_hook(used) for parameter in sharded])
    for group in groups:
        group.post_backward = _post_backward(group, used)

    def end() -> None:
        for group in groups:
            group.__dict__.pop("post_backward", None)

    return end


def _end_of(hooks: list[Any]) -> Callable[[], None]:
    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def _post_backward(group: Any, used: Callable[[torch.Tensor], None]) -> Callable[..., None]:
    original = group.post_backward

    def post_backward(*unused: Any) -> None:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None:
                continue
            if whole.grad is not None or parameter.unsharded_accumulated_grad is not None:
                used(parameter.sharded_param)
        original(*unused)

    return post_backward


def reduces(module: Any) -> bool:
    """Whether this `FSDPModule` reduces its gradients in each backward, as far as it is known."""
    return all(group.reduce_grads for group in _groups(module) or ())


def gathered(module: Any) -> list[torch.Tensor] | None:
    """What stands for the parameters of this `FSDPModule` in a forward; None where it is not known."""
    groups = _groups(module)
    if groups is None:
        return None
    found = [getattr(parameter, "_unsharded_param", None) for group in groups for parameter in group.fsdp_params]
    return [parameter for parameter in found if parameter is not None]
