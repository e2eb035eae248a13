"""The state of `torch.optim` optimizers by parameter name, and back into optimizers that have none yet.

In: an optimizer, and its parameters' names. Out: a nested value for `state_tree`: `state/PARAMETER/…`, `group/NUMBER/…` without
functions, `class`, and in `more/…` what its own `state_dict()` has beside, which goes back through its own `load_state_dict`.
Loading builds what is missing from tensors and scalars and never steps: a step would change later trajectories of AdamW,
Adafactor and SGD with dampening. The device of a new tensor follows the rule of `Optimizer.load_state_dict`: on the
parameter's device, but for the counter `step`, which is on the CPU unless the group is fused or capturable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from helixrt.engines.state_tree import placed
from helixrt.errors import Fatal, MisuseError

Names = Mapping[torch.Tensor, str]


def read_optimizer(optimizer: Optimizer, names: Names, what: str) -> dict[str, Any]:
    """The nested state; tensors are live. It is in the order of the groups: that in which parameters had their first gradients
    is not the same in a replica that loaded its state. Raises MisuseError for state of anything but registered parameters."""
    for parameter in optimizer.state:
        if not isinstance(parameter, torch.Tensor) or parameter not in names:
            raise MisuseError(f"{what} ({type(optimizer).__name__}) holds state of something that is no registered parameter")
    state: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if entries := optimizer.state.get(parameter):
                state[names[parameter]] = entries
    groups = {
        str(number): {key: value for key, value in group.items() if key != "params" and not _is_function(value)}
        | {"params": {names[parameter]: place for place, parameter in enumerate(group["params"])}}
        for number, group in enumerate(optimizer.param_groups)
    }
    more = own_entries(optimizer, what)
    return {"class": _classes(optimizer), "state": state, "group": groups} | ({"more": more} if more else {})


def _classes(optimizer: Optimizer) -> str:
    """The name of its class, then those of the classes that this extends."""
    return " ".join(each.__name__ for each in type(optimizer).__mro__ if issubclass(each, Optimizer) and each is not Optimizer)


def has_own_state(optimizer: Optimizer) -> bool:
    """Whether the optimizer saves or loads its state in a way of its own."""
    saves, loads = getattr(optimizer.state_dict, "__func__", None), getattr(optimizer.load_state_dict, "__func__", None)
    return saves is not Optimizer.state_dict or loads is not Optimizer.load_state_dict


def own_entries(optimizer: Optimizer, what: str) -> dict[str, Any]:
    """What the optimizer's own `state_dict()` has beside "state" and "param_groups". Raises MisuseError if these are not those
    of `torch.optim`: checkpoints and replicas know parameters by name."""
    if not has_own_state(optimizer):
        return {}
    saved = dict(optimizer.state_dict())
    state, groups = saved.pop("state", None), saved.pop("param_groups", None)
    counts = [len(group["params"]) for group in optimizer.param_groups]
    listed = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
    numbered = isinstance(state, Mapping) and state.keys() <= set(range(sum(counts)))
    if not listed or [len(group.get("params", ())) for group in groups] != counts or not numbered:
        raise MisuseError(
            f"{what}: state_dict() of {type(optimizer).__name__} has no 'state' and 'param_groups' as torch.optim.Optimizer "
            "has them; take what that gives, and add other entries beside the two"
        )
    return saved


def check_own_entries(optimizer: Optimizer, what: str) -> None:
    """Raises MisuseError for a `state_dict` that this module cannot read, or that a hook adds entries to."""
    own_entries(optimizer, what)
    if not has_own_state(optimizer) and (more := sorted(optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise MisuseError(
            f"{what}: a hook adds {more[0]!r} to state_dict() of {type(optimizer).__name__}, and replicas would lose it; add "
            "it in state_dict() of a class of your own, and take it back in load_state_dict()"
        )


def check_optimizer(optimizer: Optimizer, names: Names, tree: Mapping[str, Any] | None, what: str) -> None:
    """Raises Fatal if a nested state is not one of this optimizer: another class, another number of groups, or other
    parameters in them."""
    here = _classes(optimizer).split()
    there = str((tree or {}).get("class", here[0])).split()
    if here[0] not in there and there[0] not in here:
        raise Fatal(
            f"the state to load has {there[0]} as {what}, and the script {here[0]}; resume with {there[0]}, or begin a new run "
            "with the model that helixrt export writes"
        )
    groups = (tree or {}).get("group") or {}
    if sorted(groups) != sorted(str(number) for number in range(len(optimizer.param_groups))):
        raise Fatal(f"the state to load has {len(groups)} parameter groups of {what}, not {len(optimizer.param_groups)}")
    for number, group in enumerate(optimizer.param_groups):
        own = {names[parameter]: place for place, parameter in enumerate(group["params"])}
        if groups[str(number)].get("params") != own:
            raise Fatal(f"the state to load has other parameters in group {number} of {what}")
    mine = {names[parameter] for group in optimizer.param_groups for parameter in group["params"]}
    if unknown := sorted((tree or {}).get("state", {}).keys() - mine):
        raise Fatal(f"the state to load has state of {unknown[0]} for {what}, which does not hold that parameter")
    there, own = (tree or {}).get("more", {}), own_entries(optimizer, what)
    if lacking := [key for key in own if key not in there]:
        raise Fatal(f"the state to load lacks {lacking[0]!r} of {what}, which its state_dict() has")
    if there and not has_own_state(optimizer):
        raise Fatal(f"the state to load has {next(iter(there))!r} of {what}, which {type(optimizer).__name__} does not take")


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, names: Names, tree: Mapping[str, Any]) -> None:
    """Make the optimizer's state and groups those of the nested state; tensors are copied. `check_optimizer` comes first."""
    _load_parts(optimizer, names, tree)
    if has_own_state(optimizer):
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, **placed(tree.get("more", {}), saved)})
        _load_parts(optimizer, names, tree)  # `load_state_dict` converts state to the parameters' types


def _is_function(value: Any) -> bool:
    """Whether an entry of a group is the script's, and no part of the state."""
    return inspect.isroutine(value) or isinstance(value, type | functools.partial)


def _load_parts(optimizer: Optimizer, names: Names, tree: Mapping[str, Any]) -> None:
    """The state of parameters, and their groups. Arguments of the class that a state of another version of it lacks stay."""
    for number, group in enumerate(optimizer.param_groups):
        loaded = tree["group"][str(number)]
        for key in [key for key in group if key not in loaded and key not in optimizer.defaults]:
            if not _is_function(group[key]):
                del group[key]
        for key, value in loaded.items():
            if key != "params":
                group[key] = _take(value, group.get(key), None)
        for parameter in group["params"]:
            entries = tree.get("state", {}).get(names[parameter])
            if not entries:
                optimizer.state.pop(parameter, None)
                continue
            live = optimizer.state[parameter]  # made if there is none
            for key in [key for key in live if key not in entries]:
                del live[key]
            for key, value in entries.items():
                live[key] = _take(value, live.get(key), _device(key, parameter, group), parameter)


def _device(key: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device:
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return parameter.device


def _take(value: Any, live: Any, device: torch.device | None, parameter: torch.Tensor | None = None) -> Any:
    """The value with tensors copied: into the live one where that fits, else to `device` (None: where the live one is), laid
    out in memory as `parameter` is where the shapes are equal: sums over elements depend on their order."""
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            return live.copy_(value)
        if parameter is not None and parameter.shape == value.shape and parameter.device == device:
            return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        where = device if device is not None else live.device if isinstance(live, torch.Tensor) else value.device
        return value.detach().to(where, copy=True)
    if isinstance(value, dict):
        known = live if isinstance(live, Mapping) else {}
        return {key: _take(item, known.get(key), device, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        others = live if isinstance(live, list | tuple) and len(live) == len(value) else [None] * len(value)
        return type(value)(_take(item, other, device, parameter) for item, other in zip(value, others, strict=True))
    return value
