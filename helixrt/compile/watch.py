"""Finds that what graphs were captured of was changed since: graphs have the tensors, numbers and functions of before.

In: modules, and the guards of what was captured of them. Out: the name of what is another: a parameter, buffer or module by
identity, whether a parameter is trained, a value that the captured Python read. All is compared at each look.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from helixrt.passes.guards_private import Guards


class Watch:
    """`roots`: modules by what their names begin with, `guards` likewise. Of the modules `others` modes count alone."""

    def __init__(
        self, roots: Mapping[str, Any], others: Iterable[nn.Module] = (), guards: Mapping[str, Guards | None] | None = None
    ) -> None:
        owners = [(prefix, root) for prefix, root in roots.items() if isinstance(root, nn.Module)]
        self._named = [(f"{prefix}.{name}".strip("."), m) for prefix, root in owners for name, m in root.named_modules()]
        self._modules = [*(module for _, module in self._named), *others]
        self._guards = {name: each for name, each in (guards or {}).items() if each is not None}
        self._training = self._modes()
        self.renew()

    def renew(self) -> None:
        """What is now is no change."""
        self._held = [value for _, value in self._parts()]
        self._trained = self._requires_grad()
        for guards in self._guards.values():
            guards.renew()

    def mode_changed(self) -> bool:
        return self._modes() != self._training

    def changed(self) -> str | None:
        """The name of something that is another."""
        now = [value for _, module in self._named for held in _held_of(module) for value in held.values()]
        if len(now) != len(self._held) or not all(map(operator.is_, now, self._held)):
            before = iter(self._held)
            return next((name for name, value in self._parts() if value is not next(before, self)), "a module")
        if (trained := self._requires_grad()) != self._trained:
            tensors = [name for name, value in self._parts() if isinstance(value, nn.Parameter)]
            return next(name for name, a, b in zip(tensors, trained, self._trained, strict=True) if a != b) + ".requires_grad"
        found = ((name, of) for of, guards in self._guards.items() if (name := guards.changed()))
        return next((f"{name} of {of}" if of else name for name, of in found), None)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, module in self._named:
            for held in _held_of(module):
                for key, value in held.items():
                    yield f"{name}.{key}".strip("."), value

    def _requires_grad(self) -> list[bool]:
        return [value.requires_grad for value in self._held if isinstance(value, nn.Parameter)]

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]


def _held_of(module: nn.Module) -> tuple[Mapping[str, Any], ...]:
    return module._parameters, module._buffers, module._modules
