"""Materialize: the tensors of a model that one pipeline stage needs, and nothing of the rest.

In: a model, on the meta device or real; the names of parameters and buffers; a seed. Out: `Tensors`, real ones. What is on
meta is initialized by the model's own rule: `reset_parameters` of each module, then `_init_weights` of the transformers
model that it is in, children first, each module with a seed of its own that follows from its name. So every number of
stages gives the same weights. Modules that have no tensors of their own are asked only inside a layer (a child with a
number in its name), since those never stand on two stages. What is real is taken as it is.

Both ways the model is left with meta tensors in place of those that are not taken, so that their memory is free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixrt.errors import ConfigError

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
class Fresh:
    """A tensor without values yet, at this version."""

    tensor: torch.Tensor
    version: int


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
) -> Tensors:
    """The tensors called `names` (one name of a tied parameter is enough), on `device`.

    `weights`: a safetensors file, or a folder that `save_pretrained` has written; parameters and persistent buffers are
    read from there. Raises ConfigError, with the name, for a tensor on meta that the model has no rule for or that
    `weights` lacks.
    """
    everywhere = places(model, loss)
    same: dict[int, list[str]] = {}
    for name, place in everywhere.items():
        same.setdefault(id(place.tensor), []).append(name)
    taken = {id(everywhere[name].tensor): same[id(everywhere[name].tensor)] for name in names}
    persistent = persistent_names(model, loss)
    fresh: dict[str, Fresh] = {}  # by first name
    with torch.no_grad():
        for aliases in taken.values():
            before = everywhere[aliases[0]].tensor
            after = _empty(before, device) if before.is_meta else _moved(before, device)
            if before.is_meta:
                fresh[aliases[0]] = Fresh(after, after._version)
            for name in aliases:
                everywhere[name].put(after)
        for identity, aliases in same.items():
            before = everywhere[aliases[0]].tensor
            if identity not in taken and not before.is_meta:
                after = _like(before, torch.empty_like(before, device="meta"))
                for name in aliases:
                    everywhere[name].put(after)
    read: set[str] = set()
    if weights is not None:
        read = {name for aliases in taken.values() for name in aliases[:1] if _is_stored(everywhere[name], name, persistent)}
    fresh = {name: each for name, each in fresh.items() if name not in read}
    _initialize(model, loss, fresh, seed)
    if weights is not None:
        _read(Path(weights), {name: same_names for same_names in taken.values() if (name := same_names[0]) in read}, everywhere)
    _check(everywhere, fresh)
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


def _moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor itself where it is on the device already."""
    return tensor if tensor.device == torch.empty(0, device=device).device else _like(tensor, tensor.detach().to(device))


def _empty(like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Without values: NaN where the dtype has it, so that what no rule has filled is seen."""
    made = torch.empty_like(like, device=device)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    return _like(like, made)


# ---------------------------------------------------------------- by the model's own rule


def _initialize(model: nn.Module, loss: Any, fresh: Mapping[str, Fresh], seed: int) -> None:
    wanted = {id(each.tensor) for each in fresh.values()}
    if not wanted:
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for prefix, root in (("", model), (LOSS.removesuffix("."), loss)):
            for path, module, rule in _modules(prefix, root, None, set()) if isinstance(root, nn.Module) else ():
                own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
                inside = any(piece.isdecimal() for piece in path.split("."))
                below = inside and any(id(tensor) in wanted for tensor in (*module.parameters(), *module.buffers()))
                if not (own & wanted or below):
                    continue
                torch.manual_seed(_seed_of(seed, path))
                for name in ("reset_parameters", "_reset_parameters"):
                    if callable(reset := getattr(module, name, None)):
                        reset()
                        break
                if rule is not None:
                    rule._init_weights(module)


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


def _check(everywhere: Mapping[str, Place], fresh: Mapping[str, Fresh]) -> None:
    """Raises ConfigError for a tensor that was not filled, or replaced by another kind."""
    for name, each in fresh.items():
        tensor, now = each.tensor, everywhere[name].tensor
        if now.is_meta or now.shape != tensor.shape or now.dtype != tensor.dtype:
            raise ConfigError(
                "model", name, f"was {tensor.dtype}{list(tensor.shape)} on meta and is another kind after its module"
            )
        if now.is_floating_point() or now.is_complex():
            filled = not bool(torch.isnan(now.detach()).any())
        else:
            filled = now is not tensor or now._version != each.version
        if not filled:
            what = "no rule gives it values: give its module `reset_parameters`"
            raise ConfigError("model", name, f"is on the meta device, and {what}, or build the model on a real device")


# ---------------------------------------------------------------- from files


def _read(path: Path, taken: Mapping[str, Collection[str]], everywhere: Mapping[str, Place]) -> None:
    """Copy in what the files have. Raises ConfigError."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError("weights", path, "needs the package safetensors: pip install safetensors") from error
    files = _files(path)
    for name, aliases in taken.items():
        stored = next((alias for alias in aliases if alias in files), None)
        if stored is None:
            raise ConfigError("weights", path, f"does not hold {name}; save the model itself, so that names are the same")
        tensor = everywhere[name].tensor
        with safe_open(files[stored], framework="pt", device=str(tensor.device)) as opened:
            value = opened.get_tensor(stored)
        if value.shape != tensor.shape:
            raise ConfigError("weights", path, f"holds {name} of shape {list(value.shape)}, the model has {list(tensor.shape)}")
        with torch.no_grad():
            tensor.copy_(value)


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
