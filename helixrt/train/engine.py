"""The model of the built-in job: a decoder-only language model cut into pipeline stages.

In: configuration. Out: the `Stages` that a session trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from helixrt import Stages
from helixrt.parallel.attention import context_part
from helixrt.parallel.group import Group
from helixrt.train.config import ModelConfig, ScheduleConfig
from helixrt.train.models.build import TIED_PARAMETER, build_chunks
from helixrt.train.models.parallel import ALONE, ParallelGroups, parameter_layouts
from helixrt.train.schedules import check_graphs, job_schedule


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; logits [batch, seq, vocab], targets [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def name_in_model(part: int, name: str) -> str:
    """Parts have the names of the whole model."""
    return name


def inputs_and_targets(tokens: torch.Tensor, cp: Group | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a batch of int64 tokens [batch, seq_len + 1] asks for: each token from those before it. A context-parallel rank gets
    its part of both."""
    return context_part(tokens[:, :-1], 1, cp), context_part(tokens[:, 1:], 1, cp)


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
    groups: ParallelGroups = ALONE,
) -> Stages:
    """The model over `stages` pipeline stages, each shared by the ranks of `groups`. `seed` decides the initial weights,
    whatever the cut. `seq_len` is that of whole sequences.

    Raises ConfigError for a model or a schedule that cannot be built (see `job_schedule`), or not by graphs.
    """
    check_graphs(model, schedule)
    initial = job_schedule(schedule, stages=stages, layers=model.layers, batch=batch)
    microbatches = initial.microbatches
    held = seq_len // (groups.cp.size if groups.cp else 1)  # positions that a rank works on
    sent = held // groups.tp_size if groups.sequence else held
    tokens = torch.zeros(batch // microbatches, held, dtype=torch.int64)

    def parts(numbers: Sequence[int]) -> Mapping[int, nn.Module]:
        stage = initial.placement[numbers[0]]
        scale = 1 / microbatches
        return build_chunks(
            model, seq_len, initial.placement, stage, seed=seed, dtype=dtype, groups=groups, auxiliary_scale=scale
        )

    return Stages(
        parts,
        token_loss,
        example=(tokens, tokens),
        boundary=torch.empty(batch // microbatches, sent, model.dim, dtype=dtype),
        microbatches=microbatches,
        schedule=initial,
        tied=TIED_PARAMETER if model.tied else "",
        graphs=schedule.graphs,
        profile=schedule.profile,
        adapt=schedule.adaptation if schedule.adapt == "on" else None,
        bucket_bytes=bucket_bytes,
        layouts=partial(parameter_layouts, groups=groups),
        names=name_in_model,
    )
