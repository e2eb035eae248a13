"""What a captured graph depends on besides the batch: a key that changes when the graph may no longer be right.

In: a module, or the process. Out: a hashable key of the module's parameters and buffers (layouts, ties, freezing), of its
Python state (numbers, strings, functions, hooks, containers and settings objects, by content), and of torch's settings that
choose operators (autocast, attention kernels, determinism). A module in a plain container counts by identity and by its Python
state. Other objects and tensors that are no buffers count by identity. Containers and objects with more than `MOST` entries
count by identity and length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Set
from enum import Enum
from functools import cached_property, partial
from logging import Logger
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from helixrt.compile.transformers_private import file_names_of
from helixrt.errors import ConfigError
from helixrt.passes.autocast import device_types

FUNCTIONS = (FunctionType, BuiltinFunctionType)
CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, type, *FUNCTIONS)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # torch's, 2.0 to 2.13
OURS = ("train_step", "explain")
MOST = 4096


class Same:
    """Equal to the same object only. It holds the object, so that no other one gets its address."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


def state_key(module: nn.Module) -> Hashable:
    """What of a module's state a graph depends on: parameters' and buffers' names, layouts, ties, freezing; attributes."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if is_lazy(tensor):
            raise ConfigError(name, "not initialized", "lazy modules get shapes from a first forward: call model(...) once")
    first: dict[int, int] = {}
    tensors = tuple(
        (name, t.shape, t.dtype, t.device, t.requires_grad, first.setdefault(id(t), place), getattr(t, "placements", None))
        for place, (name, t) in enumerate(named)
    )
    contents = Contents(set(map(id, module.modules())))
    modules = tuple((name, type(part), tuple(contents.of_module(part))) for name, part in module.named_modules())
    return tensors, modules


def value_key(value: Any) -> Hashable:
    """A value that is no module, by its content as far as that is Python's."""
    return Contents().of(value)


class Contents:
    """Keys of Python values by content; each object is gone through once, so that settings may refer to one another.

    `modules`: the `id` of those that the user of the keys goes through by itself; they count by identity.
    """

    def __init__(self, modules: Set[int] = frozenset()) -> None:
        self.modules = modules
        self.numbers: dict[int, int] = {}
        self.seen: list[Any] = []  # kept, so that no other object gets the address of one that was seen

    def of_module(self, module: nn.Module) -> Iterator[Hashable]:
        """The module's own Python state; its submodules, parameters and buffers are not in it."""
        yield module.training
        yield from self.attributes_of(module)
        yield from (tuple(getattr(module, hooks)) for hooks in HOOKS)

    def attributes_of(self, module: nn.Module) -> Iterator[tuple[str, Hashable]]:
        """Those that are the module's own, with their keys."""
        for name, value in vars(module).items():
            if name not in OURS and name not in INTERNAL:
                yield name, self.of(value)

    def of(self, value: Any) -> Hashable:
        if isinstance(value, CONSTANTS):
            return type(value), value
        if isinstance(value, torch.Tensor | ModuleType | torch.Generator | Logger) or id(value) in self.modules:
            return Same(value)
        if isinstance(value, MethodType):
            return value.__func__, Same(value.__self__)
        if (number := self.numbers.get(id(value))) is not None:
            return "again", number
        self.numbers[id(value)] = len(self.numbers)
        self.seen.append(value)
        return type(value), self.content(value)

    def content(self, value: Any) -> Hashable:
        if isinstance(value, partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, nn.Module):
            held = (*value._parameters.values(), *value._buffers.values(), *value._modules.values())
            return Same(value), tuple(self.of_module(value)), tuple(map(self.of, held))
        if isinstance(value, list | tuple | deque | Set | Mapping) and len(value) > MOST:
            return Same(value), len(value)
        if isinstance(value, Mapping):
            return tuple((self.of(key), self.of(each)) for key, each in value.items()), self.attributes(value)
        if isinstance(value, list | tuple | deque):
            return tuple(map(self.of, value)), self.attributes(value)
        if isinstance(value, Set):
            return frozenset(map(self.of, value))
        attributes = self.attributes(value)
        return Same(value) if attributes is None else attributes

    def attributes(self, value: Any) -> Hashable:
        """An object's attributes, in slots too; None where it has none."""
        slots = [name for each in type(value).__mro__ for name in slots_of(each)]
        found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        if not found:
            return None
        if len(found) > MOST:
            return Same(value), len(found)
        kind, left = type(value), file_names_of(value)
        return tuple(
            (name, self.of(each))
            for name, each in found.items()  # a cached property follows from others
            if name not in left and not isinstance(getattr(kind, name, None), cached_property)
        )


def slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


INTERNAL = frozenset(vars(nn.Module()))  # what torch keeps in every module


def ambient_key() -> Hashable:
    """Settings of the process and the thread that choose what operators a graph has."""
    autocast = tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in device_types())
    cuda = torch.backends.cuda
    kernels = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()]
    determinism = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return autocast, torch.get_default_dtype(), torch.get_default_device(), tuple(kernels), determinism
