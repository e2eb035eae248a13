"""Finds trained parameters that are not registered: each replica would train them on its own data alone, or not at all.

In: a loss before its backward, and the parameters that the engine knows. Out: a MisuseError that names the first `nn.Parameter`
that the loss depends on and that is none of them. Leaves that are no `nn.Parameter` (inputs that require a gradient) are legal.
Where the loop calls `loss.backward()` itself its loss is not known: all modules of the process are looked through instead.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
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


def check_leaves(loss: torch.Tensor, known: Collection[torch.Tensor]) -> None:
    """Raises MisuseError for a parameter that `loss` depends on and that is none of the `known` tensors. Parameters behind
    `torch.utils.checkpoint(use_reentrant=True)` are not seen."""
    registered = {id(parameter) for parameter in known}
    for leaf in _leaves(loss):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in registered:
            raise MisuseError(f"the loss depends on {described(leaf)}, which requires a gradient and is not registered; {_WAY}")


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors into which the backward of `loss` would accumulate gradients."""
    seen: set[Any] = {loss.grad_fn}
    left: list[Any] = [loss.grad_fn]
    while left:
        node = left.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        for following, _ in () if node is None else node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    if loss.grad_fn is None:
        yield loss


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
