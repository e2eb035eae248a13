"""Nested state (dictionaries, lists and tuples of tensors and numbers) as named tensors and scalars, and back.

A name is a path: the key of a dictionary (percent-encoded, so that it has no slash), `#5` for the integer key 5, `[2]` for
an element of a list, `(2)` of a tuple; `{}`, `[]` and `()` stand for empty ones. So the names alone rebuild the structure,
also where this process has no such state yet. Nothing is pickled: an entry that is neither a tensor nor a JSON scalar is an
error that names its path.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch

from helixrt.errors import Fatal, MisuseError
from helixrt.replica.contracts import Scalar

_EMPTY: dict[str, Callable[[], Any]] = {"{}": dict, "[]": list, "()": tuple}


def segment(key: str) -> str:
    """A dictionary's key as one part of a path."""
    return quote(key, safe="._- +:,=@$!*;&'")


def key_of(part: str) -> str:
    return unquote(part)


def flatten(path: str, value: Any, tensors: dict[str, torch.Tensor], scalars: dict[str, Scalar]) -> None:
    """Add the leaves of `value` to `tensors` (detached, not copied) and `scalars`, under names that begin with `path`.

    Raises MisuseError for a leaf that is neither a tensor nor a JSON scalar, and for keys that are neither text nor integers.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise MisuseError(f"{path} is a tensor of layout {value.layout}; the state may hold dense tensors only")
        tensors[path] = value.detach()
    elif value is None or isinstance(value, bool | str):
        scalars[path] = value
    elif isinstance(value, int):
        scalars[path] = int(value)
    elif isinstance(value, float):
        scalars[path] = float(value)
    elif isinstance(value, Mapping):
        if not value:
            scalars[f"{path}/{{}}"] = None
        for key, item in value.items():
            if isinstance(key, str):
                part = segment(key)
            elif isinstance(key, int) and not isinstance(key, bool):
                part = f"#{key}"
            else:
                raise MisuseError(f"{path} has the key {key!r}; keys of the state are text or integers")
            flatten(f"{path}/{part}", item, tensors, scalars)
    elif isinstance(value, list | tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        if not value:
            scalars[f"{path}/{left}{right}"] = None
        for index, item in enumerate(value):
            flatten(f"{path}/{left}{index}{right}", item, tensors, scalars)
    else:
        raise MisuseError(
            f"{path} is of type {type(value).__name__}; the state may hold tensors, numbers, text, None, and lists, tuples and "
            "dictionaries of them. Leave it out of state_dict(), or convert it"
        )


class Tree:
    """Entries of a state by path. `under(prefix)` is the nested value whose leaves begin with that path."""

    def __init__(self, entries: Iterable[tuple[str, Any]]) -> None:
        self._root: dict[str, Any] = {}
        for path, value in entries:
            *above, last = path.split("/")
            node = self._root
            for part in above:
                node = node.setdefault(part, {})
                if not isinstance(node, dict):
                    raise Fatal(f"the state to load has {path} below a tensor or a scalar")
            node[last] = _Leaf(value)

    def under(self, path: str) -> Any:
        """The nested value; None if there is none."""
        node: Any = self._root
        for part in path.split("/"):
            if isinstance(node, _Leaf) or part not in node:
                return None
            node = node[part]
        return _build(node, path)


class _Leaf:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _build(node: Any, path: str) -> Any:
    if isinstance(node, _Leaf):
        return node.value
    parts = list(node)
    if len(parts) == 1 and parts[0] in _EMPTY:
        return _EMPTY[parts[0]]()
    for kind, left, right in ((list, "[", "]"), (tuple, "(", ")")):
        if all(part.startswith(left) and part.endswith(right) and part[1:-1].isdigit() for part in parts):
            found = {int(part[1:-1]): _build(node[part], f"{path}/{part}") for part in parts}
            if sorted(found) != list(range(len(found))):
                raise Fatal(f"the state to load lacks elements of {path}")
            return kind(found[index] for index in range(len(found)))
    return {_dictionary_key(part): _build(node[part], f"{path}/{part}") for part in parts}


def _dictionary_key(part: str) -> str | int:
    if part.startswith("#"):
        return int(part[1:])
    return key_of(part)


def placed(value: Any, like: Any) -> Any:
    """A copy of a loaded value, with the types and devices of `like` where `like` has the same structure."""
    if isinstance(value, torch.Tensor):
        device = like.device if isinstance(like, torch.Tensor) else value.device
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        known = like if isinstance(like, Mapping) else {}
        made = {key: placed(item, known.get(key)) for key, item in value.items()}
        if isinstance(like, Counter):
            return Counter(made)
        return OrderedDict(made) if isinstance(like, OrderedDict) else made
    if isinstance(value, list | tuple):
        others = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
        return type(value)(placed(item, other) for item, other in zip(value, others, strict=True))
    return value
