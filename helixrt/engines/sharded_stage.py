"""A stage of a pipeline whose chunks FSDP2 has sharded over the dp_shard ranks that share the stage.

In: chunks as every dp_shard rank builds them, whole except for cuts of `ParameterLayout`; the replica's mesh. Out: the chunks
with `fully_shard` applied, block by block; gradient buckets of this rank's shards; what the engine calls around a pass.

Parameters are gathered by the first forward of a pass and stay gathered over all its micro-batches: one all-gather a pass,
where gathering again for each forward and backward takes two for each micro-batch. A rank holds the whole stage's parameters
meanwhile (torchtitan's default in pipelines), and shards of gradients and optimizer states alone. Each backward reduces its
gradients: they are summed over the ranks in every micro-batch, and add up in the shard. Modules to which the user has applied
`fully_shard` gather and free parameters as the user has set it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded import ShardedModels, check_updates, is_sharded, local, over, shard_model
from helixrt.engines.stage_ranks import WHOLE, LayoutsOf, ParameterLayout
from helixrt.errors import ConfigError
from helixrt.pipeline.buckets import GradientBuckets


def shard_chunks(chunks: Mapping[int, nn.Module], mesh: ReplicaMesh, declared: LayoutsOf | None) -> None:
    """Apply `fully_shard` to the chunks of a stage, in place; nothing where `mesh` has one dp_shard rank. A parameter that is
    cut over dp_shard already stays as it is. One that two chunks share is sharded with the first of them, whose forward gathers
    it for both, and whose backward comes last and reduces the gradients of both.

    Raises ConfigError (stages.layouts) for a parameter whose gradient is neither summed over dp_shard nor that of a part;
    MisuseError for a parameter on the meta device.
    """
    if mesh.size("dp_shard") == 1:
        return
    group = mesh.inner("dp_shard")
    for number in sorted(chunks):
        chunk = chunks[number]
        layouts = {} if declared is None else declared(chunk)
        others = [p for name, p in chunk.named_parameters() if not _is_to_be_sharded(name, p, layouts.get(name, WHOLE))]
        shard_model(chunk, group, torch.float32, ignored=others, gathered=True)


def _is_to_be_sharded(name: str, parameter: nn.Parameter, layout: ParameterLayout) -> bool:
    if is_sharded(parameter) or "dp_shard" in layout.sharded:
        return False
    if "dp_shard" not in layout.summed:
        rule = "must name dp_shard in `summed` or in `sharded`: its ranks have other tokens, so no rank has the whole gradient"
        raise ConfigError("stages.layouts", name, rule)
    return True


class ShardedBuckets(GradientBuckets):
    """Of chunks whose parameters may be DTensors: of these, this rank's shards.

    Ranks have as many buckets, each with the same parameters, also where their shards differ in size.
    """

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor)

    def counted(self, parameter: Any) -> int:
        return -(-parameter.numel() // parameter.device_mesh.size()) if is_sharded(parameter) else parameter.numel()

    def gradient(self, parameter: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
        return over(part, parameter) if is_sharded(parameter) else part


class ShardedStage:
    """What FSDP2 did to the registered chunks of one rank. Raises MisuseError for what it cannot train."""

    def __init__(self, registered: Registered, group: InnerGroup, layouts: Mapping[nn.Parameter, ParameterLayout]) -> None:
        check_updates(registered)
        self._models = ShardedModels(registered, group, elsewhere=_parts(layouts))

    def begin(self) -> None:
        """A step begins. Raises MisuseError if its gradients would not be reduced."""
        self._models.begin()

    def whole(self) -> list[torch.Tensor] | None:
        """See `ShardedModels.whole`."""
        return self._models.whole()

    def end_pass(self) -> None:
        """Free the parameters that the pass has gathered."""
        self._models.reshard()

    def close(self) -> None:
        self._models.close()


def _parts(layouts: Mapping[nn.Parameter, ParameterLayout]) -> Collection[nn.Parameter]:
    """The parameters that the model itself has cut over dp_shard, as it cuts experts."""
    return [p for p, layout in layouts.items() if "dp_shard" in layout.sharded and not is_sharded(p)]
