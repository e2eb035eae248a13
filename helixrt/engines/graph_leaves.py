"""Finds trained parameters that are not registered: each replica would train them on its own data alone, or not at all.

In: the begin of a backward's graph, and the parameters that the engine knows. Out: a MisuseError that names the first
`nn.Parameter` that the loss depends on and that is none of them. Leaves that are no `nn.Parameter` (inputs that require a
gradient) are legal. Where a part of the graph is made in the backward alone (`torch.utils.checkpoint(use_reentrant=True)`), and
where the loop calls `loss.backward()` itself, all modules of the process are looked through instead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from helixrt.errors import MisuseError

_WAY = (
    "register its module in session.register(model={...}) with its optimizer, freeze it with requires_grad_(False), or detach "
    "what it computes"
)


def is_looked_at(number: int) -> bool:
    """Whether the backward of this number, from 1, is checked: the first three, then each power of two."""
    return number <= 3 or number & (number - 1) == 0


class LeafCheck:
    """Of the backwards of an engine, or of one chunk. `known`: the parameters of the engine. `whole` gives what FSDP2 has
    gathered of them, which is what the loss depends on, or None if that is not known; None: nothing is sharded. `unchanged`
    raises MisuseError for a parameter that has taken the place of a registered one."""

    def __init__(
        self,
        known: Collection[torch.Tensor],
        unchanged: Callable[[], None],
        whole: Callable[[], Collection[torch.Tensor] | None] | None = None,
    ) -> None:
        self._known, self._unchanged, self._whole = known, unchanged, whole
        self._backwards = 0

    @contextmanager
    def backward(self, root: Any) -> Iterator[None]:
        """Around the backward that begins at this node of the graph. Raises MisuseError for a parameter that is trained and not
        registered, if this backward is looked at."""
        self._backwards += 1
        if not is_looked_at(self._backwards) or self._is_complete(root):
            yield
            return
        before = with_gradient(self._known)
        yield
        for key, parameter in with_gradient(self._known).items():
            if key not in before:
                raise _not_registered(parameter)

    def _is_complete(self, root: Any) -> bool:
        """Whether nothing is left to be looked for after the backward. Raises as `backward`."""
        if self._whole is not None:  # gathered parameters stand in the modules now, so these cannot be looked through later
            if (whole := self._whole()) is not None:
                _check(root, [*self._known, *whole])
            return True
        try:
            return _check(root, self._known)
        except MisuseError:
            self._unchanged()
            raise


def _check(root: Any, known: Collection[torch.Tensor]) -> bool:
    """Raises MisuseError for a parameter in the graph that is none of the `known`. False: not all of the graph is there yet."""
    registered, complete = {id(parameter) for parameter in known}, True
    seen, left = {root}, [root]
    while left:
        node = left.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in registered:
            raise _not_registered(leaf)
        complete = complete and "Checkpoint" not in node.name()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return complete


def _not_registered(parameter: torch.Tensor) -> MisuseError:
    return MisuseError(f"the loss depends on {described(parameter)}, which requires a gradient and is not registered; {_WAY}")


def described(parameter: torch.Tensor) -> str:
    """Its name in the outermost module that has it, else its shape."""
    names = [
        (name, type(module).__name__)
        for module in _modules()
        for name, each in module.named_parameters(remove_duplicate=False)
        if each is parameter
    ]
    if not names:
        return f"an nn.Parameter of shape {list(parameter.shape)}"
    name, owner = max(names, key=lambda found: found[0].count("."))
    return f"parameter {name} of a module {owner}"


def with_gradient(known: Collection[torch.Tensor]) -> dict[int, nn.Parameter]:
    """By id, the parameters of all modules that have a gradient and are none of the `known`."""
    registered = {id(parameter) for parameter in known}
    every = [parameter for module in _modules() for parameter in module._parameters.values() if parameter is not None]
    return {id(each): each for each in every if id(each) not in registered and each.grad is not None}


def _modules() -> list[nn.Module]:
    """All of this process. Types are asked, as `isinstance` would run code of objects that stand in for others."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
