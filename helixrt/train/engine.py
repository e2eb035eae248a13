"""The pipeline engine: one stage of a replica's model, run by a schedule, updated by AdamW.

In: configuration, the stage's place, the replica's process group, a source of batches by position.
Out: the `Engine` contract of `helixrt.replica.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from helixrt.record import FlightRecord
from helixrt.replica.contracts import Engine, Update, WorkResult
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig


class PipelineEngine(Engine):
    """One pipeline stage of one replica.

    All ranks of a replica build it together and call it in the same order. `group` holds the
    replica's pipeline ranks, ordered by stage (Gloo); None when `stages` is 1. `batch_at(position)`
    and `validation(i)` give int64 tokens [batch, seq_len + 1] and are called on the first and the last
    stage only; they must be pure functions of their argument. `steps` is the run's number of updates
    (the learning rate decays towards it). `seed` decides the initial weights, whatever the cut.

    Raises ConfigError for micro-batches that do not divide the batch, a schedule that cannot be
    built, or more stages than layers.
    """

    def __init__(
        self,
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
    ) -> None:
        raise NotImplementedError("being written")

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        raise NotImplementedError

    def run(self, position: int, on_bucket: Callable[[int], None]) -> WorkResult:
        raise NotImplementedError

    def apply(self, step: int, reduced: Sequence[torch.Tensor]) -> Update:
        raise NotImplementedError

    def state(self) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def evaluate(self, batches: int) -> tuple[float, int]:
        raise NotImplementedError
