"""The model that `helixrt strands` is about: one of the project's, or what a function of the user's makes.

In: its name, sizes and the ranks that share it; the process group of those ranks is ready, or there is one rank. Out: a
`Subject`: the module as this rank holds it, and the arguments of a step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helixrt.errors import ConfigError, MissingExtra
from helixrt.parallel.group import Group
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import ParallelGroups

SEED = 7
AXES = ("ep", "cp", "tp")  # of the mesh; ranks of tp are neighbours


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What may be said of one of the project's models; `layers` 0 leaves it as it is."""

    layers: int = 0
    seq_len: int = 128
    batch: int = 4
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.ep


@dataclass(frozen=True)
class Subject:
    """A model and the arguments of a step of `microbatches`: the whole batch."""

    title: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    target: Any = None


def names() -> list[str]:
    """The project's models."""
    folder = resources.files("helixrt.conf") / "model"
    return sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml"))


def model_config(name: str) -> ModelConfig:
    """One of them. Raises ConfigError for another name."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise MissingExtra("hydra-core", "train", "a model of helixrt's own") from error
    if name not in names():
        raise ConfigError("MODEL", name, f"must be one of {', '.join(names())}, or module:function")
    text = (resources.files("helixrt.conf") / "model" / f"{name}.yaml").read_text(encoding="utf-8")
    plain = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(plain, dict)
    return ModelConfig(**{str(key): value for key, value in plain.items()})


def of_project(name: str, sizes: Sizes, microbatches: int, device: torch.device) -> Subject:
    """One of the project's models, shared as `sizes` say. Raises ConfigError for what cannot be shared so."""
    config = model_config(name)
    config = replace(config, layers=sizes.layers) if sizes.layers else config
    module = build_chunk(
        config, sizes.seq_len, 0, 1, seed=SEED, groups=_groups(sizes, device), auxiliary_scale=1.0 / microbatches
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(SEED + rank // sizes.tp)  # ranks of tp share their tokens
    shape = (2, sizes.batch * microbatches, sizes.seq_len // sizes.cp)
    tokens, targets = torch.randint(0, config.vocab, shape, generator=generator).to(device)
    shared = "".join(f", {axis} {getattr(sizes, axis)}" for axis in reversed(AXES) if getattr(sizes, axis) > 1)
    shared += " with sequence parallelism" if sizes.sequence else ""
    layers = f"{config.layers} layer" + "s" * (config.layers > 1)
    title = f"{name}, {layers}, {sizes.batch} x {sizes.seq_len} tokens{shared}"
    return Subject(title, module.to(device), (tokens,), loss=token_loss, target=targets)


def _groups(sizes: Sizes, device: torch.device) -> ParallelGroups:
    if sizes.ranks == 1:
        return ParallelGroups(sequence=sizes.sequence)
    mesh = init_device_mesh(device.type, tuple(getattr(sizes, axis) for axis in AXES), mesh_dim_names=AXES)
    ep, cp, tp = (Group.of(mesh.get_group(axis)) for axis in AXES)
    return ParallelGroups(tp=tp, sequence=sizes.sequence, cp=cp, ep=ep)


def of_user(path: str, device: torch.device) -> Subject:
    """What `module:function` makes: (model, *arguments) or (model, *arguments, {keywords}).

    Arguments are those of a step's whole batch; keywords are the model's, and `loss` and `target` as `helixrt.compile`
    and `train_step` take them. Raises ConfigError for everything else.
    """
    made = _function(path)
    try:
        answer = made()
    except Exception as error:  # the user's function may raise anything
        raise ConfigError("MODEL", path, f"raised {type(error).__name__}: {_line(error)}") from error
    if not isinstance(answer, tuple) or not answer or not isinstance(answer[0], nn.Module):
        raise ConfigError("MODEL", path, "must return (model, argument, ...), the model a torch.nn.Module")
    module, *args = answer
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    loss, target = kwargs.pop("loss", None), kwargs.pop("target", None)
    loss = loss.to(device) if isinstance(loss, nn.Module) else loss
    if not args and not kwargs:
        raise ConfigError("MODEL", path, "must return the arguments of a step after the model")
    args, kwargs, target = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs, target))
    return Subject(path, module.to(device), tuple(args), kwargs, loss, target)


def _function(path: str) -> Callable[[], Any]:
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # a module may raise anything when it is imported
        raise ConfigError("MODEL", path, f"{module} cannot be imported: {_line(error)}") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise ConfigError("MODEL", path, f"{module} has no function {name}")
    return found


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
