"""The built-in job's model in its engine without a session, for benchmarks and tests: it finds its batches by position.

In: the settings of model, optimizer and schedule, one stage of a pipeline. Out: the engine of that stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipeline_parts import Batches
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.staged import StagedModel, StagePlace
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.engine import inputs_and_targets, model_stages
from helixrt.train.models.parallel import ALONE, ParallelGroups
from helixrt.train.optimizer import adamw, cosine_with_warmup


def pipeline_engine(
    model: ModelConfig,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    *,
    batch: int,
    seq_len: int,
    steps: int,
    seed: int,
    stage: int,
    stages: int,
    group: dist.ProcessGroup | None,
    batch_at: Callable[[int], torch.Tensor],
    validation: Callable[[int], torch.Tensor],
    record: FlightRecord,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    mesh: ReplicaMesh | None = None,
    groups: ParallelGroups = ALONE,
) -> PipelineEngine:
    """The engine of one pipeline stage, without a session; all ranks of a replica build it together. Ranks of `groups`, out of
    `mesh`, share the stage.

    `batch_at(position)` and `validation(i)` give int64 tokens [batch, seq_len + 1]; see `Batches`. `steps` is the run's
    number of updates (the learning rate decays towards it). `dtype` is that of parameters, `autocast` that of forward and
    loss where it is another one.

    Raises ConfigError for a model or a schedule that cannot be built (see `job_schedule`) or captured.
    """

    def split(source: Callable[[int], torch.Tensor]) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        def parts(position: int) -> tuple[torch.Tensor, torch.Tensor]:
            found = source(position)
            if found.shape != (batch, seq_len + 1):
                raise ValueError(f"batch {position} is {tuple(found.shape)}, not {(batch, seq_len + 1)}")
            return inputs_and_targets(found, groups.cp)

        return parts

    whole = model_stages(
        model,
        schedule,
        batch=batch,
        seq_len=seq_len,
        stages=stages,
        seed=seed,
        bucket_bytes=optim.bucket_bytes,
        dtype=dtype,
        groups=groups,
    )
    staged = StagedModel(whole, StagePlace(stage, stages, group, record, mesh or ReplicaMesh({})), autocast)
    optimizer = adamw(staged.parameters(), optim)
    scheduler = cosine_with_warmup(optimizer, steps, optim)
    registered = Registered.of(staged, [optimizer], [scheduler], clip_norm=optim.clip or None)
    return staged.engine(registered, batches=Batches(split(batch_at), split(validation), batch * seq_len))
