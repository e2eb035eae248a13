"""Fused: several operators of a strand that run as one compiled function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class Fused:
    """A node's target: a pure function of tensors to a tuple of tensors.

    Equal `digest`s mean equal functions, on every rank. `operators` are the names of the nodes it stands for, `module`
    is the graph of them, which computes the same.
    """

    def __init__(self, function: Callable[..., Any], digest: str, operators: tuple[str, ...], module: fx.GraphModule) -> None:
        self.function, self.digest, self.operators, self.module = function, digest, operators, module
        self.__name__ = self.__qualname__ = f"fused_{digest}"  # how a graph's code calls it

    def __call__(self, *values: Any) -> Any:
        return self.function(*values)

    def __str__(self) -> str:
        return self.__name__

    __repr__ = __str__
