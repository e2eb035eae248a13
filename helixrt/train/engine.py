"""The pipeline engine: one stage of a replica's model, run by a schedule, updated by AdamW.

In: configuration, the stage's place, the replica's process group, a source of batches by position.
Out: the `Engine` contract of `helixrt.replica.contracts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helixrt.errors import ConfigError, Fatal
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import MAX_CHUNKS, MAX_MICROBATCHES, Channel, GroupChannel
from helixrt.pipeline.epilogue import gather, share_loss, sum_tied
from helixrt.pipeline.executor import Executor, Program, compile_program
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord
from helixrt.replica.contracts import Engine, Update, WorkResult
from helixrt.schedule.generators import build, forward_only
from helixrt.schedule.ir import Schedule
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.lr import learning_rate
from helixrt.train.models.build import TIED_PARAMETER, build_stage
from helixrt.train.optimizer import BucketAdamW

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; logits [batch, seq, vocab], targets [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PipelineEngine(Engine):
    """One pipeline stage of one replica.

    All ranks of a replica build it together and call it in the same order. `group` holds the
    replica's pipeline ranks, ordered by stage (Gloo); None when `stages` is 1. `batch_at(position)`
    and `validation(i)` give int64 tokens [batch, seq_len + 1] and are called on the first and the last
    stage only; they must be pure functions of their argument. `steps` is the run's number of updates
    (the learning rate decays towards it). `seed` decides the initial weights, whatever the cut.
    `module` is this stage's part of the model, `generation` what messages between stages are tagged with.

    Raises ConfigError for micro-batches that do not divide the batch, a schedule that cannot be
    built, or more stages than layers; `run`, `apply` and `evaluate` raise Retryable when a stage of this
    replica is lost.
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
        microbatches = schedule.microbatches
        if not 1 <= microbatches <= MAX_MICROBATCHES:
            raise ConfigError("schedule.microbatches", microbatches, f"must be between 1 and {MAX_MICROBATCHES}")
        if batch % microbatches:
            raise ConfigError("schedule.microbatches", microbatches, f"must divide data.batch={batch}")
        if stages > MAX_CHUNKS:
            raise ConfigError("mesh.pp", stages, f"must be at most {MAX_CHUNKS}")
        assert (group is None) == (stages == 1), "a group is needed exactly when there is more than one stage"
        self.module = build_stage(model, seq_len, stage, stages, seed=seed, dtype=dtype)
        self.optim, self.batch, self.seq_len, self.steps = optim, batch, seq_len, steps
        self.stage, self.stages, self.record = stage, stages, record
        self.batch_at, self.validation = batch_at, validation
        self.generation = 0
        self._passes = 0
        self._channels: dict[int, Channel] = {}
        if group is not None:
            self._channels = {peer: GroupChannel(group, peer, record) for peer in range(stages) if peer != stage}
        last = stage == stages - 1
        split_tie = model.tied and stages > 1 and (stage == 0 or last)
        self._tied_peer = (stages - 1 if stage == 0 else 0) if split_tie else None
        self._buckets = GradientBuckets({stage: self.module}, optim.bucket_bytes, (TIED_PARAMETER,) if split_tie else ())
        self._optimizer = BucketAdamW(list(self.module.named_parameters()), self._buckets.slots, optim)
        self._state = self._optimizer.state()
        boundary = torch.empty(batch // microbatches, seq_len, model.dim, dtype=dtype)
        chunk = StageChunk(self.module, token_loss if last else None)
        self._executor = Executor({stage: chunk}, self._channels, boundary, record)
        self._evaluation = compile_program(forward_only(stages, microbatches), stage)
        self._program: Program
        self.use_schedule(build(schedule.name, stages, microbatches))

    def use_schedule(self, schedule: Schedule) -> None:
        """From the next `run` on, work by another schedule of as many stages and micro-batches.

        All ranks of the replica do so before the same step. Raises ScheduleError if it cannot be run.
        """
        if (schedule.stages, schedule.microbatches) != (self.stages, self._evaluation.schedule.microbatches):
            raise ValueError(f"schedule {schedule.name} is for {schedule.stages} stages, {schedule.microbatches} micro-batches")
        self._program = compile_program(schedule, self.stage)

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        return self._buckets.flat

    def run(self, position: int, on_bucket: Callable[[int], None]) -> WorkResult:
        self._passes += 1
        finish_tied = None
        if self._tied_peer is not None:
            tied = next(g for s, g in zip(self._buckets.slots, self._buckets.grads, strict=True) if s.name == TIED_PARAMETER)
            finish_tied = sum_tied(self._channels[self._tied_peer], tied, self.generation, self._passes)
        self._buckets.begin(on_bucket)
        loss = self._forward_pass(self._program, self.batch_at, position, self._buckets, finish_tied)
        return WorkResult(loss, self.batch * self.seq_len)

    def _forward_pass(
        self,
        program: Program,
        source: Callable[[int], torch.Tensor],
        position: int,
        buckets: GradientBuckets | None,
        finish_tied: Callable[[], None] | None = None,
    ) -> float:
        """One pass (with its backward, if there are buckets) over one batch; the mean loss, on every stage."""
        shared = share_loss(self._channels, self.stage, self.stages, self.generation, self._passes)
        inputs: Sequence[torch.Tensor] = ()
        targets: Sequence[torch.Tensor] = ()
        first, last = self.stage == 0, self.stage == self.stages - 1
        if first or last:
            tokens = source(position)
            if tokens.shape != (self.batch, self.seq_len + 1):
                raise ValueError(f"batch {position} is {tuple(tokens.shape)}, not {(self.batch, self.seq_len + 1)}")
            inputs = tokens[:, :-1].chunk(program.schedule.microbatches)
            targets = tokens[:, 1:].chunk(program.schedule.microbatches)
        losses = self._executor.run(program, inputs, targets, buckets, generation=self.generation, step=self._passes)
        if buckets is not None and finish_tied is not None:
            finish_tied()
            buckets.complete(TIED_PARAMETER)
        return shared(math.fsum(loss.item() for loss in losses) / len(losses) if last else None)

    def apply(self, step: int, reduced: Sequence[torch.Tensor]) -> Update:
        self._passes += 1
        norm = math.sqrt(math.fsum(self._squared_norms(reduced)))
        if not math.isfinite(norm):
            raise Fatal(f"the gradient of step {step} is not finite (norm {norm}); lower optim.lr or check the data")
        clip = self.optim.clip
        scale = min(1.0, clip / (norm + CLIP_EPS)) if clip else 1.0
        rate = learning_rate(step, self.steps, self.optim)
        self._optimizer.update(step, reduced, scale, rate)
        return Update(norm, rate)

    def _squared_norms(self, reduced: Sequence[torch.Tensor]) -> list[float]:
        """Each stage's squared norm, in the order of stages; of a tied parameter's copies the first counts."""
        skipped = {
            slot.bucket for slot in self._buckets.slots if slot.name in self._buckets.withheld and self.stage == self.stages - 1
        }
        mine = math.fsum(
            torch.linalg.vector_norm(bucket, dtype=torch.float64).item() ** 2
            for index, bucket in enumerate(reduced)
            if index not in skipped
        )
        return gather(self._channels, self.stage, self.stages, self.generation, self._passes, mine)

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._state

    @torch.no_grad()
    def load(self, shards: Mapping[str, torch.Tensor]) -> None:
        if missing := [name for name in self._state if name not in shards]:
            raise Fatal(f"the state to load lacks {missing[0]} ({len(missing)} missing in all)")
        for name, live in self._state.items():
            if shards[name].shape != live.shape:
                raise Fatal(f"the state to load has {name} as {tuple(shards[name].shape)}, not {tuple(live.shape)}")
        for name, live in self._state.items():
            live.copy_(shards[name])

    def evaluate(self, batches: int) -> tuple[float, int]:
        losses = []
        for index in range(batches):
            self._passes += 1
            losses.append(self._forward_pass(self._evaluation, self.validation, index, None))
        return math.fsum(losses) / batches, batches * self.batch * self.seq_len

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
