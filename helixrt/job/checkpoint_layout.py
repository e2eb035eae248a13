"""What a checkpoint's ranks have written, and how their parts make up the state of the whole replica.

In: of each rank, its state and how that lies in the whole (`Engine.portions`). Out: `RankPart`, which the rank writes, and its
description `PartIndex`, JSON that stands beside it; `Index`, what all descriptions together hold. Three kinds of entries:

- *placed* ones have the whole model's names and are stored as boxes, each by one rank: parameters, buffers (`model/NAME`), the
  state of optimizers for a parameter (`optimizer/KEY/state/NAME/…`), DTensors. Any mesh can read them.
- Of the others (`scheduler/…`, `scaler`, `extra/…`) each rank stores its own. Those that are equal on all ranks are *common*.
- What differs between ranks is the *own* state of each: only the same mesh can read it.

Pure decisions, but for `RankPart.of`, which copies tensors.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from math import prod
from typing import Any

import torch

from helixrt.engines.replicated_state import PLACEMENTS
from helixrt.engines.state_tree import Tree, key_of, segment
from helixrt.replica.contracts import Scalar, State
from helixrt.replica.live_bytes import queued_copy
from helixrt.replica.portions import MODEL, NOT_PERSISTENT, Portion

OWN = "own"  # first part of the names of what a rank alone has, before its number

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size in the whole tensor


@dataclass(frozen=True)
class Entry:
    """A tensor, or what one rank has stored of it: the boxes, and the CRC-32 of the bytes of each. `placed`: its place in the
    whole model is known."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    placed: bool
    crcs: tuple[int, ...] = ()

    @property
    def crc_at(self) -> dict[tuple[int, ...], int]:
        """The CRC-32 of each box, by the box's offset."""
        return dict(zip((offset for offset, _ in self.boxes), self.crcs, strict=True))


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the DCP checkpoint, and where each of its boxes is stored."""

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    stored: Sequence[Any]


@dataclass(frozen=True)
class PartIndex:
    """What one rank has stored: entries by name, scalars by name. Their boxes are in the rank's files in this order. `also`:
    other names of entries in the model, and the names that these have here."""

    entries: Mapping[str, Entry]
    scalars: Mapping[str, Scalar]
    also: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        entries = {name: [e.dtype, e.shape, e.boxes, e.placed, e.crcs] for name, e in self.entries.items()}
        return {"entries": entries, "scalars": dict(self.scalars), "also": dict(self.also)}

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> PartIndex:
        """Raises KeyError, TypeError or ValueError for what `to_plain` did not give."""
        entries = {
            str(name): Entry(str(dtype), _ints(shape), tuple((_ints(a), _ints(b)) for a, b in boxes), bool(placed), _ints(crcs))
            for name, (dtype, shape, boxes, placed, crcs) in raw["entries"].items()
        }
        return PartIndex(entries, dict(raw["scalars"]), dict(raw.get("also", {})))


@dataclass(frozen=True)
class RankPart:
    """What one rank writes: entries and scalars, and the tensors of all boxes, in the order of entries, on the CPU. The values
    are there when `copied` returns."""

    entries: Mapping[str, Entry]
    scalars: Mapping[str, Scalar]
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    copied: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    also: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(state: State, portions: Mapping[str, Portion], copied: Callable[[], None] = lambda: None) -> RankPart:
        """A copy of what this rank has to write of its state. The copies of tensors on CUDA devices are queued on the current
        stream; `copied` waits for them."""
        entries: dict[str, Entry] = {}
        stored: list[torch.Tensor] = []
        for path, tensor in state.tensors.items():
            portion, dtype = portions.get(path), str(tensor.dtype).removeprefix("torch.")
            if portion is None:
                mine = queued_copy(tensor)
                name = renamed(path, portions)
                entries[name] = Entry(dtype, tuple(mine.shape), (((0,) * mine.dim(), tuple(mine.shape)),), False)
                stored.append(mine)
            elif portion.writes and portion.name not in entries:
                boxes = tuple((block.offset, block.size) for block in portion.blocks)
                entries[portion.name] = Entry(dtype, portion.shape, boxes, True)
                stored += [queued_copy(box_of(tensor, block.local, block.size)) for block in portion.blocks]
        scalars = {renamed(path, portions): value for path, value in state.scalars.items() if not path.startswith(PLACEMENTS)}
        also = {other: portion.name for portion in portions.values() for other in portion.also}
        return RankPart(entries, scalars, tuple(stored), copied, also)

    def index(self) -> PartIndex:
        """With the CRC-32 of every box: reads all bytes."""
        crcs = iter([crc_of(tensor) for tensor in self.tensors])
        found = {name: replace(entry, crcs=tuple(islice(crcs, len(entry.boxes)))) for name, entry in self.entries.items()}
        return PartIndex(found, self.scalars, self.also)


@dataclass(frozen=True)
class Group:
    """A parameter group of an optimizer as one rank has it: number, parameters, and the names of its other entries below
    `optimizer/KEY/group/NUMBER/`."""

    rank: int
    key: str
    number: str
    parameters: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"optimizer/{segment(self.key)}/group/{self.number}/"


class Index:
    """All parts of a checkpoint, by rank. Raises ValueError for placed entries that are not whole or do not fit each other."""

    def __init__(self, parts: Sequence[PartIndex]) -> None:
        self.parts = tuple(parts)
        self.placed: dict[str, Entry] = {}
        self.writers: dict[str, list[tuple[int, int]]] = {}  # of placed entries, of each box: rank, and its number there
        for rank, part in enumerate(parts):
            for name, entry in part.entries.items():
                if entry.placed:
                    self._take_up(rank, name, entry)
        for name, entry in self.placed.items():
            if sum(prod(size) for _, size in entry.boxes) != prod(entry.shape):
                raise ValueError(f"{name} of shape {list(entry.shape)} is not whole: it has the boxes {list(entry.boxes)}")
        others = [{name: e for name, e in part.entries.items() if not e.placed} for part in parts]
        first = others[0] if others else {}
        self.common = {name: e for name, e in first.items() if all(each.get(name) == e for each in others)}
        self.own = [{name: e for name, e in each.items() if name not in self.common} for each in others]
        self._sort_scalars()

    def _take_up(self, rank: int, name: str, entry: Entry) -> None:
        known = self.placed.get(name, Entry(entry.dtype, entry.shape, (), True))
        if (known.dtype, known.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"{name} is {known.dtype}{list(known.shape)} on one rank and {entry.dtype}{list(entry.shape)} on rank {rank}; "
                "tensors of the model have names of their own (Stages(names=...))"
            )
        boxes = dict(zip(known.boxes, known.crcs, strict=True))
        writers = self.writers.setdefault(name, [])
        for number, (box, crc) in enumerate(zip(entry.boxes, entry.crcs, strict=True)):
            if box not in boxes:
                boxes[box] = crc
                writers.append((rank, number))
            elif boxes[box] != crc:
                raise ValueError(
                    f"{name} has other values on rank {rank} than on another rank that has written it; if they are two "
                    "tensors of the model, give them names of their own (Stages(names=...))"
                )
        self.placed[name] = Entry(entry.dtype, entry.shape, tuple(boxes), True, tuple(boxes.values()))

    def _sort_scalars(self) -> None:
        """Of the state for a parameter the ranks that have it must agree; groups are found by their parameters."""
        self.common_scalars: dict[str, Scalar] = {}
        self.own_scalars: list[dict[str, Scalar]] = [{} for _ in self.parts]
        for name in dict.fromkeys(name for part in self.parts for name in part.scalars):
            if is_of_group(name):
                continue
            here = [rank for rank, part in enumerate(self.parts) if name in part.scalars]
            values = [self.parts[rank].scalars[name] for rank in here]
            everywhere = len(here) == len(self.parts) or is_of_parameter(name)
            if everywhere and all(_same(value, values[0]) for value in values):
                self.common_scalars[name] = values[0]
                continue
            for rank, value in zip(here, values, strict=True):
                self.own_scalars[rank][name] = value

    @cached_property
    def groups(self) -> list[Group]:
        """The parameter groups of all optimizers on all ranks."""
        found: dict[tuple[int, str, str], list[tuple[int, str]]] = {}
        for rank, part in enumerate(self.parts):
            for name, value in part.scalars.items():
                if is_of_group(name):
                    _, key, _, number, *rest = name.split("/")
                    members = found.setdefault((rank, key_of(key), number), [])
                    if len(rest) == 2 and rest[0] == "params" and rest[1] != "{}":
                        members.append((int(value), key_of(rest[1])))  # type: ignore[arg-type]
        return [
            Group(rank, key, number, tuple(name for _, name in sorted(members)))
            for (rank, key, number), members in found.items()
        ]

    def of_group(self, group: Group) -> tuple[dict[str, Scalar], dict[str, str]]:
        """Scalars of a group, and the stored names of its tensors, by what follows the group's path."""
        part, path = self.parts[group.rank], group.path
        scalars = {n.removeprefix(path): v for n, v in part.scalars.items() if n.startswith(path)}
        tensors = {
            n.removeprefix(path): n if n in self.common else f"{OWN}/{group.rank}/{n}"
            for n in part.entries
            if n.startswith(path)
        }
        return {name: value for name, value in scalars.items() if not name.startswith("params/")}, tensors


# ---------------------------------------------------------------- as plain PyTorch reads it


def tensors_of(index: Index, stored: Sequence[Sequence[Any]]) -> dict[tuple[str, ...], WholeTensor]:
    """The tensors of the DCP checkpoint by their keys in its nested state. `stored`: of each rank, where its boxes are."""
    starts = [_starts(part) for part in index.parts]
    found: dict[tuple[str, ...], WholeTensor] = {}
    for name, entry in index.placed.items():
        where = [stored[rank][starts[rank][name] + number] for rank, number in index.writers[name]]
        found[key_path(name)] = WholeTensor(entry.dtype, entry.shape, entry.boxes, where)
    for other, name in ((other, name) for part in index.parts for other, name in part.also.items()):
        found.setdefault(key_path(other), found[key_path(name)])
    for name, entry in index.common.items():
        found[key_path(name)] = WholeTensor(entry.dtype, entry.shape, entry.boxes, [stored[0][starts[0][name]]])
    for rank, own in enumerate(index.own):
        for name, entry in own.items():
            path = (OWN, str(rank), *key_path(name))
            found[path] = WholeTensor(entry.dtype, entry.shape, entry.boxes, [stored[rank][starts[rank][name]]])
    return found


def objects_of(index: Index) -> dict[tuple[str, ...], Any]:
    """What is no tensor, by its key in the nested state: of each optimizer `param_groups`, as PyTorch's functions for
    distributed checkpoints have it (with names of parameters), then all other scalars; a value without tensors is one."""
    found: dict[tuple[str, ...], Any] = {}
    for key in dict.fromkeys(group.key for group in index.groups):
        found["optimizer", key, "param_groups"] = _param_groups(index, key)
    found |= _values(index.common_scalars, {*index.placed, *index.common})
    for rank, own in enumerate(index.own_scalars):
        found |= {(OWN, str(rank), *path): value for path, value in _values(own, set(index.own[rank])).items()}
    return found


def _param_groups(index: Index, key: str) -> list[dict[str, Any]]:
    """The groups of all ranks, those with one number and the same settings taken together."""
    made: dict[str, dict[str, Any]] = {}
    for group in index.groups:
        if group.key == key:
            scalars, _ = index.of_group(group)
            settings = Tree((f"group/{name}", value) for name, value in scalars.items()).under("group") or {}
            known = made.setdefault(f"{group.number} {json.dumps(scalars, sort_keys=True)}", {"params": [], **settings})
            known["params"] += [name for name in group.parameters if name not in known["params"]]
    return list(made.values())


def _values(scalars: Mapping[str, Scalar], tensors: set[str]) -> dict[tuple[str, ...], Any]:
    """Nested values two keys deep (`scheduler/0`: all below its entries), or one by one where tensors are among them."""
    with_tensors = {_above(name) for name in tensors}
    tree = Tree(scalars.items())
    found: dict[tuple[str, ...], Any] = {}
    for name, value in scalars.items():
        above = _above(name)
        if name.endswith("/{}") and above in with_tensors:
            continue  # empty on some rank
        if above in with_tensors or above == name:
            found[key_path(name)] = value
        else:
            found[key_path(above)] = tree.under(above)
    return found


def _above(name: str) -> str:
    return "/".join(name.split("/")[:3])


def _starts(part: PartIndex) -> dict[str, int]:
    """Of each entry the number of its first box."""
    found, at = {}, 0
    for name, entry in part.entries.items():
        found[name] = at
        at += len(entry.boxes)
    return found


# ---------------------------------------------------------------- names


def is_of_model(name: str) -> bool:
    """Whether it is a parameter or a buffer."""
    return name.startswith((f"{MODEL}/", f"{NOT_PERSISTENT}/"))


def is_of_group(name: str) -> bool:
    return name.startswith("optimizer/") and name.split("/")[2] == "group"


def is_of_parameter(name: str) -> bool:
    return name.startswith("optimizer/") and name.split("/")[2] == "state"


def model_names(portions: Mapping[str, Portion]) -> dict[str, str]:
    """The names of parameters in the whole model, by those in the rank's state."""
    return {
        path.removeprefix("parameter/"): portion.name.removeprefix(f"{MODEL}/")
        for path, portion in portions.items()
        if path.startswith("parameter/")
    }


def renamed(path: str, portions: Mapping[str, Portion]) -> str:
    """An entry's name by that which its parameter has in the whole model."""
    parts = path.split("/")
    at = 3 if is_of_parameter(path) else 5 if is_of_group(path) and parts[4] == "params" else 0
    if at and at < len(parts):
        known = portions.get(f"parameter/{key_of(parts[at])}")
        if known is not None:
            parts[at] = segment(known.name.removeprefix(f"{MODEL}/"))
    return "/".join(parts)


def key_path(name: str) -> tuple[str, ...]:
    """The entry's keys in a nested state, as plain PyTorch reads it."""
    first, _, rest = name.partition("/")
    return (first, rest) if is_of_model(name) else tuple(key_of(part) for part in name.split("/"))


def dcp_key(name: str) -> str:
    """The entry's name in the DCP checkpoint."""
    return ".".join(key_path(name))


# ---------------------------------------------------------------- tensors


def box_of(tensor: torch.Tensor, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (start, count) in enumerate(zip(offset, size, strict=True)):
        tensor = tensor.narrow(dim, start, count)
    return tensor


def crc_of(tensor: torch.Tensor) -> int:
    """CRC-32 of its values, in the order of its dimensions."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _same(one: Scalar, other: Scalar) -> bool:
    """NaN is the same as NaN."""
    return json.dumps(one) == json.dumps(other)
