"""Which ranks share a model, and which part of each parameter is whose.

In: process groups, and a module whose layers declare a `Layout` for what they hold in part. Out: the parts of full
tensors, and the layouts of parameters for a session.

Tensor parallelism (tp) cuts matrices as Shoeybi et al. (Megatron-LM, 2019), with sequence parallelism as Korthikanti
et al. (2022): between the matrices each rank holds a slice of the sequence. Context parallelism (cp) cuts the whole
sequence, expert parallelism (ep) the experts of a mixture; both are data-parallel for everything else. Embeddings and
the output head are whole on every rank of tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from helixrt import Cut, ParameterLayout
from helixrt.errors import ConfigError
from helixrt.parallel.group import Group
from helixrt.train.config import ModelConfig

Axis = Literal["tp", "ep"]
EXPERT_AXES = ("dp_shard", "cp")  # of a session's mesh: ranks with other tokens, over which experts are spread


@dataclass(frozen=True)
class ParallelGroups:
    """The groups this rank belongs to; None means alone.

    `sequence` splits the sequence over tp between matrices. `ep` is either the same group as `cp` or one across it,
    whose ranks have other batches (data parallel).
    """

    tp: Group | None = None
    sequence: bool = False
    cp: Group | None = None
    ep: Group | None = None

    @property
    def tp_size(self) -> int:
        return self.tp.size if self.tp else 1

    @property
    def ep_size(self) -> int:
        return self.ep.size if self.ep else 1


ALONE = ParallelGroups()


@dataclass(frozen=True)
class Shard:
    """A dimension cut over an axis. With `sections` (full sizes, in order) each section is cut on its own."""

    axis: Axis
    dim: int
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a parameter is placed on the ranks. `partial`: each rank of tp has only a summand of its gradient.

    `expert`: its gradient already holds the tokens of every rank of ep.
    """

    shards: tuple[Shard, ...] = ()
    partial: bool = False
    expert: bool = False


REPLICATED = Layout()


@runtime_checkable
class Laid(Protocol):
    """A module that declares the placement of its own parameters, by name; those not named are replicated."""

    def layout(self) -> Mapping[str, Layout]: ...


def layouts(module: nn.Module) -> dict[str, Layout]:
    """The layout of every parameter, by the names of `named_parameters`."""
    declared = {
        f"{path}.{name}" if path else name: layout
        for path, part in module.named_modules()
        if isinstance(part, Laid)
        for name, layout in part.layout().items()
    }
    return {name: declared.get(name, REPLICATED) for name, _ in module.named_parameters()}


def parameter_layouts(module: nn.Module, *, groups: ParallelGroups) -> dict[str, ParameterLayout]:
    """The same as a session knows it, by the axes of its mesh: gradients are summed over ranks that see other tokens."""
    return {name: _on_mesh(layout, groups) for name, layout in layouts(module).items()}


def _on_mesh(layout: Layout, groups: ParallelGroups) -> ParameterLayout:
    sharded: tuple[str, ...] = ()
    cuts: tuple[Cut, ...] = ()
    for shard in layout.shards:
        group = groups.tp if shard.axis == "tp" else groups.ep
        if group is not None:
            axes = ("tp",) if shard.axis == "tp" else EXPERT_AXES
            sharded += axes
            cuts += (Cut(shard.dim, axes, shard.sections),)
    data = () if layout.expert and groups.ep is not None else EXPERT_AXES
    return ParameterLayout(sharded, (*data, "tp") if layout.partial else data, cuts)


def take(full: torch.Tensor, shard: Shard, index: int, count: int) -> torch.Tensor:
    """Part `index` of `count`. Every section's size must be a multiple of `count`."""
    sections = full.split(shard.sections or full.shape[shard.dim], dim=shard.dim)
    return torch.cat([section.chunk(count, dim=shard.dim)[index] for section in sections], dim=shard.dim)


def own_part(full: torch.Tensor, layout: Layout, groups: ParallelGroups) -> torch.Tensor:
    """What this rank holds of a full parameter."""
    for shard in layout.shards:
        group = groups.tp if shard.axis == "tp" else groups.ep
        if group is not None:
            full = take(full, shard, group.rank, group.size)
    return full


def full_shape(shape: torch.Size, layout: Layout, groups: ParallelGroups) -> torch.Size:
    """The shape of the whole parameter of which a rank's part has `shape`."""
    sizes = list(shape)
    for shard in layout.shards:
        sizes[shard.dim] *= groups.tp_size if shard.axis == "tp" else groups.ep_size
    return torch.Size(sizes)


def check_groups(config: ModelConfig, seq_len: int, groups: ParallelGroups) -> None:
    """Raise ConfigError for a model that these groups cannot share evenly."""
    tp, cp = groups.tp_size, groups.cp.size if groups.cp else 1
    cut_by_tp = {"heads": config.heads, "ffn": config.ffn}
    if config.family == "llama":
        cut_by_tp["kv_heads"] = config.kv_heads
    for key, value in cut_by_tp.items():
        if value % tp:
            raise ConfigError(f"model.{key}", value, f"must be a multiple of the {tp} ranks of tensor parallelism")
    if groups.sequence and groups.tp is None:
        raise ConfigError("sequence", True, "sequence parallelism needs a group for tensor parallelism")
    if cp > 1 and seq_len % (2 * cp):
        raise ConfigError("data.seq_len", seq_len, f"must be a multiple of {2 * cp}: two pieces for each of {cp} context ranks")
    if groups.sequence and seq_len // cp % tp:
        raise ConfigError("data.seq_len", seq_len, f"must leave a multiple of {tp} positions for sequence parallelism")
    if groups.ep and (not config.experts or config.experts % groups.ep.size):
        raise ConfigError("model.experts", config.experts, f"must be a multiple of the {groups.ep.size} ranks that share them")
