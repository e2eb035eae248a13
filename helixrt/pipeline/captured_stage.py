"""A stage of a pipeline that was cut from one captured graph of the whole model (`passes.cut`).

In: the stage's chunks, their parameters and buffers by name (`Casts`); before each pass the micro-batches of the whole model,
and a seed for each. Out: as of any stage. Besides what a neighbour gives, a chunk takes in those of the model's inputs and
targets that its part of the graph names. `CapturedStage` trains; `EvaluationStage` runs forwards that save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from helixrt.passes.cut_model import BOUNDARY, ModelChunk
from helixrt.passes.executable import Executable
from helixrt.passes.forward import forward_alone
from helixrt.passes.lift import lift
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.pieces import Piece
from helixrt.passes.profile import Mode
from helixrt.passes.seeding import SEED
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.channels import CPU
from helixrt.pipeline.gradients import ParameterGradients
from helixrt.pipeline.graph_stage import JointStage
from helixrt.pipeline.held import Strand, run_held
from helixrt.pipeline.stage import Stage, Task
from helixrt.schedule.ir import Op

MicroBatch = Mapping[Port, torch.Tensor]  # the model's INPUT and TARGET


class ModelInputs:
    """What the chunks of a stage take in from outside the model, in the pass that is running."""

    def __init__(self, chunks: Mapping[int, ModelChunk]) -> None:
        self._chunks = chunks
        self._microbatches: Sequence[MicroBatch] = ()
        self._seeds: Sequence[torch.Tensor] = ()
        self._device = CPU

    def begin(self, microbatches: Sequence[MicroBatch], device: torch.device, seeds: Sequence[torch.Tensor]) -> None:
        """The micro-batches of the next pass, and what each draws its random numbers from. What a chunk takes in is moved to
        `device`."""
        self._microbatches, self._device, self._seeds = microbatches, device, seeds

    def of(self, task: Task) -> dict[Port, torch.Tensor]:
        """All that comes into a forward."""
        chunk = self._chunks[task.chunk]
        microbatch = self._microbatches[task.microbatch]
        aside = self._device.type != "cpu"  # what comes to the host is read at once
        found = {each.port: microbatch[each.source].to(self._device, non_blocking=aside) for each in chunk.inputs}
        if task.given is not None:
            found[Port(Role.INPUT, BOUNDARY)] = task.given
        if chunk.seeded:
            found[SEED] = self._seeds[task.microbatch]
        return found


class CapturedStage(JointStage):
    """Runs F, B, W and BW of chunks, and pairs. `casts` have their parameters and buffers, as plain tensors of this rank, also
    where the model was captured with DTensors. Raises VerifyError."""

    def __init__(
        self,
        chunks: Mapping[int, ModelChunk],
        casts: Casts,
        *,
        mode: Mode | str = Mode.AUTO,
        group: Any = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        super().__init__(_lifted(chunks, casts), casts.lasting, mode=mode, group=group, pieces=pieces)
        self.casts, self.inputs = casts, ModelInputs(chunks)

    def reset(self) -> None:
        super().reset()
        self.casts.forget()  # an evaluation may have swapped weights in and out again, past their version counters
        self.casts.refresh()

    def given(self, task: Task) -> Mapping[Port, torch.Tensor | None]:
        return self.inputs.of(task)


class EvaluationStage(Stage):
    """Runs forwards alone, of chunks that were captured in evaluation mode."""

    def __init__(self, chunks: Mapping[int, ModelChunk], casts: Casts) -> None:
        self.casts, self.inputs = casts, ModelInputs(chunks)
        self.graphs = {number: Executable(forward_alone(part)) for number, part in _lifted(chunks, casts).items()}
        self._none = ParameterGradients({}, {})

    def reset(self) -> None:
        """Nothing but casts is kept between operations."""
        self.casts.forget()
        self.casts.refresh()

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        (task,) = tasks
        assert task.op is Op.F and buckets is None, "an evaluation has forwards alone"
        graph = self.graphs[task.chunk]
        wanted = set(graph.inputs)
        held = {port: value for port, value in self.inputs.of(task).items() if port in wanted}
        tasks.clear()
        del task
        (result,) = run_held(graph, [Strand(held)], self.casts.lasting, self._none)
        (value,) = result.values()
        return [value.clone() if value.dim() == 0 else value]  # as a view a loss would hold what it lies in


def _lifted(chunks: Mapping[int, ModelChunk], casts: Casts) -> dict[int, Part]:
    """The chunks' graphs, which take in casts of parameters; gradients of DTensors are those of a rank's part."""
    parts = {}
    for number, chunk in chunks.items():
        lifted = lift(replace(chunk.part, layouts={}))
        casts.add(lifted.casts)
        parts[number] = lifted.part
    return parts
