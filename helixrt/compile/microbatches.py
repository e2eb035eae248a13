"""A batch becomes micro-batches.

In: the arguments of a train step. Out: a `Batch`: each micro-batch's arguments, and its tensors by the ports a captured
graph has for them. Tensors are split evenly along dim 0, or along `chunk_dims`; all else goes to every micro-batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from helixrt.errors import ConfigError
from helixrt.passes.capture import argument_port
from helixrt.passes.parts import Port, Role


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or constant among the arguments; `dim` is None where every micro-batch gets it whole."""

    port: Port
    value: Any
    dim: int | None

    def chunk(self, index: int, count: int) -> Any:
        if not isinstance(self.value, torch.Tensor):
            return self.value
        value = self.value.detach()
        if self.dim is not None:
            value = value.tensor_split(count, self.dim)[index]
        return value.requires_grad_(self.value.requires_grad)


class Batch:
    """The arguments of one train step, of `count` micro-batches."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        count: int,
        chunk_dims: Mapping[int | str, int | None] | None = None,
    ) -> None:
        """Raises ConfigError when the batch cannot be split evenly."""
        self.count = count
        flat, self.tree = pytree.tree_flatten_with_path((args, dict(kwargs), target))
        dims = {str(name): dim for name, dim in (chunk_dims or {}).items()}
        self.leaves = [self._leaf(path, value, dims) for path, value in flat]
        unknown = dims.keys() - {_argument(path) for path, _ in flat}
        if unknown:
            raise ConfigError("chunk_dims", sorted(unknown)[0], "names no argument of this train_step")
        self._check()
        split = [[leaf.chunk(index, count) for leaf in self.leaves] for index in range(count)]
        self._example = split[0]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [pytree.tree_unflatten(c, self.tree) for c in split]
        self.inputs: list[dict[Port, torch.Tensor]] = [
            {leaf.port: value for leaf, value in zip(self.leaves, chunk, strict=True) if isinstance(value, torch.Tensor)}
            for chunk in split
        ]

    @staticmethod
    def _leaf(path: Any, value: Any, dims: Mapping[str, int | None]) -> Leaf:
        dim = dims.get(_argument(path), 0) if isinstance(value, torch.Tensor) and value.dim() > 0 else None
        return Leaf(argument_port(path), value, dim)

    def _check(self) -> None:
        sizes: dict[int, str] = {}
        for leaf in self.leaves:
            if isinstance(leaf.value, torch.Tensor) and leaf.value.requires_grad and not leaf.value.is_leaf:
                raise ConfigError(leaf.port.name, "a result of autograd", "train_step does not reach beyond it; detach it")
            if holds_tensors(leaf.value):
                rule = "is not split into micro-batches; pass tensors, or lists, tuples and dictionaries of them"
                raise ConfigError(leaf.port.name, type(leaf.value).__name__, rule)
            if leaf.dim is None:
                continue
            if not -leaf.value.dim() <= leaf.dim < leaf.value.dim():
                raise ConfigError(f"chunk_dims.{leaf.port.name}", leaf.dim, f"tensor has {leaf.value.dim()} dimensions")
            sizes.setdefault(leaf.value.shape[leaf.dim], leaf.port.name)
        if len(sizes) > 1:
            (first, one), (second, other) = list(sizes.items())[:2]
            rule = f"{one} has {first} rows; name in chunk_dims what is not split along dim 0 (None: whole to each micro-batch)"
            raise ConfigError(other, f"{second} rows", rule)
        for size, name in sizes.items():
            if size % self.count or not size:
                raise ConfigError(name, f"{size} rows", f"must be a multiple of microbatches={self.count}")

    def key(self) -> Hashable:
        """What of a micro-batch a captured graph depends on."""
        return (
            str(self.tree),
            tuple(_key(leaf.port.name, value) for leaf, value in zip(self.leaves, self._example, strict=True)),
        )

    def difference(self, other: Batch, *, shapes: bool = True) -> str:
        """What a micro-batch has that one of `other` has not, in words; "" where the same graph serves both, or, without
        `shapes`, a graph of other shapes would."""
        mine, theirs = self.kinds(shapes=shapes), other.kinds(shapes=shapes)
        if unlike := sorted(mine.keys() ^ theirs.keys()):
            return f"{unlike[0]} is in {'this one' if unlike[0] in mine else 'the example'} alone"
        found = (f"{name} of a micro-batch is {mine[name]}, not {theirs[name]}" for name in mine if mine[name] != theirs[name])
        return next(found, "")

    def kinds(self, *, shapes: bool = True) -> dict[str, str]:
        """Of a micro-batch's arguments by name: shape and strides (without `shapes` the number of dimensions) and dtype of
        tensors, the value of constants."""
        found = {}
        for leaf, value in zip(self.leaves, self._example, strict=True):
            name = leaf.port.name if leaf.port.role is Role.TARGET else f"argument {leaf.port.name}"
            if isinstance(value, torch.Tensor):
                strides = "" if value.is_contiguous() else f" with strides {list(value.stride())}"
                what = f"{list(value.shape)}{strides}" if shapes else f" of {value.dim()} dimensions"
                found[name] = f"{value.dtype}{what}"
            else:
                found[name] = repr(value)
        return found

    def add_gradient(self, microbatch: int, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of a micro-batch's input to the `grad` of the tensor it was split from."""
        for leaf in self.leaves:
            if leaf.port.name == name:
                if leaf.value.grad is None:
                    leaf.value.grad = torch.zeros_like(leaf.value, requires_grad=False)
                whole = leaf.value.grad
                part = whole if leaf.dim is None else whole.tensor_split(self.count, leaf.dim)[microbatch]
                part.add_(gradient)


def _argument(path: Any) -> str:
    """Position, keyword or "target" of the argument that a leaf is in."""
    if path[0].idx == 2:
        return "target"
    return str(getattr(path[1], "idx", getattr(path[1], "key", path[1])))


def holds_tensors(value: Any) -> bool:
    """No container to pytree, and yet it has tensors in it, or is an array itself."""
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return False
    held = value.values() if isinstance(value, Mapping) else getattr(value, "__dict__", {}).values()
    return any(isinstance(each, torch.Tensor) for each in held) or (hasattr(value, "__array__") and value.ndim > 0)


def _key(name: str, value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        layout = (type(value), str(getattr(value, "placements", "")), value.stride())
        return name, tuple(value.shape), value.dtype, value.device, value.requires_grad, layout
    try:
        hash(value)
    except TypeError:
        return name, type(value), repr(value)
    return name, type(value), value
