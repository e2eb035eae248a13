"""Materialize: the tensors of a model that one pipeline stage needs, and nothing of the rest.

In: a model, on the meta device or real; the names of parameters and buffers, and of which a rank has a part alone; a seed.
Out: `Tensors`, real ones. What is on meta is initialized by the model's own rule: `reset_parameters` of each module, then
`_init_weights` of the transformers model that it is in, children first, each module with a seed of its own that follows from
its name. So every number of stages gives the same weights. They are drawn on the CPU, so all devices have the same ones.
Modules that have no tensors of their own are asked only inside a layer (a child with a number in its name), since those never
stand on two stages. What is real is taken as it is.

A tensor of which the rank has a part is whole while modules that are asked have it, so that the values are those of the whole
model: within a layer, then. From files the part alone is read.

Both ways the model is left with meta tensors in place of those that are not taken, so that their memory is free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixrt.errors import ConfigError
from helixrt.passes.pieces import Piece

LOSS = "loss."  # before the names of parameters and buffers of a loss that is a module, as `capture` has them
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensors:
    """By the names in the model: each parameter under all of its names; buffers, and which of them are persistent."""

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    persistent: frozenset[str]


@dataclass(frozen=True)
class Place:
    """Where a tensor stands in a module tree."""

    owner: nn.Module
    key: str
    is_parameter: bool

    @property
    def tensor(self) -> torch.Tensor:
        found = (self.owner._parameters if self.is_parameter else self.owner._buffers)[self.key]
        assert found is not None
        return found

    def put(self, tensor: torch.Tensor) -> None:
        if self.is_parameter:
            self.owner._parameters[self.key] = tensor  # type: ignore[assignment]
        else:
            self.owner._buffers[self.key] = tensor


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model that is to be made: all its places, and of which part, None for the whole."""

    places: tuple[Place, ...]
    name: str
    before: torch.Tensor
    piece: Piece | None

    def put(self, tensor: torch.Tensor) -> None:
        for place in self.places:
            place.put(tensor)


def places(model: nn.Module, loss: Any = None) -> dict[str, Place]:
    """Of all parameters and buffers, under all their names, those of a loss that is a module after `LOSS`."""
    found: dict[str, Place] = {}
    for prefix, root in (("", model), (LOSS, loss)):
        for path, owner in root.named_modules(remove_duplicate=False) if isinstance(root, nn.Module) else ():
            above = f"{prefix}{path}." if path else prefix
            for is_parameter, tensors in ((True, owner._parameters), (False, owner._buffers)):
                found |= {above + key: Place(owner, key, is_parameter) for key, value in tensors.items() if value is not None}
    return found


def materialize(
    model: nn.Module,
    names: Collection[str],
    *,
    loss: Any = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    weights: str | Path | None = None,
    pieces: Mapping[str, Piece] | None = None,
) -> Tensors:
    """The tensors called `names` (one name of a tied parameter is enough), on `device`.

    `weights`: a safetensors file, or a folder that `save_pretrained` has written; parameters and persistent buffers are
    read from there. `pieces`: by their first names, the parts of tensors that are not taken whole. Raises ConfigError, with the
    name, for a tensor on meta that the model has no rule for or that `weights` lacks.
    """
    everywhere = places(model, loss)
    same: dict[int, list[str]] = {}
    for name, place in everywhere.items():
        same.setdefault(id(place.tensor), []).append(name)
    taken = {id(everywhere[name].tensor): same[id(everywhere[name].tensor)] for name in names}
    persistent = persistent_names(model, loss)
    ruled: list[Wanted] = []
    stored: list[tuple[Wanted, list[str]]] = []
    with torch.no_grad():
        for identity, aliases in same.items():
            first, tensor = aliases[0], everywhere[aliases[0]].tensor
            here = tuple(everywhere[name] for name in aliases)
            wanted = Wanted(here, first, tensor, None if pieces is None else pieces.get(first))
            if identity in taken and weights is not None and _is_stored(everywhere[first], first, persistent):
                stored.append((wanted, aliases))
            elif identity in taken and tensor.is_meta:
                ruled.append(wanted)
            elif identity in taken:
                wanted.put(_moved(tensor, wanted.piece, device))
            elif not tensor.is_meta:
                wanted.put(_like(tensor, torch.empty_like(tensor, device="meta")))
    _initialize(model, loss, ruled, seed, device)
    if weights is not None:
        _read(Path(weights), stored, device)
    held = {name: everywhere[name] for aliases in taken.values() for name in aliases}
    return Tensors(
        {name: place.tensor for name, place in held.items() if place.is_parameter},  # type: ignore[misc]
        {name: place.tensor for name, place in held.items() if not place.is_parameter},
        frozenset(name for name, place in held.items() if not place.is_parameter and name in persistent),
    )


def persistent_names(model: nn.Module, loss: Any) -> set[str]:
    """Of the parameters and buffers that `state_dict` has."""
    names = set(model.state_dict(keep_vars=True))
    return names | ({LOSS + name for name in loss.state_dict(keep_vars=True)} if isinstance(loss, nn.Module) else set())


def _is_stored(place: Place, name: str, persistent: Collection[str]) -> bool:
    return (place.is_parameter or name in persistent) and not name.startswith(LOSS)


def _like(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`after` as a parameter if `before` is one."""
    return nn.Parameter(after, before.requires_grad) if isinstance(before, nn.Parameter) else after


def _moved(tensor: torch.Tensor, piece: Piece | None, device: torch.device | str) -> torch.Tensor:
    """The tensor itself where all of it is wanted and it is on the device already."""
    if piece is not None:
        return _like(tensor, piece.of(tensor.detach()).to(device, copy=True, memory_format=torch.contiguous_format))
    return tensor if tensor.device == torch.empty(0, device=device).device else _like(tensor, tensor.detach().to(device))


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Without values: NaN where the dtype has it, so that what no rule has filled is seen."""
    made = torch.empty_like(like, device="cpu")
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    return _like(like, made)


# ---------------------------------------------------------------- by the model's own rule


@dataclass(frozen=True)
class _Visit:
    """A module that is asked to initialize itself, and the tensors to be made that are in it or below it."""

    path: str
    module: nn.Module
    rule: Any
    tensors: frozenset[int]


def _initialize(model: nn.Module, loss: Any, ruled: Sequence[Wanted], seed: int, device: torch.device | str) -> None:
    """Make each tensor before the first module that has it is asked, and take its part after the last one. Raises ConfigError
    for one that was not filled, or replaced by another kind."""
    wanted = {id(each.before): each for each in ruled}
    visits = list(_visits(model, loss, wanted)) if wanted else []
    last = {identity: number for number, visit in enumerate(visits) for identity in visit.tensors}
    made: dict[int, tuple[torch.Tensor, int]] = {}  # with its version
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for number, visit in enumerate(visits):
            for identity in visit.tensors - made.keys():
                tensor = _empty(wanted[identity].before)
                made[identity] = tensor, tensor._version
                wanted[identity].put(tensor)
            torch.default_generator.manual_seed(_seed_of(seed, visit.path))  # an accelerator's stays as it is
            for name in ("reset_parameters", "_reset_parameters"):
                if callable(reset := getattr(visit.module, name, None)):
                    reset()
                    break
            if visit.rule is not None:
                visit.rule._init_weights(visit.module)
            for identity in visit.tensors:
                if last[identity] == number:
                    _finish(wanted[identity], *made.pop(identity), device)


def _visits(model: nn.Module, loss: Any, wanted: Collection[int]) -> Iterator[_Visit]:
    for prefix, root in (("", model), (LOSS.removesuffix("."), loss)):
        for path, module, rule in _modules(prefix, root, None, set()) if isinstance(root, nn.Module) else ():
            own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
            below = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}.intersection(wanted)
            inside = any(piece.isdecimal() for piece in path.split("."))
            if below and (inside or not own.isdisjoint(wanted)):
                yield _Visit(path, module, rule, frozenset(below))


def _finish(wanted: Wanted, made: torch.Tensor, version: int, device: torch.device | str) -> None:
    """Raises ConfigError."""
    tensor, name = wanted.places[0].tensor, wanted.name
    if tensor.is_meta or tensor.shape != made.shape or tensor.dtype != made.dtype:
        rule = f"was {made.dtype}{list(made.shape)} on meta and is another kind after its module"
        raise ConfigError("model", name, rule)
    if tensor.is_floating_point() or tensor.is_complex():
        filled = not bool(torch.isnan(tensor.detach()).any())
    else:
        filled = tensor is not made or tensor._version != version
    if not filled:
        what = "no rule gives it values: give its module `reset_parameters`"
        raise ConfigError("model", name, f"is on the meta device, and {what}, or build the model on a real device")
    wanted.put(_moved(tensor, wanted.piece, device))


def _modules(path: str, module: nn.Module, rule: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module once, children first, with the nearest module that has a rule for it."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if callable(getattr(module, "_init_weights", None)):
        rule = module
    for name, child in module.named_children():
        yield from _modules(f"{path}.{name}" if path else name, child, rule, seen)
    yield path, module, rule


def _seed_of(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed} {path}".encode(), digest_size=8, person=b"helixrt-weights")
    return int.from_bytes(digest.digest(), "little") >> 1


# ---------------------------------------------------------------- from files


def _read(path: Path, stored: Sequence[tuple[Wanted, Sequence[str]]], device: torch.device | str) -> None:
    """Make the tensors, each with its names, as the files have them. Raises ConfigError."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError("weights", path, "needs the package safetensors: pip install safetensors") from error
    files = _files(path)
    for wanted, aliases in stored:
        name, whole, piece = wanted.name, wanted.before, wanted.piece
        found = next((alias for alias in aliases if alias in files), None)
        if found is None:
            raise ConfigError("weights", path, f"does not hold {name}; save the model itself, so that names are the same")
        with safe_open(files[found], framework="pt", device=str(device)) as opened:
            shape = list(opened.get_slice(found).get_shape())
            if shape != list(whole.shape):
                raise ConfigError("weights", path, f"holds {name} of shape {shape}, the model has {list(whole.shape)}")
            value = opened.get_tensor(found) if piece is None else piece.read(opened.get_slice(found))
        with torch.no_grad():
            like = whole if piece is None else value
            wanted.put(_like(whole, torch.empty_like(like, dtype=whole.dtype, device=device).copy_(value)))


def _files(path: Path) -> dict[str, str]:
    """The file of each tensor, by name. Raises ConfigError."""
    from safetensors import safe_open

    if (path / INDEX).is_file():
        return {name: str(path / file) for name, file in json.loads((path / INDEX).read_text())["weight_map"].items()}
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("weights", path, f"must be a safetensors file, or a folder with model.safetensors or {INDEX}")
    with safe_open(str(file), framework="pt") as opened:
        return dict.fromkeys(opened.keys(), str(file))
