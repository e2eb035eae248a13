"""The part of the whole replica's state that this rank holds: by placements of DTensors, and by what a model in stages
declares.

In: an engine's replicated state, the replica's mesh, the model's own names of parameters and buffers, and for tensors that are
cut and are no DTensors how they are. Out: a `Portion` for each tensor that is a parameter, a buffer, the state of an optimizer
for a parameter, or a DTensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from helixrt.engines.replica_mesh import AXES, ReplicaMesh
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import is_sharded
from helixrt.engines.state_tree import key_of, segment
from helixrt.replica.portions import MODEL, NOT_PERSISTENT, Portion, Runs, cut, every, parts_of

_MODULES = ("parameter", "running_buffer", "buffer")  # first parts of names in a state, of what modules have


@dataclass(frozen=True)
class Cut:
    """Dimension `dim` of a parameter is cut over the ranks of these axes of the mesh, numbered together in the mesh's order.
    With `sections` (full sizes, in order) each section is cut on its own, as weights that pack several matrices are. One that
    is cut unevenly needs one section, of its size."""

    dim: int
    axes: tuple[str, ...]
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Places:
    """What an engine says of its parameters and buffers, by registered names. `names`: those of the whole model, where they are
    others. `cuts`: of tensors that are cut besides what their placement as DTensors says; `unknown`: of which that is not
    said. `copies`: of which an earlier stage has a copy."""

    names: Mapping[str, str]
    cuts: Mapping[str, Sequence[Cut]]
    unknown: Collection[str] = ()
    copies: Collection[str] = ()


NOTHING = Places({}, {})


def portions_of(state: ReplicatedState, mesh: ReplicaMesh, places: Places = NOTHING) -> dict[str, Portion]:
    """By name in the state. What is left out may differ from rank to rank."""
    tensors, _ = state.entries()
    parameters = {path.split("/", 1)[1]: t for path, t in tensors.items() if path.startswith("parameter/")}
    found: dict[str, Portion] = {}
    others = state.other_names if places.names == {} else {}
    for path, tensor in tensors.items():
        kind, *rest = path.split("/")
        if kind in _MODULES:
            name = "/".join(rest)
            first = NOT_PERSISTENT if name in state.not_persistent and kind != "parameter" else MODEL
            own = f"{first}/{places.names.get(name, name)}"
        elif kind == "optimizer" and rest[1] == "state" and (name := key_of(rest[2])) in parameters:
            own = _renamed(path, places)
            if not _follows(tensor, parameters[name]):
                if is_sharded(parameters[name]) and tensor.numel() > 1:  # a rank's own part, but where it says how it lies
                    if is_sharded(tensor) and not (name in places.cuts or name in places.unknown):
                        found[path] = _portion(own, tensor, mesh, (), name not in places.copies)
                elif tensor.numel() == 1 or not (name in places.cuts or name in places.unknown):
                    found[path] = _one_of_each(own, tensor, mesh, name in places.copies)
                continue  # else it may be the part of a tensor of another shape than the parameter
        elif is_sharded(tensor):
            found[path] = _portion(path, tensor, mesh, ())
            continue
        else:
            continue
        if name not in places.unknown:
            found[path] = _portion(own, tensor, mesh, places.cuts.get(name, ()), name not in places.copies)
            if kind in _MODULES and name in others:
                found[path] = replace(found[path], also=tuple(f"{first}/{other}" for other in others[name]))
    return found


def _follows(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether an entry of an optimizer's state is placed as its parameter."""
    return tensor.shape == parameter.shape and is_sharded(tensor) == is_sharded(parameter)


def _renamed(path: str, places: Places) -> str:
    """Of an entry of an optimizer's state."""
    first, key, state, name, *rest = path.split("/")
    own = key_of(name)
    return "/".join((first, key, state, segment(places.names.get(own, own)), *rest))


def _one_of_each(name: str, tensor: torch.Tensor, mesh: ReplicaMesh, copied: bool) -> Portion:
    """For entries that are equal on all ranks that share the parameter, such as its step counter."""
    first = all(mesh.rank(axis) == 0 for axis in AXES if axis != "pp")
    return Portion.whole(name, tensor.shape, first and not copied)


def _portion(name: str, tensor: Any, mesh: ReplicaMesh, cuts: Sequence[Cut], writes: bool = True) -> Portion:
    shape = list(tensor.shape)
    for each in cuts:
        shape[each.dim] = sum(each.sections) or shape[each.dim] * mesh.size(*each.axes)
    held: list[Runs] = [every(size) for size in shape]
    used: set[str] = set()
    for each in cuts:
        held[each.dim] = cut(held[each.dim], mesh.rank(*each.axes), mesh.size(*each.axes), each.sections)
        used |= set(each.axes)
    if is_sharded(tensor):
        used |= _cut_by_placements(held, tensor)
    first = all(mesh.rank(axis) == 0 for axis in AXES if axis != "pp" and axis not in used)
    return Portion.of(name, shape, held, writes and first)


def _cut_by_placements(held: list[Runs], tensor: Any) -> set[str]:
    """Of what is held already this DTensor's local part, in place; the axes of the mesh that cut it."""
    from helixrt.engines.dtensor_private import factor_of

    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("dp_shard",)
    at = mesh.get_coordinate()
    assert at is not None, "a rank holds a part of each of its tensors"
    used: set[str] = set()
    for axis, rank, ranks, placement in zip(names, at, mesh.shape, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        used.add(axis)
        runs, factor = held[placement.dim], factor_of(placement)
        sections = () if factor is None else parts_of(sum(count for _, count in runs), factor)
        held[placement.dim] = cut(runs, rank, ranks, sections)
    return used
