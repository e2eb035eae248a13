"""The pipeline engine: one stage's chunks of a replica's model, run by a schedule, updated by AdamW.

In: configuration, the stage's place, the replica's process group, a source of batches by position.
Out: the `Engine` contract of `helixrt.replica.contracts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helixrt.errors import ConfigError, Fatal
from helixrt.passes.errors import CaptureError
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import Channel, GroupChannel
from helixrt.pipeline.epilogue import gather, share_loss, sum_tied
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.program import Program, compile_program, whole_backwards
from helixrt.pipeline.stage import AutogradStage, StageChunk
from helixrt.record import FlightRecord
from helixrt.replica.contracts import Engine, Update, WorkResult
from helixrt.schedule.generators.evaluation import forward_only
from helixrt.schedule.ir import Schedule
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.lr import learning_rate
from helixrt.train.models.build import TIED_PARAMETER, build_chunks
from helixrt.train.optimizer import BucketAdamW
from helixrt.train.schedules import job_schedule, runs_by_graphs

if TYPE_CHECKING:
    from helixrt.pipeline.graph_stage import GraphStage

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token; logits [batch, seq, vocab], targets [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PipelineEngine(Engine):
    """One pipeline stage of one replica.

    All ranks of a replica build it together and call it in the same order. `group` holds the
    replica's pipeline ranks, ordered by stage (Gloo); None when `stages` is 1. `batch_at(position)`
    and `validation(i)` give int64 tokens [batch, seq_len + 1] and are called only where the first and the last
    chunk of the model are; they must be pure functions of their argument. `steps` is the run's number of
    updates (the learning rate decays towards it). `seed` decides the initial weights, whatever the cut.
    `modules` are this stage's chunks of the model, by number, as the schedule places them; `generation` is
    what messages between stages are tagged with.

    A schedule that moves W or has pairs runs by graphs of the chunks, others by autograd (`schedule.graphs` may say
    otherwise).

    Raises ConfigError for a model or a schedule that cannot be built (see `job_schedule`) or captured; `run`, `apply` and
    `evaluate` raise Retryable when a stage of this replica is lost.
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
        assert (group is None) == (stages == 1), "a group is needed exactly when there is more than one stage"
        initial = job_schedule(schedule, stages=stages, layers=model.layers, batch=batch)
        microbatches, self.placement = initial.microbatches, initial.placement
        self.modules: Mapping[int, nn.Module] = build_chunks(
            model, seq_len, self.placement, stage, seed=seed, dtype=dtype, auxiliary_scale=1 / microbatches
        )
        self.optim, self.batch, self.seq_len, self.steps = optim, batch, seq_len, steps
        self.stage, self.stages, self.record = stage, stages, record
        self.batch_at, self.validation = batch_at, validation
        self.generation = 0
        self._passes = 0
        self._channels: dict[int, Channel] = {}
        if group is not None:
            self._channels = {peer: GroupChannel(group, peer, record) for peer in range(stages) if peer != stage}
        self._embeds, self._predicts = 0 in self.modules, len(self.placement) - 1 in self.modules
        ends = self.placement[0], self.placement[-1]
        split_tie = model.tied and ends[0] != ends[1] and stage in ends
        self._tied_peer = (ends[1] if stage == ends[0] else ends[0]) if split_tie else None
        self._buckets = GradientBuckets(dict(self.modules), optim.bucket_bytes, (TIED_PARAMETER,) if split_tie else ())
        self._optimizer = BucketAdamW(self._buckets.named, self._buckets.slots, optim)
        self._state = self._optimizer.state()
        boundary = torch.empty(batch // microbatches, seq_len, model.dim, dtype=dtype)
        self._chunks = {
            chunk: StageChunk(module, token_loss if chunk + 1 == initial.chunks else None)
            for chunk, module in self.modules.items()
        }
        self._autograd, self._graphs_when = AutogradStage(self._chunks), schedule.graphs
        self._graphs: GraphStage | None = None
        self._executor = Executor(self._autograd, self._channels, boundary, record)
        self._evaluation = compile_program(forward_only(self.placement, microbatches), stage)
        self._program: Program
        self.use_schedule(initial)

    def use_schedule(self, schedule: Schedule) -> None:
        """From the next `run` on, work by another schedule of the same placement and as many micro-batches.

        All ranks of the replica do so before the same step. Graphs that it needs are made now, once. Raises ScheduleError
        if it cannot be run, ValueError for one that is for other chunks or micro-batches, ConfigError for chunks that
        cannot be captured.
        """
        if (schedule.stages, schedule.microbatches) != (self.stages, self._evaluation.schedule.microbatches):
            raise ValueError(f"schedule {schedule.name} is for {schedule.stages} stages, {schedule.microbatches} micro-batches")
        if schedule.placement != self.placement:
            raise ValueError(
                f"schedule {schedule.name} has chunks on stages {list(schedule.placement)}, they are on {list(self.placement)}"
            )
        if not runs_by_graphs(schedule, self._graphs_when):
            self._executor.stage, self._program = self._autograd, compile_program(whole_backwards(schedule), self.stage)
            return
        program = compile_program(schedule, self.stage)
        self._graphs = self._graphs or self._captured()
        self._graphs.prepare(program)
        self._executor.stage, self._program = self._graphs, program

    def _captured(self) -> GraphStage:
        from helixrt.pipeline.graph_stage import Example, GraphStage  # brings torch's compiler, which takes seconds

        boundary = self._executor.boundary
        tokens = torch.zeros(boundary.shape[:2], dtype=torch.int64)
        examples = {
            number: Example(boundary if number else tokens, tokens if chunk.loss is not None else None)
            for number, chunk in self._chunks.items()
        }
        try:
            return GraphStage(self._chunks, examples)
        except CaptureError as error:
            rule = f"{' '.join(str(error).split())}; schedule.graphs=never runs whole backwards by autograd"
            raise ConfigError("schedule.graphs", self._graphs_when, rule) from error

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
        shared = share_loss(self._channels, self.stage, self.placement[-1], self.generation, self._passes)
        inputs: Sequence[torch.Tensor] = ()
        targets: Sequence[torch.Tensor] = ()
        if self._embeds or self._predicts:
            tokens = source(position)
            if tokens.shape != (self.batch, self.seq_len + 1):
                raise ValueError(f"batch {position} is {tuple(tokens.shape)}, not {(self.batch, self.seq_len + 1)}")
            inputs = tokens[:, :-1].chunk(program.schedule.microbatches)
            targets = tokens[:, 1:].chunk(program.schedule.microbatches)
        losses = self._executor.run(program, inputs, targets, buckets, generation=self.generation, step=self._passes)
        if buckets is not None and finish_tied is not None:
            finish_tied()
            buckets.complete(TIED_PARAMETER)
        return shared(math.fsum(loss.item() for loss in losses) / len(losses) if self._predicts else None)

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
        skipped = {slot.bucket for slot in self._buckets.slots if slot.name in self._buckets.withheld and self._predicts}
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
