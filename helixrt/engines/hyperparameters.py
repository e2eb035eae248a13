"""Hyperparameters that the script gave its optimizers and schedulers, where a resumed checkpoint has others.

In: what is registered, when it is registered and after a checkpoint of an earlier life of the run was loaded. Out: one line
that says which values are used. Hyperparameters are the arguments of an optimizer's or scheduler's class, and `base_lrs`; of a
group with a scheduler `initial_lr` stands for `lr`, which follows from it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch

from helixrt.engines.registered import Registered

_SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_lrs")
_NONE = {"params", "optimizer", "last_epoch", "foreach", "fused", "capturable", "differentiable"}  # say nothing of the training
_CYCLED = {"momentum", "betas"}  # by a scheduler that has put `max_momentum` into the group
_SHOWN = 4


class Hyperparameters:
    def __init__(self, registered: Registered) -> None:
        self._registered = registered
        self._script = {name: copy.deepcopy(_fields(owner, kind)) for name, owner, kind in _owners(registered)}

    def resumed(self) -> str:
        """The state of a checkpoint was loaded: take the script's values if it says so. The line, "" if none differs."""
        takes, found = self._registered.hyperparameters == "script", list[str]()
        for name, owner, kind in _owners(self._registered):
            stored, given = _fields(owner, kind), self._script.get(name, {})
            for field in [field for field in given if field in stored]:
                if _plain(stored[field]) == _plain(given[field]):
                    continue
                found.append(f"{field} of {name} is {_plain(stored[field])} there and {_plain(given[field])} in the script")
                if takes:
                    _put(owner, field, given[field])
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        used = "the checkpoint's are used; register(hyperparameters='script') takes the script's"
        listed = ", ".join(found[:_SHOWN]) + more + "; " + ("the script's are used" if takes else used)
        return f"the checkpoint has other hyperparameters than the script: {listed}" if found else ""


def _owners(registered: Registered) -> Iterator[tuple[str, MutableMapping[str, Any], type]]:
    """Parameter groups, and schedulers as their attributes, with what they belong to."""
    for key, optimizer in registered.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            yield f"group {number} of optimizer {key}", group, type(optimizer)
    for key, scheduler in registered.schedulers.items():
        for number, part in enumerate((scheduler, *vars(scheduler).get("_schedulers", ()))):
            yield f"scheduler {key}" + (f"[{number - 1}]" if number else ""), vars(part), type(part)


def _fields(owner: MutableMapping[str, Any], kind: type) -> dict[str, Any]:
    left_out = _NONE | ({"lr"} if "initial_lr" in owner else set()) | (_CYCLED if "max_momentum" in owner else set())
    wanted = (inspect.signature(kind).parameters.keys() | set(_SCHEDULED)) - left_out
    return {field: value for field, value in owner.items() if field in wanted and _plain(value) is not NotImplemented}


def _plain(value: Any) -> Any:
    """To compare and to show; NotImplemented for what is no number, text or collection of them."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = tuple(_plain(item) for item in value)
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    return value if value is None or isinstance(value, bool | int | float | str | dict) else NotImplemented


def _put(owner: MutableMapping[str, Any], field: str, value: Any) -> None:
    if field == "initial_lr" and _plain(owner[field]):  # some schedulers go on from the rate that the group has
        _put(owner, "lr", _plain(owner["lr"]) * _plain(value) / _plain(owner[field]))
    if isinstance(owner[field], torch.Tensor):
        owner[field].fill_(_plain(value))
    else:
        owner[field] = copy.deepcopy(value)
