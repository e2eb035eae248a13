"""Where a session's model trains: on this rank's device, and divided over the ranks of its replica.

In: the session's settings and host, then the user's model. Out: the model as this rank trains it (`place`), and the engine of
what was registered (`engine`). `Session.parallelize` and `Session.register` document both for users.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.module import ModuleEngine
from helixrt.engines.pipeline_parts import check_shards
from helixrt.engines.pipelined import PipelinedModel
from helixrt.engines.registered import Registered
from helixrt.engines.sharded import shard_model
from helixrt.engines.stage_ranks import check_layouts
from helixrt.engines.staged import StagedModel, Stages
from helixrt.engines.tensor_gradients import TensorRanks
from helixrt.engines.tensor_plan import Place, TensorPlan, apply_plan
from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.captured import captured_model
from helixrt.job.session_host import Host, SessionSettings
from helixrt.job.step import SessionEngine

if TYPE_CHECKING:
    from helixrt.engines.example_batch import ExampleBatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Placement:
    """Of one rank. Its groups connect the ranks of the replica with their first use. Raises ConfigError for settings that no
    device or type serves."""

    def __init__(self, settings: SessionSettings, host: Host) -> None:
        self._settings, self._host = settings, host
        self.device = device_of(settings)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the device "cuda" without a number in the user's code
        if settings.dtype not in _DTYPES:
            raise ConfigError("dtype", settings.dtype, f"must be one of {', '.join(_DTYPES)}")
        self._dtype = _DTYPES[settings.dtype]
        self.connected: InnerGroup | None = None  # the dp_shard ranks of this replica, once they are connected
        self._cut: list[Place] = []  # of models that tensor-parallel plans have cut: what `TensorRanks` needs of them

    def shard_group(self) -> InnerGroup:
        """The dp_shard ranks of this replica, connected."""
        if self.connected is None:
            self.connected = self._host.connect(self.device).inner("dp_shard")
        return self.connected

    def tensor_group(self) -> InnerGroup:
        """The tp ranks of this replica with this one's dp_shard number, connected."""
        return self._host.connect(self.device).inner("tp")

    def place(
        self,
        model: nn.Module | Stages,
        tp_plan: TensorPlan | None,
        example: ExampleBatch | None,
        weights: str | Path | None,
    ) -> nn.Module:
        """See `Session.parallelize`."""
        mesh = self._settings.mesh
        if isinstance(model, Stages):
            return self._staged(model)
        if example is not None:
            return captured_model(self._settings, self._host, self.device, model, example, weights, tp_plan)
        if weights is not None:
            raise ConfigError("weights", weights, "are read for a pipeline, which needs an example=, too")
        mesh.check_module()
        if mesh.tp > 1:
            self._cut += apply_plan(model, self.tensor_group().mesh, tp_plan)
        if mesh.dp_shard > 1:
            model = shard_model(model, self.shard_group(), self._dtype)
        return model.to(self.device)

    def _staged(self, stages: Stages) -> StagedModel:
        mesh = self._settings.mesh
        mesh.check_supported()  # errors are found before the ranks connect
        check_shards(stages.scheduled(mesh.pp), stages.graphs, mesh.dp_shard)
        check_layouts(asdict(mesh), stages.layouts)
        autocast = None if self._dtype is torch.float32 else self._dtype
        model = StagedModel(stages, self._host.connect_stages(self.device), autocast)
        if mesh.dp_shard > 1:
            self.shard_group()  # an evaluation's mean is taken over it
        return model

    def engine(self, registered: Registered, model: object) -> SessionEngine:
        """What trains the registered objects; `model` as the user gave it. Raises MisuseError for what cannot be trained."""
        given = self._settings
        policy = Policy(given.lr_policy)  # type: ignore[arg-type]
        if "per_replica" in registered.buffers.values() and given.mesh.pp * given.mesh.cp * given.mesh.tp > 1:
            rule = "ranks that share a data stream would keep it under one name; take a mesh of replicas and dp_shard alone"
            raise MisuseError(f'a buffer cannot be "per_replica" with pp, cp or tp above 1: {rule}')
        if isinstance(model, PipelinedModel):
            return model.engine(
                registered,
                policy=policy,
                replica=given.replica,
                replicas=given.replicas,
                seed=given.drawn_seed,
                buffers=given.buffers,  # type: ignore[arg-type]
            )
        if given.mesh.pp > 1:
            raise MisuseError("with Mesh(pp=...) register the model that session.parallelize gave")
        given.mesh.check_module()
        return ModuleEngine(
            registered,
            replica=given.replica,
            replicas=given.replicas,
            seed=given.drawn_seed,
            policy=policy,
            buffers=given.buffers,  # type: ignore[arg-type]
            compute_dtype=self._dtype,
            group=self.shard_group() if given.mesh.dp_shard > 1 else None,
            tensor=TensorRanks(self.tensor_group(), self._cut) if given.mesh.tp > 1 else None,
        )


def device_of(settings: SessionSettings) -> torch.device:
    """Each rank has a CUDA device: that of its number on this machine, or those of the host in turn. Ranks of one stage need
    one each, since they exchange by NCCL; stages and replicas may share."""
    name, mesh = settings.device, settings.mesh
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("device", name, "must be auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "no CUDA device is available")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if 0 <= settings.local_rank < devices:
        return torch.device("cuda", settings.local_rank)
    of_stage = mesh.ranks // mesh.pp
    if devices < of_stage:
        rule = f"a stage of {of_stage} ranks needs a CUDA device for each, and this host has {devices}; device='cpu' needs none"
        raise ConfigError("device", name, rule)
    within = (settings.shard * mesh.cp + settings.cp_rank) * mesh.tp + settings.tp_rank
    return torch.device("cuda", (settings.replica * mesh.ranks + settings.stage * of_stage + within) % devices)
