"""The pipeline engine: one stage's chunks of a replica's model, run by a schedule, updated by `torch.optim` optimizers.

In: `PipelineParts`: the chunks, the schedule, the replica's process group, what is registered, a source of batches by position.
Out: the `BatchEngine` contract of `helixrt.replica.contracts`.

At commit the mean of the sums is copied over the local gradient set, of which `p.grad` is a view, and the update runs on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from helixrt.engines.autocast import outside_autocast
from helixrt.engines.buffers import Buffers
from helixrt.engines.evaluating import evaluating, evaluation_mode
from helixrt.engines.first_step import growth_of
from helixrt.engines.graph_leaves import LeafCheck
from helixrt.engines.hyperparameters import Hyperparameters
from helixrt.engines.pipeline_parts import (
    BUFFERS_RULE,
    Batch,
    PipelineParts,
    SameModules,
    captured_chunks,
    check_like_example,
    check_registered,
    check_same_chunks,
    check_shards,
    cut,
    runs_by_graphs,
)
from helixrt.engines.portions import portions_of
from helixrt.engines.random_state import chunks_apart, set_random_state
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded_stage import ShardedBuckets, ShardedStage
from helixrt.engines.stage_places import stage_places
from helixrt.engines.stage_ranks import StageRanks
from helixrt.engines.stream_marks import marks_for
from helixrt.engines.ties import StageTies, check_equal, ties_of
from helixrt.engines.unchanged import Unchanged
from helixrt.engines.update import StepGuard, UpdateFunction, first_rate
from helixrt.errors import Fatal, MisuseError
from helixrt.passes.autocast import autocast_pass
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import Channel, GroupChannel
from helixrt.pipeline.epilogue import gather, share_loss, sum_tied
from helixrt.pipeline.executor import Executor, Slowdown
from helixrt.pipeline.program import Program, compile_program, whole_backwards
from helixrt.pipeline.reductions import BucketSums
from helixrt.pipeline.stage import AutogradStage, StageChunk
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import BatchEngine, State, Update, WorkResult
from helixrt.replica.portions import Portion
from helixrt.schedule.check import check_microbatch_order
from helixrt.schedule.generators.evaluation import forward_only
from helixrt.schedule.ir import Schedule

if TYPE_CHECKING:
    from helixrt.pipeline.graph_stage import JointStage

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_PROGRAMS = 8  # of schedules, that are kept


class PipelineEngine(BatchEngine):
    """One pipeline stage of one replica.

    All ranks of a replica build it together and call it in the same order. `generation` is what messages between stages
    are tagged with. Raises ConfigError for chunks that cannot be captured and MisuseError for what cannot be trained; `run`,
    `apply` and `evaluate` raise Retryable when a stage of this replica is lost.
    """

    def __init__(self, parts: PipelineParts) -> None:
        schedule, self.stage, self.stages = parts.schedule, parts.stage, parts.schedule.stages
        assert (parts.group is None) == (self.stages == 1), "a group is needed exactly when there is more than one stage"
        self.modules, self.placement, self.batches = parts.modules, schedule.placement, parts.batches
        self.registered, self._policy, self._replicas = parts.registered, parts.policy, parts.replicas
        self._policy.check(self.registered.optimizers)
        self._seed, self._replica, self._example = parts.seed, parts.replica, parts.example
        self.device, self._parts, self._marks = parts.device, parts, marks_for({parts.device})
        self.record, self.generation, self._passes = parts.record, 0, 0
        self._mean_factor: float | None = None  # of the sum of losses that are means; None: one over their number
        self._loss = math.nan  # of the batch that was worked on last
        self._channels: dict[int, Channel] = {} if parts.channels is None else dict(parts.channels.channels)
        if parts.channels is None and parts.group is not None:
            peers = (peer for peer in range(self.stages) if peer != self.stage)
            self._channels = {peer: GroupChannel(parts.group, peer, parts.record) for peer in peers}
        self._embeds, self._predicts = 0 in self.modules, len(self.placement) - 1 in self.modules
        self._ties = StageTies(ties_of(parts.tied, schedule.placement), self.modules)
        self._ranks = StageRanks(parts.mesh, self.modules, parts.layouts)
        self._mesh = parts.mesh
        layouts = self._ranks.layouts
        self._shards, self._shard = parts.mesh.size("dp_shard"), parts.mesh.rank("dp_shard")
        buckets = GradientBuckets if self._shards == 1 else ShardedBuckets
        self._buckets = buckets(dict(self.modules), parts.bucket_bytes, [p for _, p in self._ties.trained], kinds=layouts)
        self.adding = False  # a pass has begun that sends messages or adds gradients; set to False by who wants to know
        first = {slot.bucket: layouts[p] for slot, (_, p) in zip(self._buckets.slots, self._buckets.named, strict=True)}
        self._layouts = [first[bucket] for bucket in range(len(self._buckets.flat))]  # one for all parameters of a bucket
        check_registered(self.registered, [parameter for _, parameter in self._buckets.named])
        mode = parts.buffers or "mean"
        self._constants = Buffers(self.registered, mode, parts.replica, parts.replicas, changing=parts.changing)
        self.per_replica = self._constants.per_replica
        if parts.buffers is None and self._constants.float_room + self._constants.integer_room:
            raise MisuseError(BUFFERS_RULE)
        groups = self._ranks.sum_groups(self._layouts)
        self._sums = BucketSums(self._buckets.flat, groups, self._computed, self._marks.wait)
        self._state = ReplicatedState(self.registered, self._constants)
        copies = self._ties.copies(self.stage)
        self._places = stage_places(self.registered, self.modules, parts.names, parts.layouts, parts.mesh, copies)
        self._copies_checked = False  # since the state was changed in any way
        self._loaded = True  # the state was built or loaded, and no pass has checked it yet
        self._sharded: ShardedStage | None = None
        if self._shards > 1:
            self._sharded = ShardedStage(self.registered, parts.mesh.inner("dp_shard"), layouts)
        self._unchanged = Unchanged(self.registered, self._constants.constant, alone=parts.replicas == 1)
        self._hyperparameters = Hyperparameters(self.registered)
        known = [parameter for _, parameter in self.registered.parameters()]
        self._guard = StepGuard(self.registered.optimizers, known)
        whole = None if self._sharded is None else self._sharded.whole
        self._chunks = {
            number: StageChunk(
                module,
                parts.loss if number == schedule.chunks - 1 else None,
                first=number == 0,
                around=LeafCheck(known, self._unchanged.check, whole).backward,
            )
            for number, module in self.modules.items()
        }
        self.schedule, self.adaptation = schedule, parts.adaptation  # the one in use; how readily the job changes it
        self._autograd = AutogradStage(self._chunks)
        self._graphs_when = "always" if parts.adaptation is not None and parts.graphs == "auto" else parts.graphs
        self._graphs: JointStage | None = None
        self._same = SameModules({})  # as graphs were captured of
        self._executor = Executor(self._autograd, self._channels, parts.boundary, parts.record, device=parts.device)
        self._evaluation = compile_program(forward_only(self.placement, schedule.microbatches), self.stage)
        self._programs: dict[Schedule, Program] = {}
        self._program: Program
        self.use_schedule(schedule)

    @property
    def fixed_shape(self) -> bool:
        """Whether all batches must have the shape of the example: for it graphs were captured, or the boundary was given."""
        return self.stages > 1 or self._executor.stage is not self._autograd

    def _drawing(self) -> AbstractContextManager[Callable[[int, int], None] | None]:
        """Around a pass: what the executor calls before a forward that may draw random numbers."""
        return chunks_apart()

    def use_schedule(self, schedule: Schedule) -> None:
        """From the next `run` on, work by another schedule of the same placement and as many micro-batches.

        All ranks of the replica do so before the same step. What it needs is made now, unless `prepare_schedule` has made it.
        Raises ScheduleError if it cannot be run or, where orders change during the job, gives other bits than other orders,
        ValueError for one that is for other chunks or micro-batches, ConfigError for
        chunks that cannot be captured.
        """
        self._program = self.prepare_schedule(schedule)
        self._executor.stage = self._autograd
        if runs_by_graphs(schedule, self._graphs_when):
            assert self._graphs is not None, "the program was prepared"
            self._executor.stage = self._graphs
        self.schedule = schedule

    def prepare_schedule(self, schedule: Schedule, again: bool = False) -> Program:
        """Make what `use_schedule` would, so that it takes no time then; the schedule in use stays. Programs of the newest few
        schedules are kept, and made again with `again`. All ranks of the replica call it at the same point, between two steps.
        Raises as `use_schedule`."""
        check_same_chunks(schedule, self._evaluation.schedule)
        if self.adaptation is not None:
            check_microbatch_order(schedule)
        check_shards(schedule, self._graphs_when, self._shards)
        by_graphs = runs_by_graphs(schedule, self._graphs_when)
        program = None if again else self._programs.get(schedule)
        if program is None:
            program = compile_program(schedule if by_graphs else whole_backwards(schedule), self.stage)
        if by_graphs:
            self._graphs = self._graphs or self._captured()
            self._prepare_graphs(self._graphs, program)
        self._programs.pop(schedule, None)
        self._programs[schedule] = program  # the newest
        while len(self._programs) > _PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program

    def _prepare_graphs(self, graphs: JointStage, program: Program) -> None:
        """Those of the program; if the schedule may change, those of other schedules too, so that a change does not wait."""
        if self.adaptation is not None:
            graphs.prepare_all()
        graphs.prepare(program)

    def slow_down(self, slowdown: Callable[[int], Slowdown]) -> None:
        """Inject a slowdown: from now on the operations of this stage take as long as `slowdown(step)` gives."""
        self._executor.slowdown = slowdown

    def _captured(self) -> JointStage:
        stage = captured_chunks(self._parts, self._chunks, self._ranks.group, self._graphs_when)
        self._same = SameModules(self.modules, stage.guards)
        return stage

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        return self._buckets.flat

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        self._passes += 1
        if self._sharded is not None:
            self._sharded.begin()
        self._buckets.begin(self._sums.begin(lambda bucket: self._give(bucket, on_bucket)))

    def _give(self, bucket: int, on_bucket: Callable[[int], None]) -> None:
        self._computed(bucket)
        on_bucket(bucket)

    def ready(self, bucket: int) -> None:
        self._marks.wait(bucket)

    def _computed(self, bucket: int) -> None:  # by what the calling thread has queued
        self._marks.wrote(bucket, self.device)
        self._marks.handed_out(bucket)

    def seed(self, position: int) -> None:
        """Set the random state for the batch at this position of the rank's stream: equal on all ranks that read it."""
        set_random_state(self._seed, self._replica, self._shard, position)

    def set_update(self, update: UpdateFunction) -> None:
        """Raises MisuseError: the update of a pipeline is the default one."""
        raise MisuseError("an update function cannot be registered for stages: the gradient norm is over all of them")

    def compute(self, position: int) -> None:
        self.train(*self._batch(None if self.batches is None else self.batches.train, position))

    def _batch(self, source: Callable[[int], Batch] | None, number: int) -> Batch:
        assert source is not None, "an engine without batches of its own is given them"
        return source(number) if self._embeds or self._predicts else self._example

    def train(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Forward and backward of a batch, once between `begin` and `end`; its mean loss, on every rank of the replica.

        Inputs are read where the first chunk is, targets where the last one is. A context-parallel rank is given its part of
        both; the loss is that of all parts. Raises MisuseError for a batch that cannot be cut into the schedule's
        micro-batches or, where graphs run them, is unlike the example.
        """
        if self._executor.stage is not self._autograd:
            self._same.check()
            check_like_example((inputs, targets), self._example, (self._embeds, self._predicts), self.schedule.microbatches)
        return self._train((inputs, targets))

    def _train(self, batch: Any, items: float | None = None) -> float:
        """`train` with the arguments that `_microbatches` cuts. With `items` losses are sums, over so many in all, and
        gradients are those of their sum; else losses are means, and gradients those of their mean."""
        self._unchanged.check_frozen()
        if self._loaded:
            self.check_copies()
        microbatches = self._microbatches(batch, self._program.schedule.microbatches)
        self.adding = True
        finish_tied = {}
        for tie, parameter in self._ties.trained:
            grad = self._buckets.grads[self._buckets.index[parameter]]
            finish_tied[parameter] = sum_tied(self._channels, tie.stages, tie.number, grad, self.generation, self._passes)
        self._loss = self._forward_pass(self._executor, self._program, microbatches, self._buckets, finish_tied, items)
        return self._loss

    def end(self) -> WorkResult:
        self._sums.drain()
        if self.adaptation is not None:  # costs are estimated from all operations of the step
            self._executor.times.wait()
            self._executor.times.write_passed()
        self._unchanged.check()
        self._constants.check()
        if self._parts.buffers is None:  # there is no exchange that tells
            self._constants.check_values(self._constants.changed(self.device).tolist())
        return WorkResult(self._loss, 1 if self.batches is None else self.batches.items)

    def _forward_pass(
        self,
        executor: Executor,
        program: Program,
        microbatches: tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]],
        buckets: GradientBuckets | None,
        finish_tied: Mapping[torch.nn.Parameter, Callable[[], None]] = MappingProxyType({}),
        items: float | None = None,
    ) -> float:
        """One pass (with its backward, if there are buckets) over what `_microbatches` gave; the mean loss, on every stage.
        `items`: see `_train`."""
        shared = share_loss(self._channels, self.stage, self.placement[-1], self.generation, self._passes)
        inputs, targets = microbatches
        pass_, factor = self._passes, self._mean_factor if items is None else 1.0
        with autocast_pass(self._parts.autocast, self.device), self._drawing() as draws:
            losses = executor.run(
                program, inputs, targets, buckets, generation=self.generation, step=pass_, factor=factor, draws=draws
            )
        if self._sharded is not None:
            self._sharded.end_pass()
        for parameter, finish in finish_tied.items():
            assert buckets is not None
            finish()
            buckets.complete(parameter)
        mine = None
        if self._predicts:
            count = len(losses) if items is None else items / self._ranks.streams
            mine = math.fsum(torch.stack(losses).tolist()) / count if count else math.nan
        told = shared(mine)
        executor.times.write_passed()  # of an evaluation all
        return self._ranks.mean_loss(told)

    def _microbatches(self, batch: Any, count: int) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]:
        """What the executor is given of a batch: inputs and targets of each micro-batch."""
        if not (self._embeds or self._predicts):
            return (), ()
        reads = zip(batch, (self._embeds, self._predicts), strict=True)
        inputs, targets = (cut(part, count, self.device if read else None) for part, read in reads)
        return inputs, targets

    @outside_autocast()
    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        self._unchanged.check()
        self._unchanged.check_device()
        if reduced is None or not self._install(record, reduced):
            return None
        self._passes += 1
        norm = math.sqrt(math.fsum(self._squared_norms()))
        if not math.isfinite(norm):
            raise Fatal(f"the gradient of step {record.step} is not finite (norm {norm}); lower optim.lr or check the data")
        clip = self.registered.clip_norm
        if clip is not None and (scale := clip / (norm + CLIP_EPS)) < 1.0:
            self._buckets.scale(scale)
        factor = self._policy.factor(len(record.summed), self._replicas)
        optimizers = self.registered.optimizers.values()
        rate = first_rate(self.registered.optimizers, factor)
        with self._guard.update(factor):
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in self.registered.schedulers.values():
                scheduler.step()
        self._unchanged.record()
        self._copies_checked = False
        return Update(norm, rate)

    def _install(self, record: CommitRecord, reduced: Sequence[torch.Tensor]) -> bool:
        """Put the mean of the summed gradients into place; False where nothing of them counts."""
        self._buckets.install(reduced, len(record.summed) * self._ranks.streams)
        return True

    def _squared_norms(self) -> list[float]:
        """Each stage's squared norm of the gradient in the local set, in the order of stages; of a tied parameter's copies the
        first counts."""
        buckets = self._buckets
        elsewhere = self._ties.copies(self.stage)
        skipped = frozenset(buckets.slots[index].bucket for p, index in buckets.index.items() if id(p) in elsewhere)
        mine = self._ranks.squared_norm(buckets.flat, self._layouts, buckets.gradients_in, skipped)
        return gather(self._channels, self.stage, self.stages, self.generation, self._passes, mine)

    def check_copies(self) -> None:
        if self._copies_checked:
            return
        self._ranks.check_copies(self.registered, self._state)
        for tie in self._ties.all:
            self._passes += 1
            mine = self._ties.number(tie)
            check_equal(tie, gather(self._channels, self.stage, self.stages, self.generation, self._passes, mine))
        self._copies_checked, self._loaded = True, False

    def state(self) -> State:
        return self._state.read()

    def state_growth(self) -> int:
        return growth_of(self.registered.optimizers.values())

    def portions(self) -> Mapping[str, Portion]:
        return portions_of(self._state, self._mesh, self._places)

    def load(self, state: State) -> None:
        self._state.load(state)
        self._unchanged.record()
        self._copies_checked, self._loaded = False, True

    def resumed(self) -> str:
        text = self._hyperparameters.resumed()
        self._unchanged.record()
        return text

    def evaluate(self, batches: int) -> tuple[float, int]:
        found = self.batches
        assert found is not None, "an engine without batches of its own is given them"
        losses = [self.measure(*self._batch(found.validation, index)) for index in range(batches)]
        return math.fsum(losses) / batches, batches * found.items

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation of the user's, between two steps."""
        return self._same.evaluation(evaluating(self.registered, self._constants))

    def measure(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The mean loss of a batch in evaluation mode, on every rank of the replica, without gradients; not within a step."""
        self.check_copies()
        self._passes += 1
        microbatches = self._microbatches((inputs, targets), self._evaluation.schedule.microbatches)
        with evaluation_mode(self.modules.values()):
            return self._forward_pass(self._executor, self._evaluation, microbatches, None)

    def close(self) -> None:
        self._guard.close()
        self._sums.close()
        self._buckets.close()  # the parameters' hooks hold this engine, in a cycle through native code
        if self._sharded is not None:
            self._sharded.close()
        for channel in self._channels.values():
            channel.close()
        self._executor.times.write_passed()
