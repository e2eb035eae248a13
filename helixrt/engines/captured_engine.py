"""The engine of a stage whose chunks were cut from one captured graph of an unmodified model.

In: `CapturedParts`: the cut, this stage's parameters, the schedule, what is registered. Out: a `PipelineEngine` that always
runs by graphs and takes batches as micro-batches by port (`Batch.inputs` of `helixrt.compile`).

Random operators draw from (seed, replica, position of the batch, micro-batch, their number in the whole model): the same
numbers for every number of stages and every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from helixrt.engines.captured_tensor import GradientForms
from helixrt.engines.pipeline import BUCKET_BYTES, PipelineEngine, PipelineParts
from helixrt.engines.random_state import micro_batch_seed
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.update import Policy
from helixrt.passes.cut_model import CutModel, ModelChunk
from helixrt.passes.profile import Mode
from helixrt.passes.seeding import seed_of
from helixrt.pipeline.captured_stage import CapturedStage, EvaluationStage, MicroBatch, ModelInputs
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.graph_stage import JointStage
from helixrt.pipeline.held import Values
from helixrt.record import FlightRecord
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.ir import Schedule

_EVALUATION = -1  # in place of a batch's position


@dataclass(frozen=True)
class CapturedParts:
    """`cut` is the whole model's; `holders` are modules with the parameters of this stage's chunks by number, `lasting` all
    parameters and buffers that these take in. `evaluation` gives the cut of the model in evaluation mode, at the same places.
    `forms`: how gradients lie on the ranks of `mesh` that share the stage. The other fields are those of `PipelineParts`."""

    cut: CutModel
    holders: Mapping[int, nn.Module]
    lasting: Values
    evaluation: Callable[[], CutModel]
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
    mesh: ReplicaMesh = field(default_factory=lambda: ReplicaMesh({}))
    forms: GradientForms = field(default_factory=GradientForms)
    adaptation: Adaptation | None = None

    def chunks(self, cut: CutModel) -> dict[int, ModelChunk]:
        """Those of this stage."""
        return {number: cut.chunks[number] for number in self.holders}


def boundaries(cut: CutModel) -> list[torch.Tensor]:
    """Tensors of the shapes and dtypes that cross; they hold no memory."""
    return [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in cut.boundaries]


class CapturedEngine(PipelineEngine):
    """As `PipelineEngine`; batches come by `train_microbatches` and `measure_microbatches`."""

    def __init__(self, parts: CapturedParts) -> None:
        self._captured_parts = parts
        self._inputs: ModelInputs
        self._drawn = 0  # of the batch that is worked on
        self._evaluator: tuple[Executor, EvaluationStage] | None = None
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
                changing=(),
                graphs="always",
                policy=parts.policy,
                replica=parts.replica,
                replicas=parts.replicas,
                seed=parts.seed,
                mesh=parts.mesh,
                layouts=parts.forms.of,
                adaptation=parts.adaptation,
            )
        )

    def _captured(self) -> JointStage:
        parts = self._captured_parts
        pieces, group = parts.forms.pieces, self._ranks.group
        stage = CapturedStage(parts.chunks(parts.cut), parts.lasting, mode=parts.profile, group=group, pieces=pieces)
        self._inputs = stage.inputs
        return stage

    def seed(self, position: int) -> None:
        super().seed(position)
        self._drawn = micro_batch_seed(self._seed, self._replica, 0, position)

    def train_microbatches(self, microbatches: Sequence[MicroBatch]) -> float:
        """As `train`, of a batch that is cut already."""
        self._begin(self._inputs, microbatches, self._drawn)
        return self._train(microbatches)

    def measure_microbatches(self, microbatches: Sequence[MicroBatch]) -> float:
        """As `measure`. The first one captures the model in evaluation mode. Raises CaptureError."""
        if self._evaluator is None:
            parts = self._captured_parts
            cut = parts.evaluation()
            stage = EvaluationStage(parts.chunks(cut), parts.lasting)
            self._evaluator = Executor(stage, self._channels, boundaries(cut), self.record), stage
        executor, stage = self._evaluator
        self._passes += 1
        self._begin(stage.inputs, microbatches, micro_batch_seed(self._seed, 0, 0, _EVALUATION))
        return self._forward_pass(executor, self._evaluation, microbatches, None)

    def _begin(self, inputs: ModelInputs, microbatches: Sequence[MicroBatch], drawn: int) -> None:
        inputs.begin(microbatches, [seed_of(drawn, number) for number in range(len(microbatches))])

    def _microbatches(self, batch: Any, count: int) -> tuple[Sequence[torch.Tensor | None], Sequence[torch.Tensor | None]]:
        nothing = [None] * count  # the stage has them
        return nothing, nothing


def _in_the_graph(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the loss is in the graph of the last chunk")
