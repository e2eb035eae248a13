"""Finds numbers that an optimizer changes in its `step` and keeps outside its `state_dict`: a replica that fetches the state,
and a resumed run, would not have them.

In: the registered optimizers, around each update. Out: a MisuseError that names the attribute. A number counts as kept if an
entry of the optimizer's own `state_dict` (of a class that has one of its own) has had its value after each update looked at.
Larger tensors may be scratch memory, which is no state: a line names them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from helixrt.engines.graph_leaves import is_looked_at
from helixrt.engines.optimizer_state import has_own_state, own_entries
from helixrt.engines.sharded import local, stands_for_others
from helixrt.errors import MisuseError

_OWN = ("state", "param_groups", "defaults")
_log = logging.getLogger(__name__)


class OptimizerNumbers:
    """`begin` and `end` stand around an update; `stepped` is set by the steps of optimizers within it."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        self._updates = 0  # with a step
        self._before: dict[str, dict[str, float]] | None = None
        self._kept: dict[tuple[str, str], set[str]] = {}  # by optimizer and attribute: the entries that may hold it
        self._tensors: dict[str, dict[str, tuple[float, float]]] = {}
        self._told = set[str]()  # optimizers of which a tensor was named
        self.stepped = False

    def begin(self) -> None:
        self.stepped, self._before = False, None
        if is_looked_at(self._updates + 1):
            self._before = {key: dict(_attributes(optimizer)) for key, optimizer in self._optimizers.items()}
            self._tensors = {key: dict(_tensors(optimizer)) for key, optimizer in self._optimizers.items()}

    def end(self) -> None:
        """Raises MisuseError for a number that is not kept."""
        before, self._before = self._before, None
        self._updates += self.stepped
        for key, numbers in (before or {}).items():
            optimizer = self._optimizers[key]
            for name, value in _attributes(optimizer):
                was = numbers.get(name, value)
                if value != was and not (math.isnan(value) and math.isnan(was)):
                    self._check(key, optimizer, name, numbers[name], value)
            changed = [name for name, sums in _tensors(optimizer) if sums != self._tensors[key].get(name, sums)]
            if changed and key not in self._told:
                self._told.add(key)
                _log.warning(
                    "optimizer %s: its step() changes the tensor %s.%s, which state_dict() does not hold: if the next step "
                    "reads it, replicas differ after a restart, and a resumed run goes on without it; keep it in state",
                    *(key, type(optimizer).__name__, changed[0]),
                )

    def _check(self, key: str, optimizer: Optimizer, name: str, was: float, value: float) -> None:
        held = set[str]()
        if has_own_state(optimizer):
            entries = {"more": own_entries(optimizer, f"optimizer {key}"), "groups": optimizer.param_groups}
            held = {path for path, number in _numbers("", entries) if number == value}
        self._kept[key, name] = held & self._kept.get((key, name), held)
        if not self._kept[key, name]:
            kind = type(optimizer).__name__
            raise MisuseError(
                f"optimizer {key}: its step() changed {kind}.{name} from {was} to {value}, which state_dict() does not hold, "
                "so replicas would differ after a restart; keep it in param_groups, or add it to state_dict() and take it back "
                "in load_state_dict()"
            )


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    for name, value in vars(optimizer).items():
        if name not in _OWN and isinstance(value, int | float | dict | list | tuple):
            yield from _numbers(name, value)


def _tensors(optimizer: Optimizer) -> Iterator[tuple[str, tuple[float, float]]]:
    """Sums of the tensors with several elements in attributes, by name; those that share memory with parameters, gradients,
    the state or entries of an own `state_dict` are none."""
    known = [each for group in optimizer.param_groups for p in group["params"] for each in (p, p.grad) if each is not None]
    known += _held([optimizer.state, own_entries(optimizer, "") if has_own_state(optimizer) else {}])
    places = {_memory(each) for each in known if not stands_for_others(local(each))}
    for name, value in vars(optimizer).items():
        for number, tensor in enumerate(_held(value) if name not in _OWN else ()):
            if tensor.numel() > 1 and _memory(tensor) not in places:
                wide = local(tensor.detach()).double()
                yield f"{name}" + (f"[{number}]" if number else ""), (wide.sum().item(), wide.square().sum().item())


def _memory(tensor: torch.Tensor) -> int:
    """Of a DTensor that of its local part."""
    return local(tensor).untyped_storage().data_ptr()


def _held(value: Any) -> list[torch.Tensor]:
    """The tensors in nested values."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in _held(each)]


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers in nested values, by name; tensors with one element are numbers."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield path, value.item()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str | int) and key != "params":
                yield from _numbers(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(f"{path}[{index}]", item)
