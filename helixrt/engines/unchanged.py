"""Finds registered state that was changed outside the update: version counters, identities, and scalars by value.

In: parameters with their owners, optimizers, other objects with state. `record` is called after each update and load,
`check` before the next. A change through `parameter.data` counts no version: it is looked for in samples (`samples`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from helixrt.engines.buffers import without_mode
from helixrt.engines.registered import Registered, qualified
from helixrt.engines.samples import Samples
from helixrt.engines.sharded import local, versions
from helixrt.engines.state_tree import flatten
from helixrt.errors import MisuseError
from helixrt.replica.contracts import Scalar

_ABSENT = object()
_RULE = "replicated state may change in the update alone (or in a function registered as the session's update)"


@dataclass(frozen=True)
class _Place:
    name: str
    owner: nn.Module
    key: str
    parameter: nn.Parameter
    requires_grad: bool
    address: int


class Unchanged:
    """`constant`: buffers by name that no forward changes; a change of one that counts a version is found elsewhere. `alone`:
    in a run of one replica."""

    def __init__(
        self, registered: Registered, constant: Sequence[tuple[str, torch.Tensor]] = (), alone: bool = True
    ) -> None:
        self._registered = registered
        self._places = list(_places(registered))
        self._parameters = [place.parameter for place in self._places]
        self._groups = _groups(registered.optimizers)
        self._versions: list[int] = []
        self._tensors: list[torch.Tensor] = []  # of optimizers and other state
        self._tensor_versions: list[int] = []
        self._fields: list[dict[str, Any]] = []  # of parameter groups
        self._scalars: dict[str, Scalar] = {}  # of schedulers
        self._extra_scalars: dict[str, dict[str, Scalar]] = {}  # by object; of those that have some
        self._frozen: Collection[int] = ()  # parameters that are trained, but not in this batch
        self._samples = Samples(list(registered.parameters()), alone=alone)
        self._buffers = Samples(constant, each=1)
        self.record()

    def record(self) -> None:
        """The state is as it should be."""
        self._versions = versions(self._parameters)
        tensors: list[torch.Tensor] = []
        for optimizer in self._registered.optimizers.values():
            for entries in (*optimizer.state.values(), *optimizer.param_groups):
                for value in entries.values():
                    if isinstance(value, torch.Tensor):
                        tensors.append(value)
        self._extra_scalars = {}
        for key, thing in self._registered.extra.items():
            others: dict[str, torch.Tensor] = {}
            scalars: dict[str, Scalar] = {}
            flatten(key, thing.state_dict(), others, scalars)
            tensors += others.values()
            if scalars:
                self._extra_scalars[key] = scalars
        self._tensors, self._tensor_versions = tensors, versions(tensors)
        self._fields = [dict(group) for optimizer in self._registered.optimizers.values() for group in optimizer.param_groups]
        self._scalars = self._scheduler_scalars()
        self._samples.record()
        self._buffers.record()

    def check_versions(self) -> None:
        """As `check`, of what has version counters alone; costs next to nothing."""
        if versions(self._parameters) != self._versions or versions(self._tensors) != self._tensor_versions:
            self.check()

    @contextmanager
    def apart(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Within it the parameters of these optimizers may be others, which have the same bits again behind it."""
        apart = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        if apart:
            self.check_versions()
        yield
        now = versions(self._parameters)
        self._versions = [
            new if id(p) in apart else then for p, then, new in zip(self._parameters, self._versions, now, strict=True)
        ]

    def freeze(self, parameters: Collection[int]) -> None:
        """Of the parameters that were trained when they were registered, these, by identity, are not trained until the next
        call."""
        if parameters != self._frozen:
            for place in self._places:
                if place.requires_grad:
                    place.parameter.requires_grad_(id(place.parameter) not in parameters)
            self._frozen = parameters

    def check_frozen(self) -> None:
        """As `check`, of which parameters are trained alone."""
        if any(place.parameter.requires_grad != place.requires_grad for place in self._places):
            self.check()

    def check(self) -> None:
        """Raises MisuseError for the first thing that has changed since `record`, by name."""
        for place, then, now in zip(self._places, self._versions, versions(self._parameters), strict=True):
            parameter = place.parameter
            part = parameter if type(parameter) is nn.Parameter else local(parameter)
            if place.owner._parameters.get(place.key) is not parameter or part.data_ptr() != place.address:
                raise MisuseError(f"parameter {place.name} was replaced after it was registered; {_RULE}")
            if parameter.requires_grad != (place.requires_grad and id(parameter) not in self._frozen):
                done = "unfrozen" if parameter.requires_grad else "frozen"
                raise MisuseError(
                    f"parameter {place.name} was {done} after it was registered; freeze it before register(), or for some "
                    "steps in a function registered by session.freeze"
                )
            if now != then:
                raise MisuseError(f"parameter {place.name} was changed in place; {_RULE}")
        for tensor, then, now in zip(self._tensors, self._tensor_versions, versions(self._tensors), strict=True):
            if now != then:
                raise MisuseError(f"{self._name(tensor)} was changed; {_RULE}")
        if _groups(self._registered.optimizers) != self._groups:
            raise MisuseError(
                "a parameter group was added or changed after its optimizer was registered; register all groups at the start, "
                "and name those that are not trained yet in a function registered by session.freeze"
            )
        scalars = self._scheduler_scalars()
        if (field := self._changed_field()).startswith("'initial_lr'"):
            raise MisuseError(f"{field} was changed by a scheduler that was made after session.register; register it, too")
        if name := field or (scalars != self._scalars and _difference(self._scalars, scalars)):
            raise MisuseError(f"{name} was changed (scheduler.step() in the loop, or a rate set by hand); {_RULE}")
        for key, then_scalars in self._extra_scalars.items():
            now_scalars: dict[str, Scalar] = {}
            flatten(key, self._registered.extra[key].state_dict(), {}, now_scalars)
            if name := _difference(then_scalars, now_scalars):
                raise MisuseError(f"{name} was changed; {_RULE}. What the loop changes is registered with per_replica=")
        self._check_sample(self._samples.compare())
        self._check_buffer(self._buffers.compare())

    def check_device(self) -> None:
        """As `check`, of what it compared on a device, which it did not wait for."""
        self._check_sample(self._samples.result())
        self._check_buffer(self._buffers.result())

    def _check_sample(self, changed: str | None) -> None:
        if changed is not None:
            raise MisuseError(f"parameter {changed} was changed in place, through its `data`; {_RULE}")

    def _check_buffer(self, changed: str | None) -> None:
        if changed is not None:
            raise MisuseError(without_mode(changed))

    def _name(self, tensor: torch.Tensor) -> str:
        """Of a tensor of optimizers or other state."""
        for key, optimizer in self._registered.optimizers.items():
            for parameter, entries in optimizer.state.items():
                for field, value in entries.items():
                    if value is tensor:
                        owner = next((place.name for place in self._places if place.parameter is parameter), "a parameter")
                        return f"state {field!r} of {owner} in optimizer {key}"
            for number, group in enumerate(optimizer.param_groups):
                for field, value in group.items():
                    if value is tensor:
                        return f"{field!r} of group {number} of optimizer {key}"
        for key, thing in self._registered.extra.items():
            others: dict[str, torch.Tensor] = {}
            flatten(key, thing.state_dict(), others, {})
            for name, value in others.items():
                if local(value).data_ptr() == local(tensor).data_ptr() and value.shape == tensor.shape:
                    return name
        return "registered state"

    def _changed_field(self) -> str:
        """The name of a scalar of a parameter group that has changed, or ""."""
        fields = iter(self._fields)
        for key, optimizer in self._registered.optimizers.items():
            for number, (group, then) in enumerate(zip(optimizer.param_groups, fields, strict=False)):
                for field in group if len(group) == len(then) else then.keys() | group.keys():
                    was, now = then.get(field, _ABSENT), group.get(field, _ABSENT)
                    if was is not now and _is_other(was, now):
                        return f"{field!r} of group {number} of optimizer {key}"
        return ""

    def _scheduler_scalars(self) -> dict[str, Scalar]:
        scalars: dict[str, Scalar] = {}
        for key, scheduler in self._registered.schedulers.items():
            flatten(f"scheduler {key}", scheduler.state_dict(), {}, scalars)
        return scalars


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))  # noqa: UP038 a union is made again each time


def _is_other(was: object, now: object) -> bool:
    """Whether one of them is a scalar, and the other is another. A number may be unequal to itself."""
    scalars = _is_scalar(was) + _is_scalar(now)
    return scalars == 1 or (scalars == 2 and was != now and repr(was) != repr(now))


def _difference(then: Mapping[str, Scalar], now: Mapping[str, Scalar]) -> str:
    """The name of the first scalar that is another, or "". A number may be unequal to itself."""
    return next((name for name in (*now, *then) if repr(now.get(name, _RULE)) != repr(then.get(name, _RULE))), "")


def _groups(optimizers: Mapping[str, Optimizer]) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for optimizer in optimizers.values() for group in optimizer.param_groups]


def _places(registered: Registered) -> Iterable[_Place]:
    """Every place in a module where a parameter stands: a tied one has several."""
    seen: set[tuple[int, str]] = set()
    for model, module in registered.models.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            above, _, key = name.rpartition(".")
            owner: Any = module.get_submodule(above)
            if (id(owner), key) not in seen:
                seen.add((id(owner), key))
                address = local(parameter).data_ptr()
                yield _Place(qualified(model, name), owner, key, parameter, parameter.requires_grad, address)
