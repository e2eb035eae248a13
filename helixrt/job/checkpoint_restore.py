"""Which entries of a checkpoint one rank of any mesh reads, and what it makes of them.

In: the checkpoint's `Index`, whether this run has the mesh that it was written with, and the rank's live state with its
portions (`Engine.portions`): names, whole shapes and boxes decide, the stages and shards of before do not. Out: a `Restored`:
portions of stored tensors to read, and scalars, by the names that the rank's own state has. Its optimizers may have no state
yet: what belongs to a parameter lies as the parameter does if it has the parameter's shape, and is whole else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from helixrt.engines.replicated_state import PLACEMENTS
from helixrt.engines.state_tree import key_of, segment
from helixrt.job.checkpoint_layout import (
    OWN,
    Entry,
    Group,
    Index,
    PartIndex,
    dcp_key,
    is_of_group,
    is_of_model,
    is_of_parameter,
    model_names,
    renamed,
)
from helixrt.replica.contracts import Scalar, State
from helixrt.replica.portions import Portion

Value = TypeVar("Value", Entry, Scalar)
_MODULES = ("parameter/", "running_buffer/", "buffer/")  # of names in a rank's state


@dataclass(frozen=True)
class Wanted:
    """A tensor to read: a portion of the stored one of this DCP name, into a tensor of this shape. `crcs`: the CRC-32 of each
    stored box, by the box's offset."""

    portion: Portion
    shape: tuple[int, ...]
    dtype: str
    crcs: Mapping[tuple[int, ...], int]


@dataclass
class Restored:
    tensors: dict[str, Wanted] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # stored names of parameters and buffers


def restored(index: Index, rank: int, same_mesh: bool, live: State, portions: Mapping[str, Portion]) -> Restored:
    """What rank `rank` of its replica reads. Raises ValueError, with the name, for what the checkpoint does not have, or has in
    another shape or type, or for this mesh alone."""
    reading = _Reading(index, rank, same_mesh, live, portions)
    reading.modules()
    reading.optimizers()
    reading.others()
    return reading.found


class _Reading:
    def __init__(self, index: Index, rank: int, same_mesh: bool, live: State, portions: Mapping[str, Portion]) -> None:
        self.index, self.rank, self.same_mesh, self.live, self.portions = index, rank, same_mesh, live, portions
        self.found = Restored()
        self.names = model_names(portions)

    def modules(self) -> None:
        """Parameters and buffers: those that the rank has."""
        for path, tensor in self.live.tensors.items():
            if not path.startswith(_MODULES):
                continue
            portion, dtype = self.portions.get(path), str(tensor.dtype).removeprefix("torch.")
            if portion is None:
                self._own(path)
                continue
            stored = self.index.placed.get(portion.name)
            if stored is None or (stored.shape, stored.dtype) != (portion.shape, dtype):
                there = "absent" if stored is None else _words(stored.dtype, stored.shape)
                raise ValueError(f"{_bare(portion.name)!r} is {there} there and {_words(dtype, portion.shape)} in this model")
            self._place(path, portion, tuple(tensor.shape), stored)
            self.found.taken.add(portion.name)

    def optimizers(self) -> None:
        groups = Index([PartIndex({}, self.live.scalars)]).groups  # of this rank, by its own names of parameters
        keys = {group.key for group in groups}
        if unknown := sorted({group.key for group in self.index.groups} - keys):
            raise ValueError(f"it holds the state of optimizer {unknown[0]}, which is not registered")
        homes = {(group.key, name): group for group in reversed(self.index.groups) for name in group.parameters}
        by_parameter = self._state_by_parameter()
        for group in groups:
            self._group(group, homes)
            for name in group.parameters:
                for stored in by_parameter.get((group.key, self.names.get(name, name)), ()):
                    self._state_entry(group.key, name, stored)

    def _state_by_parameter(self) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        own = (*self._own_tensors(), *self._own_scalars())
        for name in (*self.index.placed, *self.index.common, *self.index.common_scalars, *own):
            if is_of_parameter(name):
                _, key, _, parameter, *_ = name.split("/")
                found.setdefault((key_of(key), key_of(parameter)), []).append(name)
        return found

    def _group(self, group: Group, homes: Mapping[tuple[str, str], Group]) -> None:
        """The group that has these parameters there, whatever its number."""
        before: list[Group] = []
        for name in group.parameters:
            home = homes.get((group.key, self.names.get(name, name)))
            if home is None:
                later = "register from the start what is trained later, and name it in a function registered by session.freeze"
                raise ValueError(f"optimizer {group.key} does not hold {name} there; {later}")
            if home not in before:
                before.append(home)
        if not before:  # a group without parameters
            before = [g for g in self.index.groups if (g.key, g.number) == (group.key, group.number)][:1]
        if not before:
            raise ValueError(f"optimizer {group.key} has no group {group.number} there")
        scalars, tensors = self.index.of_group(before[0])
        for other in before[1:]:
            if self.index.of_group(other) != (scalars, tensors):
                names = f"{before[0].parameters[0]} and {other.parameters[0]}"
                raise ValueError(f"optimizer {group.key} has {names} in groups of other settings there, and in one here")
        self.found.scalars |= {group.path + name: value for name, value in scalars.items()}
        for name, stored in tensors.items():
            self._take(group.path + name, stored)
        mine = f"{group.path}params/"
        self.found.scalars |= {n: v for n, v in self.live.scalars.items() if n.startswith(mine)}

    def _state_entry(self, key: str, name: str, stored: str) -> None:
        rest = stored.split("/", 4)[4]
        path = f"optimizer/{segment(key)}/state/{segment(name)}/{rest}"
        if stored in self.index.common_scalars:
            self.found.scalars[path] = self.index.common_scalars[stored]
        elif stored not in self.index.placed:
            self._own(path)
        else:
            entry, parameter = self.index.placed[stored], f"parameter/{name}"
            like = self.portions.get(path) or self.portions.get(parameter)
            if like is None or like.shape != entry.shape:
                self._place(path, Portion.whole(stored, entry.shape), entry.shape, entry)
                return
            shape = tuple(self.live.tensors[path if path in self.portions else parameter].shape)
            self._place(path, Portion(stored, like.shape, like.blocks), shape, entry)
            placement = self.live.scalars.get(PLACEMENTS + parameter)
            if placement is not None:
                self.found.scalars[PLACEMENTS + path] = placement

    def others(self) -> None:
        """What belongs to no parameter: the same on all ranks, or this rank's own in the same mesh."""
        for name in self.index.placed:  # DTensors of the user's own objects
            if is_of_model(name) or is_of_parameter(name):
                continue
            portion = self.portions.get(name)
            entry = self.index.placed[name]
            if portion is None:
                self._place(name, Portion.whole(name, entry.shape), entry.shape, entry)
            elif portion.shape != entry.shape:
                raise ValueError(f"{name} has shape {list(entry.shape)} there and {list(portion.shape)} here")
            else:
                self._place(name, portion, tuple(self.live.tensors[name].shape), entry)
        for name in self.index.common:
            if not _is_elsewhere(name):
                self._take(name, name)
        self.found.scalars |= {n: v for n, v in self.index.common_scalars.items() if not _is_elsewhere(n)}
        for name in (*self._own_tensors(), *self._own_scalars()):
            if not _is_elsewhere(name):
                self._own(name)

    def _own_tensors(self) -> dict[str, Entry]:
        return {name: entry for own in self._whose(self.index.own) for name, entry in own.items()}

    def _own_scalars(self) -> dict[str, Scalar]:
        return {name: value for own in self._whose(self.index.own_scalars) for name, value in own.items()}

    def _whose(self, own: Sequence[dict[str, Value]]) -> Sequence[dict[str, Value]]:
        """In another mesh that of all ranks: what is there is refused, with its name."""
        return own[self.rank : self.rank + 1] if self.same_mesh else own

    def _own(self, path: str) -> None:
        """An entry of which each rank has its own, or one that all have alike."""
        name = renamed(path, self.portions)
        if name in self.index.common:
            self._take(path, name)
        elif not self.same_mesh:
            raise ValueError(
                f"{name} differs between the ranks that wrote it, and nothing says how it lies in the whole model; resume with "
                "the same mesh in each replica, or declare it (Stages(names=..., layouts=...), ParameterLayout(cuts=...))"
            )
        elif name in self.index.own_scalars[self.rank]:
            self.found.scalars[path] = self.index.own_scalars[self.rank][name]
        elif name in self.index.own[self.rank]:
            self._take(path, f"{OWN}/{self.rank}/{name}")
        else:
            raise ValueError(f"{path!r} is absent there")

    def _take(self, path: str, stored: str) -> None:
        """All of a tensor that is no placed one; in a shape and type of its own."""
        name = stored.split("/", 2)[2] if stored.startswith(f"{OWN}/") else stored
        entry = self.index.own[int(stored.split("/")[1])][name] if name != stored else self.index.common[name]
        live = self.live.tensors.get(path)
        if live is not None and path.startswith(_MODULES) and tuple(live.shape) != entry.shape:
            raise ValueError(f"{path!r} is {_words(entry.dtype, entry.shape)} there and of shape {list(live.shape)} here")
        self._place(path, Portion.whole(stored, entry.shape), entry.shape, entry)

    def _place(self, path: str, portion: Portion, shape: tuple[int, ...], stored: Entry) -> None:
        there = Portion(dcp_key(portion.name), portion.shape, portion.blocks)
        self.found.tensors[path] = Wanted(there, shape, stored.dtype, stored.crc_at)
        if PLACEMENTS + path in self.live.scalars:
            self.found.scalars[PLACEMENTS + path] = self.live.scalars[PLACEMENTS + path]


def empty_of(wanted: Wanted) -> torch.Tensor:
    return torch.empty(wanted.shape, dtype=getattr(torch, wanted.dtype))


def _is_elsewhere(name: str) -> bool:
    """Whether it belongs to parameters or to groups, which are read by these."""
    return name.startswith(_MODULES) or is_of_parameter(name) or is_of_group(name)


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{list(shape)} {dtype}"
