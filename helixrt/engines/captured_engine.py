"""The engine of a stage whose chunks were cut from one captured graph of an unmodified model.

In: `CapturedParts`: the cut, this stage's parameters, the schedule, what is registered. Out: a `PipelineEngine` that always
runs by graphs and takes batches as `helixrt.compile` cuts them (`Batch`), with a weight, in several shapes.

Random operators draw from (seed, replica, position of the batch, micro-batch, their number in the whole model): the same
numbers for every number of stages and every schedule.

The weight of a batch and the buffers that forwards have changed travel beside the gradients, in the book (`exchange_book`),
which is handed out last; at commit the sum of gradients is divided by the sum of weights.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from helixrt.compile.kept_graphs import Graphs, KeptGraphs
from helixrt.compile.microbatches import Batch
from helixrt.engines.buffers import Mode as BufferMode
from helixrt.engines.captured_tensor import GradientForms
from helixrt.engines.exchange_book import ExchangeBook, Totals, check_weight
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipeline_parts import BUCKET_BYTES, PipelineParts
from helixrt.engines.random_state import micro_batch_seed
from helixrt.engines.registered import Registered, qualified
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.update import ModuleUpdate, Policy
from helixrt.errors import MisuseError
from helixrt.passes.cut_model import CutModel, ModelChunk
from helixrt.passes.errors import CaptureError
from helixrt.passes.parts import Port, Role
from helixrt.passes.profile import Mode
from helixrt.passes.seeding import seed_of
from helixrt.pipeline.captured_stage import CapturedStage, EvaluationStage, MicroBatch, ModelInputs
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.channels import CPU, Lane
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.epilogue import gather
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.graph_stage import JointStage
from helixrt.pipeline.held import Values
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.replica.contracts import State, Update, WorkResult
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.ir import Schedule

CAPTURE_S = 3600.0  # within which a model is captured; a rank that captures is not taken for stuck

Busy = Callable[[str, float], AbstractContextManager[None]]  # what is done, and its limit in seconds

_EVALUATION = -1  # in place of a batch's position


@dataclass(frozen=True)
class CapturedParts:
    """`cut` is the whole model's, for batches like `example`; `holders` are modules with the parameters of this stage's chunks
    by number, `lasting` all parameters and buffers that these take in. `cut_for(batch, training)` gives the cut for batches of
    other shapes, or in evaluation mode, at the same places; `shapes` is for how many shapes graphs are kept, `where` the
    FILE:LINE of the model, `copied` whether a copy of it is captured, which tp or cp ranks have cut. `statistics`: names of
    running statistics of torch's own modules in the model. `forms`: how gradients lie on the ranks of `mesh` that share the
    stage. `device`: that of the parameters, which the graphs run on. The other fields are those of `PipelineParts`."""

    cut: CutModel
    example: Batch
    holders: Mapping[int, nn.Module]
    lasting: Values
    cut_for: Callable[[Batch, bool], CutModel]
    schedule: Schedule
    registered: Registered
    stage: int
    group: dist.ProcessGroup | None
    record: FlightRecord
    channels: StageChannels | None = None
    profile: Mode | str = Mode.AUTO
    bucket_bytes: int = BUCKET_BYTES
    policy: Policy = field(default_factory=Policy)
    replica: int = 0
    replicas: int = 1
    seed: int = 0
    buffers: BufferMode = "mean"
    statistics: Collection[str] = ()
    shapes: int = 8
    where: str = ""
    copied: bool = False
    busy: Busy = lambda doing, limit_s: nullcontext()
    mesh: ReplicaMesh = field(default_factory=lambda: ReplicaMesh({}))
    forms: GradientForms = field(default_factory=GradientForms)
    adaptation: Adaptation | None = None
    device: torch.device = CPU

    def chunks(self, cut: CutModel) -> dict[int, ModelChunk]:
        """Those of this stage."""
        return {number: cut.chunks[number] for number in self.holders}

    def changing(self) -> dict[str, bool]:
        """The buffers of this stage that a forward changes, by their names among the registered ones, and whether they are
        running statistics."""
        names = {name for chunk in self.chunks(self.cut).values() for name in chunk.changed}
        known = {id(self.lasting[Port(Role.BUFFER, name)]): name in self.statistics for name in names}
        buffers = ((qualified(key, name), id(b)) for key, m in self.registered.models.items() for name, b in m.named_buffers())
        return {name: known[identity] for name, identity in buffers if identity in known}


def boundaries(cut: CutModel) -> list[torch.Tensor]:
    """Tensors of the shapes and dtypes that cross; they hold no memory."""
    return [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in cut.boundaries]


@dataclass(frozen=True)
class _Training:
    """Graphs for batches of one shape, and what crosses between chunks."""

    stage: CapturedStage
    boundary: list[torch.Tensor]


@dataclass(frozen=True)
class _Evaluation:
    stage: EvaluationStage
    executor: Executor


class CapturedEngine(PipelineEngine):
    """As `PipelineEngine`; batches come by `train_batch` and `measure_batch`. Stages of a replica must give the same batch."""

    def __init__(self, parts: CapturedParts) -> None:
        self._captured_parts = parts
        self._casts = Casts(parts.lasting)
        self._training: KeptGraphs[_Training] = KeptGraphs(parts.shapes)
        self._evaluations: KeptGraphs[_Evaluation] = KeptGraphs(parts.shapes)
        self._told = False  # that graphs were dropped
        self._drawn = 0  # of the batch that is worked on
        self._weight = 1.0  # of the batch that was worked on last
        self._totals: Totals | None = None  # of the newest exchange that counted
        self._hand_out: Callable[[int], None] = lambda bucket: None
        super().__init__(
            PipelineParts(
                modules=parts.holders,
                schedule=parts.schedule,
                loss=_in_the_graph,
                example=(torch.empty(0), torch.empty(0)),
                boundary=boundaries(parts.cut),
                registered=parts.registered,
                stage=parts.stage,
                group=parts.group,
                channels=parts.channels,
                record=parts.record,
                bucket_bytes=parts.bucket_bytes,
                tied={tie.name: tie.chunks for tie in parts.cut.ties},
                changing=parts.changing(),
                buffers=parts.buffers,
                graphs="always",
                policy=parts.policy,
                replica=parts.replica,
                replicas=parts.replicas,
                seed=parts.seed,
                mesh=parts.mesh,
                layouts=parts.forms.of,
                adaptation=parts.adaptation,
                device=parts.device,
            )
        )
        self._book = ExchangeBook(0, self._constants, CPU)  # what it tells is known there
        self._mean_factor = 1.0 / (parts.schedule.microbatches * self._ranks.streams)

    # ---------------------------------------------------------------- graphs

    def _captured(self) -> JointStage:
        cut = self._captured_parts.cut
        made = self._graphs_of(cut)
        self._training.keep(_key(self._captured_parts.example), made, cut.guards)
        return made.stage

    def _chosen(
        self, kept: KeptGraphs[Graphs], batch: Batch, items: float | None, make: Callable[[CutModel], Graphs]
    ) -> Graphs:
        """Graphs for a batch, of those that are kept or made now. Raises MisuseError, on all stages, if they were given batches
        of different shapes, or weights, or other Python values, and for a value that changes again and again."""
        parts, training = self._captured_parts, kept is self._training
        found = kept.find(_key(batch))
        changed = kept.changed if found is None else ""
        self._compare(batch, items, changed)
        if found is not None:
            return found
        if changed and kept.in_model and parts.copied:
            raise MisuseError(
                f"{changed} was changed after session.parallelize, which has cut the model over tp or cp ranks with what was "
                "before: change it before that, or give the model what changes as a tensor of the batch"
            )
        why = "for batches of other shapes" if training else "in evaluation mode"
        try:
            kept.make_room(parts.where)
        except CaptureError as error:
            raise MisuseError(f"{error.reason}; {error.remedy}") from None
        self._tell_dropped(kept.dropped)
        with parts.busy(f"captures the model {f'after {changed} changed' if changed else why}", CAPTURE_S):
            cut = parts.cut_for(batch, training)
            kept.keep(_key(batch), made := make(cut), cut.guards)
        return made

    def _tell_dropped(self, dropped: int) -> None:
        if dropped and not self._told:
            self._told = True
            most = self._captured_parts.shapes
            warnings.warn(
                f"batches had more than shapes={most} shapes, and each takes time to capture, also when it comes again; pad "
                "batches to a few lengths (bucketing), or raise shapes= of helixrt.compile, which keeps more graphs",
                stacklevel=2,
            )

    def _prepared_graphs(self, cut: CutModel) -> _Training:
        made = self._graphs_of(cut)
        self._prepare_graphs(made.stage, self._program)
        return made

    def _graphs_of(self, cut: CutModel) -> _Training:
        parts = self._captured_parts
        pieces, group = parts.forms.pieces, self._ranks.group
        stage = CapturedStage(parts.chunks(cut), self._casts, mode=parts.profile, group=group, pieces=pieces)
        return _Training(stage, boundaries(cut))

    def _evaluation_graphs(self, cut: CutModel) -> _Evaluation:
        stage = EvaluationStage(self._captured_parts.chunks(cut), self._casts)
        executor = Executor(stage, self._channels, boundaries(cut), self.record, device=self.device)
        return _Evaluation(stage, executor)

    # ---------------------------------------------------------------- a step

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        """The book, then the flat gradients."""
        return [*self._book.tensors, *self._buckets.flat]

    def finite_part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return self._book.finite_part(index, values)

    def ready(self, bucket: int) -> None:
        if (own := bucket - len(self._book.tensors)) >= 0:
            super().ready(own)

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        offset = len(self._book.tensors)
        super().begin(lambda bucket: on_bucket(bucket + offset))
        self._hand_out = on_bucket
        self._constants.begin()
        self._book.begin()

    def seed(self, position: int) -> None:
        super().seed(position)
        self._drawn = micro_batch_seed(self._seed, self._replica, 0, position)

    @property
    def fixed_shape(self) -> bool:
        """Batches of other shapes have graphs of their own."""
        return False

    def _drawing(self) -> AbstractContextManager[None]:
        """The graphs are given the seeds of their random operators."""
        return nullcontext()

    def train_batch(self, batch: Batch, weight: float | torch.Tensor | None = None) -> float:
        """As `train`. With `weight` the loss of each micro-batch is a sum, and the batch has so many items: the mean loss is
        over items. Batches of shapes that have not been seen are captured now, by all stages. Raises MisuseError for a weight
        that is none, a batch that the model cannot be captured with, and where stages were given different batches."""
        items = _items(weight)
        self.adding = self.stages > 1
        made = self._chosen(self._training, batch, items, self._prepared_graphs)
        if self._graphs is not made.stage:
            self._prepare_graphs(made.stage, self._program)  # of a schedule that is newer than the graphs
            self._graphs = self._executor.stage = made.stage
            self._executor.boundary = made.boundary
        self._begin(made.stage.inputs, batch.inputs, self._drawn)
        mean = self._train(batch, items)
        self._weight = 1.0 if items is None else items
        loss = mean * self._weight if self._weight else 0.0
        self._book.add(torch.tensor(loss, dtype=torch.float64, device=CPU), self._weight)
        return mean

    def measure_batch(self, batch: Batch, weight: float | torch.Tensor | None = None) -> float:
        """As `measure`; `weight` as for `train_batch`. The first batch of each shape captures the model in evaluation mode.
        Raises MisuseError as `train_batch` does."""
        self.check_copies()
        items = _items(weight)
        self._passes += 1
        made = self._chosen(self._evaluations, batch, items, self._evaluation_graphs)
        self._begin(made.stage.inputs, batch.inputs, micro_batch_seed(self._seed, 0, 0, _EVALUATION))
        microbatches = self._microbatches(batch, self._evaluation.schedule.microbatches)
        return self._forward_pass(made.executor, self._evaluation, microbatches, None, items=items)

    def _compare(self, batch: Batch, items: float | None, changed: str) -> None:
        said = [f"{name} is {kind}" for name, kind in batch.kinds().items()] + [f"weight is {items}"]
        said += [f"{changed} has changed"] if changed else []
        number = float(int.from_bytes(hashlib.sha256("; ".join(said).encode()).digest()[:6], "big"))
        told = gather(self._channels, self.stage, self.stages, self.generation, self._passes, number, Lane.BATCH)
        if other := [stage for stage, each in enumerate(told) if each != number]:
            raise MisuseError(f"stage {other[0]} was given another batch than stage {self.stage}, with which {', '.join(said)}")

    def _begin(self, inputs: ModelInputs, microbatches: Sequence[MicroBatch], drawn: int) -> None:
        inputs.begin(microbatches, self.device, [seed_of(drawn, number) for number in range(len(microbatches))])

    def _microbatches(self, batch: Any, count: int) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]:
        nothing = [None] * count  # the stage has them
        return nothing, nothing

    def end(self) -> WorkResult:
        super().end()
        self._book.fill(())
        for index in reversed(range(len(self._book.tensors))):
            self._hand_out(index)
        return WorkResult(self._loss, self._weight)

    # ---------------------------------------------------------------- updates and state

    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        self._casts.forget()
        update = super().apply(record, reduced)
        if update is None or self._totals is None:
            self._constants.discard()
            return None
        return ModuleUpdate(update.grad_norm, update.learning_rate, self._totals.loss, self._totals.weight)

    def _install(self, record: CommitRecord, reduced: Sequence[torch.Tensor]) -> bool:
        room = len(self._book.tensors)
        totals = self._totals = self._book.read(reduced[:room])
        if not totals.weight > 0:
            return False
        self._buckets.install(reduced[room:], totals.weight)
        self._constants.commit(totals.changed, totals.floats, totals.integers, record.summed)
        return True

    def load(self, state: State) -> None:
        super().load(state)
        self._casts.forget()


def _key(batch: Batch) -> Hashable:
    return tuple(batch.kinds().items())


def _items(weight: float | torch.Tensor | None) -> float | None:
    """Raises MisuseError for a weight that is none."""
    check_weight(weight)
    if weight is None:
        return None
    check_weight(items := float(weight))
    return items


def _in_the_graph(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the loss is in the graph of the last chunk")
