"""A model that is cut into pipeline stages, as a user gives it, and this rank's part of it.

In: `Stages`: the parts, how they are run, what travels between them. Out: `StagedModel`, a module with the parts of this rank,
whose parameters an optimizer takes; `Session.register` makes a `PipelineEngine` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from helixrt.engines.buffers import Mode
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipeline_parts import BUCKET_BYTES, GRAPHS, PROFILES, Batch, Batches, PipelineParts, check_shards
from helixrt.engines.pipelined import PipelinedModel
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded_stage import shard_chunks
from helixrt.engines.stage_places import NamesOf
from helixrt.engines.stage_ranks import LayoutsOf
from helixrt.engines.ties import check_shared
from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, MisuseError
from helixrt.pipeline.channels import CPU, MAX_CHUNKS, MAX_MICROBATCHES
from helixrt.pipeline.endpoint_channels import StageChannels
from helixrt.record import FlightRecord
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.check import check_microbatch_order
from helixrt.schedule.generators.named import named
from helixrt.schedule.ir import Schedule, ScheduleError

MakeParts = Callable[[Sequence[int]], Mapping[int, nn.Module]]


@dataclass(frozen=True)
class Stages:
    """A model in parts that follow each other, trained by `step.train(model, x, target=y)`.

    `modules`: all parts in order, or those of this rank by their number, or a function that makes them: its argument is the
    numbers of this rank's parts. The schedule decides which stage has which part: "interleaved", "zbv", "dualpipev" and
    "w" have two parts on each stage; with all others stage s has part s. `loss(output, target)` is the mean over a
    micro-batch. `example`: input and target of one micro-batch, of any values; `boundary`: a tensor of the shape and type that
    parts send to each other. Parts are moved to the rank's device; examples and batches may be anywhere. Each batch is cut into
    `microbatches` along dimension 0. `schedule`: a name that `helixrt schedule --help` lists, or a `Schedule`. `tied`: the name
    of a parameter of which the first and the last part have a copy each. `graphs`: whether captured graphs run the parts
    instead of autograd (auto, always, never). `profile`: how the times of operators are found where graphs that communicate are
    woven: from the disk, else measured (auto), measured, or estimated. `bucket_bytes`: size of a gradient bucket. `adapt`: the
    job may change the order of the schedule while it runs, by what it measures, as readily as this `helixrt.Adaptation`
    decides; parts then run by captured graphs. `costs`: the `profile.json` of an earlier run, in the run's folder: the first
    order of "zb", "adaptra" or "helix" is planned from the costs that were measured there; without it from equal ones. All
    ranks read it.

    In a mesh with cp or tp above 1 the parts are this rank's own, built on the groups that `session.group(axis)` gives, and
    `layouts(part)` gives a `ParameterLayout` for each parameter of a part that is not whole on every rank, by name. `example`
    and `boundary` are of what this rank gets.

    With dp_shard above 1 every dp_shard rank builds its parts whole, with the same values, and gives its own batch. FSDP2
    shards them (`helixrt.engines.sharded_stage`), but for parameters whose layout is `sharded` over dp_shard. Captured graphs
    do not run them.

    Checkpoints have the names of the whole model: `names(part, name)` gives that of the parameter or buffer `name` of part
    number `part`. Without it these are `chunkPART.NAME`, and a run is resumed with as many parts, on any number of stages.
    """

    modules: Sequence[nn.Module] | Mapping[int, nn.Module] | MakeParts
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    example: Batch
    boundary: torch.Tensor
    microbatches: int
    schedule: str | Schedule = "1f1b"
    tied: str = ""
    graphs: str = "auto"
    bucket_bytes: int = BUCKET_BYTES
    layouts: LayoutsOf | None = None
    profile: str = "auto"
    names: NamesOf | None = None
    adapt: Adaptation | None = None
    costs: str | Path = ""

    GRAPHS: ClassVar = GRAPHS
    PROFILES: ClassVar = PROFILES
    MAX_MICROBATCHES: ClassVar = MAX_MICROBATCHES  # that messages between stages can tell apart
    MAX_PARTS: ClassVar = MAX_CHUNKS
    check_shards: ClassVar = staticmethod(check_shards)

    def scheduled(self, stages: int) -> Schedule:
        """The schedule over so many stages. Raises ConfigError for settings that do not fit each other."""
        if self.graphs not in GRAPHS:
            raise ConfigError("stages.graphs", self.graphs, f"must be one of {', '.join(GRAPHS)}")
        if self.profile not in PROFILES:
            raise ConfigError("stages.profile", self.profile, f"must be one of {', '.join(PROFILES)}")
        if isinstance(self.loss, nn.Module) and any(parameter.requires_grad for parameter in self.loss.parameters()):
            rule = "has parameters to train, which no part has: give them to the last part"
            raise ConfigError("stages.loss", type(self.loss).__name__, rule)
        made = scheduled(self.schedule, stages, self.microbatches, self.costs, "stages.")
        check_adaptation(self.adapt, made, "stages.")
        if self.adapt is not None and self.graphs == "never":
            rule = "cannot be with stages.adapt: orders give the same bits, and take the times predicted, by graphs"
            raise ConfigError("stages.graphs", self.graphs, rule)
        return made


def check_adaptation(adapt: Adaptation | None, schedule: Schedule, settings: str = "") -> None:
    """Raise ConfigError, by keys that begin with `settings`, for what is no adaptation, where there is nothing to adapt, and
    for a schedule whose gradients would not be those of other orders, bit for bit."""
    if adapt is None:
        return
    if not isinstance(adapt, Adaptation):
        raise ConfigError(f"{settings}adapt", adapt, "must be a helixrt.Adaptation, or None")
    if schedule.stages == 1:
        raise ConfigError(f"{settings}adapt", "given", "needs mesh.pp above 1: a model that is one stage has one order")
    try:
        check_microbatch_order(schedule)
    except ScheduleError as error:
        raise ConfigError(f"{settings}schedule", schedule.name, f"cannot be with {settings}adapt: {error}") from error


def scheduled(schedule: str | Schedule, stages: int, microbatches: int, costs: str | Path = "", settings: str = "") -> Schedule:
    """The schedule of this name, for equal costs or those of a file, or the one given. Raises ConfigError, by keys that begin
    with `settings`."""
    if not isinstance(costs, str | Path):
        raise ConfigError(f"{settings}costs", costs, "must be the path of a profile.json")
    if costs and not isinstance(schedule, str):
        raise ConfigError(f"{settings}costs", str(costs), f"cannot be with schedule {schedule.name}, whose order is given")
    if not 1 <= microbatches <= MAX_MICROBATCHES:
        raise ConfigError(f"{settings}microbatches", microbatches, f"must be between 1 and {MAX_MICROBATCHES}")
    if schedule == "1f1b" and microbatches < stages:
        raise ConfigError(f"{settings}microbatches", microbatches, f"1f1b needs one per stage: mesh.pp={stages}")
    made = named(schedule, stages, microbatches, costs, f"{settings}costs") if isinstance(schedule, str) else schedule
    if (made.stages, made.microbatches) != (stages, microbatches):
        given = f"{made.stages} stages and {made.microbatches} micro-batches"
        raise ConfigError(f"{settings}schedule", made.name, f"is for {given}, not {stages} and {microbatches}")
    if made.chunks > MAX_CHUNKS:
        raise ConfigError(f"{settings}schedule", made.name, f"has {made.chunks} parts, more than {MAX_CHUNKS}")
    return made


@dataclass(frozen=True)
class StagePlace:
    """Which stage of how many this rank is, and how it reaches the others (None for a single stage)."""

    stage: int
    stages: int
    group: dist.ProcessGroup | None
    record: FlightRecord
    mesh: ReplicaMesh = field(default_factory=lambda: ReplicaMesh({}))  # of the whole replica
    channels: StageChannels | None = None  # over endpoints; None: over `group`
    device: torch.device = CPU  # where it computes


class StagedModel(PipelinedModel):
    """The parts of a model that are on this rank, moved to its device. Made by `session.parallelize(Stages(...))`. `autocast`:
    see `PipelineParts`."""

    def __init__(self, stages: Stages, place: StagePlace, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast = autocast
        self.stages, self.place, self.schedule = stages, place, stages.scheduled(place.stages)
        mine = [number for number, home in enumerate(self.schedule.placement) if home == place.stage]
        found = self._found(mine)
        if missing := [number for number in mine if number not in found]:
            rule = f"lacks part {missing[0]}, which {self.schedule.name} has on stage {place.stage}"
            raise ConfigError("stages.modules", sorted(found), rule)
        for number in mine:
            if empty := [name for name, parameter in found[number].named_parameters() if parameter.is_meta]:
                raise MisuseError(f"{empty[0]} is on the meta device; build the model with values before session.parallelize")
        self.chunks = {number: found[number].to(place.device) for number in mine}
        if isinstance(stages.loss, nn.Module):
            stages.loss.to(place.device)
        shard_chunks(self.chunks, place.mesh, stages.layouts)
        for number, module in self.chunks.items():
            self.add_module(f"chunk{number}", module)

    def _found(self, mine: Sequence[int]) -> Mapping[int, nn.Module]:
        modules, parts = self.stages.modules, len(self.schedule.placement)
        if isinstance(modules, Mapping):
            return modules
        if not isinstance(modules, Sequence | nn.ModuleList):
            return modules(mine)
        if len(modules) != parts:
            rule = f"must be {parts}: {self.schedule.name} over mesh.pp={self.place.stages} stages has so many parts"
            raise ConfigError("stages.modules", len(modules), rule)
        check_shared(modules, self.schedule.placement, self.stages.tied)
        return dict(enumerate(modules))

    def engine(
        self,
        registered: Registered,
        *,
        policy: Policy | None = None,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        batches: Batches | None = None,
        buffers: Mode = "mean",
    ) -> PipelineEngine:
        stages, place = self.stages, self.place
        self._engine = PipelineEngine(
            PipelineParts(
                modules=self.chunks,
                schedule=self.schedule,
                loss=stages.loss,
                example=(stages.example[0].to(place.device), stages.example[1].to(place.device)),
                boundary=stages.boundary.to(place.device),
                registered=registered,
                stage=place.stage,
                group=place.group,
                channels=place.channels,
                record=place.record,
                bucket_bytes=stages.bucket_bytes,
                tied=stages.tied,
                graphs=stages.graphs,
                profile=stages.profile,
                batches=batches,
                policy=policy or Policy(),
                replica=replica,
                replicas=replicas,
                seed=seed,
                mesh=place.mesh,
                layouts=stages.layouts,
                names=stages.names,
                adaptation=stages.adapt,
                autocast=self._autocast,
                device=place.device,
            )
        )
        return self._engine

    def train_batch(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any, weight: float | torch.Tensor | None = None
    ) -> float:
        if weight is not None:
            raise MisuseError("weight= is for a compiled model with an example; the loss of helixrt.Stages is a mean")
        if named or not all(isinstance(each, torch.Tensor) for each in (*inputs, target)) or len(inputs) != 1:
            raise MisuseError("helixrt.Stages take one input and a target, both tensors: step.train(model, x, target=y)")
        assert self._engine is not None
        return self._engine.train(inputs[0], target)

    def evaluate(self, inputs: torch.Tensor, *, target: torch.Tensor) -> float:
        """The mean loss of a batch, on every stage: for the function that `session.evaluate` was given, which runs on all ranks
        of a replica together. Inputs are read on the first stage, targets on the last one."""
        if self._engine is None:
            raise MisuseError("register the model before it is evaluated")
        return self._engine.measure(inputs, target)
