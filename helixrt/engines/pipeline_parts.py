"""The parts of the engine of a pipeline stage, and the rules that they must fulfil.

In: the chunks of a stage, the schedule, what is registered. Out: `PipelineParts` for `helixrt.engines.pipeline`, and
whether a schedule runs by graphs or by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from helixrt.engines.buffers import Mode
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.stage_places import NamesOf
from helixrt.engines.stage_ranks import LayoutsOf
from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, MisuseError
from helixrt.passes.errors import CaptureError
from helixrt.pipeline.channels import CPU
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.pipeline.program import needs_graphs
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.ir import Schedule

if TYPE_CHECKING:
    from helixrt.compile.watch import Watch
    from helixrt.passes.guards_private import Guards
    from helixrt.pipeline.graph_stage import GraphStage

GRAPHS = ("auto", "always", "never")
PROFILES = ("auto", "measure", "estimate")  # see passes.profile.Mode
BUCKET_BYTES = 1 << 22
BUFFERS_RULE = (
    "parts of helixrt.Stages cannot have running statistics, persistent integer buffers, or buffers with the mode mean or "
    "first: what a forward changes is not exchanged. Register an integer buffer that no forward changes with persistent=False"
)

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, cut into micro-batches along dimension 0


@dataclass(frozen=True)
class Batches:
    """Where inputs and targets come from: `train(position)` and `validation(index)` give (inputs, targets). They must be pure
    functions of their argument, and are called only where the first and the last chunk of the model are. `items` is how many a
    batch has.
    """

    train: Callable[[int], Batch]
    validation: Callable[[int], Batch]
    items: int


@dataclass(frozen=True)
class PipelineParts:
    """What the engine of one stage is made of.

    `modules`: this stage's chunks of the model, by number, as `schedule` places them. `registered`: the same modules, with
    the optimizers and schedulers of their parameters; `clip_norm` is taken over all stages. `loss(output, target)` is the
    mean over a micro-batch; `example` is one micro-batch, of any values; `boundary`: a tensor like what travels between
    chunks, or one for each two neighbours in order. `batches`: for `run`, which finds its batches itself; a user's loop
    calls `train` instead. `tied`: the name of a parameter of which the first and the last chunk have a copy each, "" if
    there is none; or, by their names, the chunks that have copies of parameters. `changing`: see `Buffers`. `group` holds the
    replica's pipeline ranks, ordered by stage (Gloo); None for a single stage. `channels` lead to the other stages, and are
    closed with the engine; None: over `group`. `mesh` is that of the whole replica, and `layouts` declares for a chunk the
    placement of its parameters on the ranks that share the stage, `names` what parameters and buffers of a chunk are called in
    the whole model (None: as they are registered). A schedule that moves W or has pairs runs by graphs of the chunks, others by
    autograd; `graphs`, one of GRAPHS, may say otherwise. `profile`, one of PROFILES: how the times are found by which pairs
    that communicate are woven. With `adaptation` the job may change the schedule; then all run by graphs, which give the same
    bits. `autocast`: the type that forwards and loss compute in, under autocast; None: that of the parameters. `device`: that
    of the parameters, where the stage computes; `example` and `boundary` are there too. Batches may come from elsewhere.
    """

    modules: Mapping[int, nn.Module]
    schedule: Schedule
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    example: Batch
    boundary: torch.Tensor | Sequence[torch.Tensor]
    registered: Registered
    stage: int
    group: dist.ProcessGroup | None
    record: FlightRecord
    batches: Batches | None = None
    bucket_bytes: int = BUCKET_BYTES
    tied: str | Mapping[str, Sequence[int]] = ""
    changing: Mapping[str, bool] | None = None
    buffers: Mode | None = None  # how those of contributors are united; None: a forward may change none
    graphs: str = "auto"
    profile: str = "auto"
    policy: Policy = field(default_factory=Policy)
    channels: StageChannels | None = None
    replica: int = 0
    replicas: int = 1  # configured ones, for the policy
    seed: int = 0  # of random numbers, see `seed`
    mesh: ReplicaMesh = field(default_factory=lambda: ReplicaMesh({}))
    layouts: LayoutsOf | None = None
    names: NamesOf | None = None
    adaptation: Adaptation | None = None
    autocast: torch.dtype | None = None
    device: torch.device = CPU


def runs_by_graphs(schedule: Schedule, setting: str) -> bool:
    """Whether `graphs`, one of GRAPHS, has the schedule run by graphs; else autograd does, backwards in one piece."""
    return setting == "always" or (setting == "auto" and needs_graphs(schedule))


def check_registered(registered: Registered, parameters: Collection[nn.Parameter]) -> None:
    """Raises MisuseError if an update of what is registered would not be one of these parameters, those of the stage."""
    registered.check()
    registered.check_update_is_complete()
    if registered.scaler is not None:
        raise MisuseError("a pipeline trains in the type of its parameters; register no scaler")
    if set(parameters) != {parameter for _, parameter in registered.parameters() if parameter.requires_grad}:
        raise MisuseError("the registered model is not that of this stage's chunks; register what session.parallelize gave")


def check_same_chunks(schedule: Schedule, before: Schedule) -> None:
    """Raises ValueError unless the schedule is for the chunks, their places and the micro-batches of the one before."""
    if (schedule.stages, schedule.microbatches) != (before.stages, before.microbatches):
        raise ValueError(f"schedule {schedule.name} is for {schedule.stages} stages, {schedule.microbatches} micro-batches")
    if schedule.placement != before.placement:
        raise ValueError(
            f"schedule {schedule.name} has chunks on stages {list(schedule.placement)}, they are on {list(before.placement)}"
        )


def check_shards(schedule: Schedule, setting: str, shards: int) -> None:
    """Raises ConfigError if graphs were to run chunks that are sharded over so many dp_shard ranks."""
    if shards > 1 and runs_by_graphs(schedule, setting):
        rule = (
            f"cannot be with schedule {schedule.name} run by captured graphs, which gather no shards; take 1f1b, gpipe or "
            "interleaved, or graphs=never, by which autograd runs any schedule with whole backwards"
        )
        raise ConfigError("mesh.dp_shard", shards, rule)


def cut(part: torch.Tensor, microbatches: int, device: torch.device | None = None) -> Sequence[torch.Tensor]:
    """Into equal micro-batches along dimension 0, moved to this device. Raises MisuseError."""
    if device is not None:  # what comes to the host is read at once
        part = part.to(device, non_blocking=device.type != "cpu")
    if part.dim() == 0 or part.shape[0] == 0 or part.shape[0] % microbatches:
        raise MisuseError(f"a batch of shape {list(part.shape)} cannot be cut into {microbatches} equal micro-batches")
    return part.chunk(microbatches)


def check_like_example(batch: Batch, example: Batch, reads: tuple[bool, bool], microbatches: int) -> None:
    """Raise MisuseError for a batch whose micro-batches are not like the example, whose shapes graphs have in them. `reads`:
    whether this stage reads the input, and the target."""
    for what, is_read, part, like in zip(("input", "target"), reads, batch, example, strict=True):
        if is_read and part.dim() > 0 and part.shape[0] % microbatches == 0:  # else it cannot be cut
            shape = (part.shape[0] // microbatches, *part.shape[1:])
            if (shape, part.dtype) != (tuple(like.shape), like.dtype):
                raise MisuseError(
                    f"the {what} of a micro-batch is {part.dtype} {list(shape)}, and the graphs were captured for the example, "
                    f"{like.dtype} {list(like.shape)}: give batches like it, or train with graphs='never'"
                )


def captured_chunks(
    parts: PipelineParts, chunks: Mapping[int, StageChunk], group: dist.ProcessGroup | None, setting: str
) -> GraphStage:
    """The chunks of a stage by graphs; `group`: the ranks that share it, `setting` what `graphs` is. Raises ConfigError for
    chunks that cannot be captured."""
    from helixrt.pipeline.graph_stage import Example, GraphStage  # brings torch's compiler, which takes seconds

    boundary = parts.boundary
    assert isinstance(boundary, torch.Tensor), "modules are captured with one boundary for all"
    inputs, targets = parts.example
    examples = {
        number: Example(boundary if number else inputs, targets if chunk.loss is not None else None)
        for number, chunk in chunks.items()
    }
    try:
        return GraphStage(chunks, examples, mode=parts.profile, group=group, autocast=parts.autocast)
    except CaptureError as error:
        rule = f"{' '.join(str(error).split())}; schedule.graphs=never runs whole backwards by autograd"
        raise ConfigError("schedule.graphs", setting, rule) from error


class SameModules:
    """Raises MisuseError once the modules are not those of now, of which graphs are captured. See `compile.watch`."""

    def __init__(self, modules: Mapping[int, nn.Module], guards: Mapping[int, Guards | None] | None = None) -> None:
        self._watch: Watch | None = None
        if modules:
            from helixrt.compile.watch import Watch  # brings torch's compiler, which takes seconds

            named = {f"chunk{number}": modules[number] for number in sorted(modules)}
            self._watch = Watch(named, guards={f"chunk{number}": each for number, each in (guards or {}).items()})

    def check(self, modes: bool = True) -> None:
        rule = (
            "after the graphs of its part were captured, which have what was before. Set it before session.register, or train "
            "with graphs='never'"
        )
        if self._watch is not None and modes and self._watch.mode_changed():
            raise MisuseError(f"the training mode of a module was changed (train() or eval()) {rule}")
        if self._watch is not None and (name := self._watch.changed()):
            raise MisuseError(f"{name} was changed {rule}")

    @contextmanager
    def evaluation(self, kept: AbstractContextManager[None]) -> Iterator[None]:
        """Around an evaluation, which runs the modules themselves: what their forward sets is no change. `kept`: another such
        context."""
        self.check(modes=False)
        with kept:
            yield
        if self._watch is not None:
            self._watch.renew()
