"""Finds that what graphs were captured of was changed since: graphs have the numbers, functions and tensors of before.

In: modules, and losses that are none. Out: the name of what is another, as `state_key` compares it, and tensors by identity. To
cost little at every step training modes are compared each time, and everything else of `EACH` modules in turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from helixrt.compile.state_key import HOOKS, Contents, Same

EACH = 16  # modules that one look compares


class Watch:
    """`roots`: modules, or other objects, by what their names begin with. Of the modules `others` modes count alone."""

    def __init__(self, roots: Mapping[str, Any], others: Iterable[nn.Module] = ()) -> None:
        self._named: list[tuple[str, Any]] = []
        for prefix, root in roots.items():
            each = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
            self._named += [(f"{prefix}.{name}".strip("."), value) for name, value in each]
        own = [value for _, value in self._named if isinstance(value, nn.Module)]
        self._own = set(map(id, own))
        self._modules = [*own, *others]
        self._training = self._modes()
        self._next = 0
        self.renew()

    def renew(self) -> None:
        """What is now is no change."""
        self._seen = {at: self._look(at) for at in range(0, len(self._named), EACH)}

    def mode_changed(self) -> bool:
        return self._modes() != self._training

    def changed(self, *, all: bool = False) -> str | None:
        """The name of something that is another, of the next few modules, or of all."""
        for at in self._seen if all else (self._next,):
            if (now := self._look(at)) != self._seen[at]:
                return _difference(self._seen[at], now)
        self._next = self._next + EACH if self._next + EACH in self._seen else 0
        return None

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _look(self, at: int) -> Sequence[tuple[str, Hashable]]:
        contents = Contents(self._own)
        found: list[tuple[str, Hashable]] = []
        for name, value in self._named[at : at + EACH]:
            if isinstance(value, nn.Module):
                found += [(f"{name}.{key}".strip("."), key_of) for key, key_of in _parts(value, contents)]
            else:
                found.append((name, contents.of(value)))
        return found


def _parts(module: nn.Module, contents: Contents) -> Iterable[tuple[str, Hashable]]:
    yield "__class__", Same(type(module))
    for hooks in HOOKS:
        yield hooks.strip("_"), tuple(getattr(module, hooks))
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            yield name, Same(tensor)
            yield f"{name}.requires_grad", tensor is not None and tensor.requires_grad
    for name, part in module._modules.items():
        yield name, Same(part)
    yield from contents.attributes_of(module)


def _difference(before: Sequence[tuple[str, Hashable]], now: Sequence[tuple[str, Hashable]]) -> str:
    then, present = dict(before), dict(now)
    missing = object()
    differ = (name for name in (*present, *then) if then.get(name, missing) != present.get(name, missing))
    name = next(differ, "a module")
    return name + _within(then.get(name), present.get(name))


def _within(then: Hashable, now: Hashable) -> str:
    """The names of attributes on the way to the first difference in an object."""
    if not (isinstance(then, tuple) and isinstance(now, tuple) and len(then) == len(now)):
        return ""
    for before, after in zip(then, now, strict=True):
        if before != after:
            named = isinstance(before, tuple) and isinstance(after, tuple) and before[:1] == after[:1] and before
            return (f".{named[0]}" if named and isinstance(named[0], str) else "") + _within(before, after)
    return ""


__all__ = ["Watch"]
