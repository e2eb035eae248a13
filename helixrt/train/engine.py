"""The model of the built-in job: a decoder-only language model cut into pipeline stages.

In: configuration. Out: the `Stages` that a session trains, and the optimizer and scheduler of their parameters; for benchmarks
and tests also the engine itself, which then finds its batches by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helixrt.engines.pipeline import Batches, PipelineEngine
from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagedModel, StagePlace, Stages
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.models.build import TIED_PARAMETER, build_chunks
from helixrt.train.optimizer import adamw, cosine_with_warmup
from helixrt.train.schedules import job_schedule


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; logits [batch, seq, vocab], targets [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a batch of int64 tokens [batch, seq_len + 1] asks for: each token from those before it."""
    return tokens[:, :-1], tokens[:, 1:]


def model_stages(
    model: ModelConfig,
    schedule: ScheduleConfig,
    *,
    batch: int,
    seq_len: int,
    stages: int,
    seed: int,
    bucket_bytes: int,
    dtype: torch.dtype = torch.float32,
) -> Stages:
    """The model over `stages` pipeline stages. `seed` decides the initial weights, whatever the cut.

    Raises ConfigError for a model or a schedule that cannot be built (see `job_schedule`).
    """
    initial = job_schedule(schedule, stages=stages, layers=model.layers, batch=batch)
    microbatches = initial.microbatches
    tokens = torch.zeros(batch // microbatches, seq_len, dtype=torch.int64)

    def parts(numbers: Sequence[int]) -> Mapping[int, nn.Module]:
        stage = initial.placement[numbers[0]]
        scale = 1 / microbatches
        return build_chunks(model, seq_len, initial.placement, stage, seed=seed, dtype=dtype, auxiliary_scale=scale)

    return Stages(
        parts,
        token_loss,
        example=(tokens, tokens),
        boundary=torch.empty(batch // microbatches, seq_len, model.dim, dtype=dtype),
        microbatches=microbatches,
        schedule=initial,
        tied=TIED_PARAMETER if model.tied else "",
        graphs=schedule.graphs,
        bucket_bytes=bucket_bytes,
    )


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
) -> PipelineEngine:
    """The engine of one pipeline stage, without a session; all ranks of a replica build it together.

    `batch_at(position)` and `validation(i)` give int64 tokens [batch, seq_len + 1]; see `Batches`. `steps` is the run's
    number of updates (the learning rate decays towards it).

    Raises ConfigError for a model or a schedule that cannot be built (see `job_schedule`) or captured.
    """

    def split(source: Callable[[int], torch.Tensor]) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        def parts(position: int) -> tuple[torch.Tensor, torch.Tensor]:
            found = source(position)
            if found.shape != (batch, seq_len + 1):
                raise ValueError(f"batch {position} is {tuple(found.shape)}, not {(batch, seq_len + 1)}")
            return inputs_and_targets(found)

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
    )
    staged = StagedModel(whole, StagePlace(stage, stages, group, record))
    optimizer = adamw(staged.parameters(), optim)
    scheduler = cosine_with_warmup(optimizer, steps, optim)
    registered = Registered.of(staged, [optimizer], [scheduler], clip_norm=optim.clip or None)
    return staged.engine(registered, batches=Batches(split(batch_at), split(validation), batch * seq_len))
