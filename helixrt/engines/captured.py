"""An unmodified model over pipeline stages: captured whole on fake tensors, cut, and this rank's part of it made real.

In: a model with a `train_step` (`helixrt.compile`), on the meta device or real; an `ExampleBatch`; the stage. Out: a
`CapturedModel`, a module with the parameters of this stage under the model's own names; `Session.register` makes a
`CapturedEngine` of it. Every rank captures the whole model, which takes no memory for tensors, and all compare what they cut.
With tp ranks a plan cuts the model before (`captured_tensor`), so that a rank captures its parts of all layers. With cp ranks
its attention is replaced by one that communicates (`captured_context`), and a rank captures it for its part of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helixrt.compile.materialize import Tensors, materialize, persistent_names, places
from helixrt.compile.microbatches import Batch
from helixrt.compile.train_step import TrainStep
from helixrt.compile.watch import Watch
from helixrt.compile.whole_model import Times, WholeModel, shapes_of
from helixrt.engines.buffers import Mode, is_statistic, modes_of
from helixrt.engines.captured_context import IGNORED, ContextCut, has_ignored
from helixrt.engines.captured_engine import CAPTURE_S, Busy, CapturedEngine, CapturedParts
from helixrt.engines.captured_tensor import (
    GradientForms,
    agreed_starts,
    check_optimizers,
    cut_over_tp,
    gradient_forms,
    without_values,
)
from helixrt.engines.example_batch import ExampleBatch
from helixrt.engines.first_order import pipeline_schedule, planned_by
from helixrt.engines.pipeline_parts import Batches
from helixrt.engines.pipelined import PipelinedModel
from helixrt.engines.registered import Registered, check_renormalized
from helixrt.engines.staged import StagePlace
from helixrt.engines.tensor_plan import TensorPlan
from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, MisuseError
from helixrt.parallel.group import Group
from helixrt.passes.agree import agree_on
from helixrt.passes.aot_private import location_of
from helixrt.passes.cut_model import CutModel, ModelChunk
from helixrt.passes.errors import CaptureError
from helixrt.passes.own_values import Axis
from helixrt.passes.paddings import padded_alike
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.profile import Mode as Profile
from helixrt.pipeline.held import Values
from helixrt.schedule.ir import Schedule


class CapturedModel(PipelinedModel):
    """This rank's part of a model. Made by `session.parallelize(helixrt.compile(model, ...), example=...)`.

    `state_dict` has the model's own names, of this stage. `seed` is that of initial weights of a model on meta, `weights` the
    safetensors that they are read from instead. Chunks are balanced by the `times` of their layers, which must be the same on
    all ranks, where they give any and the options do not say `profile="estimate"`; else by estimates. Where there are such
    times, and the schedule's policy plans by costs, the first order is planned from them, too. `tp_plan`, else the model's own
    plan, else that of helixrt, cuts it over the tp ranks of the mesh; a rank's parameters are its parts, plain tensors. Over cp
    ranks a batch is cut along the sequence, and `position_ids` are made. Forward and loss run under the autocast that the
    options of `helixrt.compile` name, else `autocast`, else the one that is active now. Raises ConfigError for options and
    examples that do not fit, CaptureError for a model that cannot be captured or cut, MisuseError for one that the plan does
    not fit, DisagreementError when the ranks of the replica cut it differently.
    """

    _compiled: nn.Module  # what was captured

    def __init__(
        self,
        step: TrainStep,
        example: ExampleBatch,
        place: StagePlace,
        *,
        seed: int = 0,
        weights: str | Path | None = None,
        times: Times | None = None,
        tp_plan: TensorPlan | None = None,
        autocast: torch.dtype | None = None,
        busy: Busy = lambda doing, limit_s: nullcontext(),
    ) -> None:
        super().__init__()
        options = step.options
        self.place, self._options, self._busy = place, options, busy
        self._schedule = pipeline_schedule(options, place.stages)
        if not any(module.training for module in step.model.modules()):
            raise MisuseError(
                "the model is in evaluation mode, in which its graphs would be captured for training: call model.train() "
                "before session.parallelize (transformers' from_pretrained gives models in evaluation mode)"
            )
        model = step.model
        for name, part in model.named_modules():
            check_renormalized(part, name)
        cp = Group.of(place.mesh.group("cp"))
        self._context = None if cp is None else ContextCut(model, cp, options)
        self._example = self._cut_batch(*shapes_of((example.inputs, dict(example.named), example.target)))
        object.__setattr__(self, "_compiled", model)  # no submodule of this one: its state is that of this rank's part
        self._autocast = options.autocast or autocast or _active_autocast(place.device)
        with busy("captures the model", CAPTURE_S):
            over = self._over = cut_over_tp(model, place.mesh, tp_plan) if place.mesh.size("tp") > 1 else None
            captured, call = model if over is None else over.model, self._example.calls[0]
            if self._context is not None:
                captured = without_values(model) if over is None else captured
                self._context.apply(captured)
            measured = None if options.profile == Profile.ESTIMATE else times
            limit = options.memory_gb * (1 << 30) or math.inf
            self._whole = WholeModel(
                captured,
                options.loss,
                call,
                place.device,
                watched=model,
                autocast=self._autocast,
                times=measured,
                agreed=self._agreed,
                limit_bytes=limit,
                axes=self._axes(),
                alike=self._alike,
            )
            self._cut = self._whole.cut(self._schedule, options.cuts)
            if self._context is not None:
                self._context.check(self._cut)
            self._agree(self._cut)
            self.planned = planned_by(self._whole.chunk_times, options, self._schedule)
            if self.planned is not None:
                self._schedule = self.planned.schedule
            self._forms = GradientForms() if over is None else gradient_forms(self._cut, over)
            mine = _names_of(place.stage, self._cut, self._schedule, model, options.loss)
            pieces = {} if over is None else over.pieces
            tensors = materialize(
                model, mine, loss=options.loss, seed=seed, device=place.device, weights=weights, pieces=pieces
            )
        self._trained = _freeze_others(self._cut, tensors, place)
        self._tensors = tensors
        fill(self, tensors, mine)
        self._watch = Watch({"": model, "loss": options.loss}, self.modules())

    @property
    def first_order(self) -> Schedule:
        """The order by which the pipeline begins."""
        return self._schedule

    @property
    def captured_modules(self) -> Iterable[nn.Module]:
        """Of the model that was captured."""
        return self._compiled.modules()

    @property
    def cut(self) -> CutModel:
        """The whole model's."""
        return self._cut

    def _axes(self) -> list[Axis]:
        """Over which the ranks of this stage share the model or its batches."""
        mesh, found = self.place.mesh, list[Axis]()
        if (tp := Group.of(mesh.group("tp"))) is not None and self._over is not None:
            found.append(Axis(tp.name, tp.rank, tp.size, self._over.has_part))
        if (cp := Group.of(mesh.group("cp"))) is not None:
            found.append(Axis(cp.name, cp.rank, cp.size, lambda port: port.role in (Role.INPUT, Role.TARGET)))
        return found

    def _alike(self, joint: Part) -> Part:
        """With the operators that the other tp ranks have."""
        group = self.place.mesh.group("tp")
        return joint if group is None else padded_alike(joint, group)

    def _agreed(self, starts: Sequence[int]) -> Sequence[int]:
        mesh = self.place.mesh
        return starts if mesh.size("cp", "tp") == 1 else agreed_starts(mesh, starts, CAPTURE_S)

    def _agree(self, cut: CutModel) -> None:
        if self.place.group is not None:
            agree_on(cut.lines, self.place.group, what="line", otherwise="cut the model differently")

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
    ) -> CapturedEngine:
        assert batches is None, "a user's loop gives the batches"
        if self.place.mesh.size("tp") > 1:
            check_optimizers(registered)
        trained = {id(self._tensors.parameters[name]) for name in self._trained}
        for name, parameter in self._tensors.parameters.items():
            if parameter.requires_grad != (id(parameter) in trained):
                what = "made trainable" if parameter.requires_grad else "frozen"
                raise MisuseError(
                    f"{name} was {what} after session.parallelize, which has captured the model's gradients: do so before it"
                )
        everywhere = places(self._compiled, self._options.loss)
        modes_of(registered.buffers, [name for name, place in everywhere.items() if not place.is_parameter])
        mine = self._mine(self._cut)
        self._engine = engine = CapturedEngine(
            CapturedParts(
                cut=self._cut,
                example=self._example,
                holders=self._holders(mine),
                lasting=_lasting(mine, self._tensors),
                cut_for=self._cut_for,
                schedule=self._schedule,
                registered=registered,
                stage=self.place.stage,
                group=self.place.group,
                channels=self.place.channels,
                record=self.place.record,
                profile=self._options.profile,
                policy=policy or Policy(),
                replica=replica,
                replicas=replicas,
                seed=seed,
                buffers=buffers,
                statistics=[name for name, place in everywhere.items() if is_statistic(place.owner, place.key)],
                shapes=self._options.shapes,
                where=location_of(self._compiled),
                copied=self._whole.model is not self._compiled,
                busy=self._busy,
                mesh=self.place.mesh,
                forms=self._forms,
                adaptation=self._options.adapt,
                device=self.place.device,
            )
        )
        return engine

    def _holders(self, mine: Sequence[ModelChunk]) -> dict[int, nn.Module]:
        """Modules with the parameters of each chunk; those of none are in the first one, too."""
        own = self._tensors.parameters
        names = {chunk.number: [name for name in chunk.parameters if name in own] for chunk in mine}
        used = {name for each in names.values() for name in each}
        names[mine[0].number] += [name for name in own if name not in used]
        holders = {number: nn.Module() for number in names}
        for number, holder in holders.items():
            fill(holder, self._tensors, names[number])
        return holders

    def _cut_for(self, batch: Batch, training: bool) -> CutModel:
        """The model for batches like this one, with the Python values of now. All stages call it together. Raises MisuseError
        where it cannot be captured, or uses other tensors than with the example."""
        what = "in training mode" if training else "in evaluation mode"
        if difference := batch.difference(self._example):
            what += f", with a batch of other shapes than the example's ({difference}),"
        try:
            cut = self._whole.again(self._cut, batch.calls[0], training)
        except CaptureError as error:
            raise MisuseError(f"{what} the model cannot be captured: {error}") from error
        finally:
            self._watch.renew()  # models note things about themselves when they are called, those of transformers do
        self._agree(cut)
        used = {name for chunk in self._mine(cut) for name in (*chunk.parameters, *chunk.buffers)}
        if missing := sorted(used - self._tensors.parameters.keys() - self._tensors.buffers.keys()):
            raise MisuseError(f"{what} stage {self.place.stage} needs {missing[0]}, which it does not have with the example")
        for now, first in zip(cut.chunks, self._cut.chunks, strict=True) if training else ():
            given = {*first.gradients, *first.changed}
            if different := sorted(given ^ {*now.gradients, *now.changed}):
                does = "is not trained or changed" if different[0] in given else "is trained or changed"
                raise MisuseError(f"{what} {different[0]} {does}, other than with the example")
        if training and self._over is not None and gradient_forms(cut, self._over) != self._forms:
            raise MisuseError(f"{what} gradients lie otherwise over the tp ranks than with the example")
        return cut

    def _mine(self, cut: CutModel) -> list[ModelChunk]:
        return [chunk for chunk in cut.chunks if self._schedule.placement[chunk.number] == self.place.stage]

    def train_batch(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any, weight: float | torch.Tensor | None = None
    ) -> float:
        assert isinstance(self._engine, CapturedEngine)
        self._check_same(training=True)
        return self._engine.train_batch(self._batch(inputs, named, target, weight), weight)

    def evaluate(self, *inputs: Any, target: Any = None, weight: float | torch.Tensor | None = None, **named: Any) -> float:
        """The mean loss of a batch in evaluation mode (`model.eval()`), on every stage: for the function that
        `session.evaluate` was given, which runs on all ranks of a replica together. It takes what `step.train` takes, the first
        call with arguments of new shapes captures the model in this mode."""
        if not isinstance(self._engine, CapturedEngine):
            raise MisuseError("register the model before it is evaluated")
        self._check_same(training=False)
        return self._engine.measure_batch(self._batch(inputs, named, target, weight), weight)

    def _check_same(self, training: bool) -> None:
        """Raises MisuseError if a tensor or module of the model is another than at its capture; `training`: also for its
        training mode. (Other values that changed have it captured again.)"""
        if training and self._watch.mode_changed():
            raise MisuseError(
                "the training mode of a module was changed (train() or eval()) after session.parallelize, which has captured "
                "the model in the mode of before: set that again before step.train; model.evaluate(...) needs no eval()"
            )
        if name := self._watch.changed():
            raise MisuseError(
                f"{name} was changed after session.parallelize, which has captured the model with what was before: change it "
                "before that, or give the model what changes as a tensor of the batch"
            )

    def _batch(self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any, weight: Any) -> Batch:
        """Raises MisuseError for a batch unlike the example in more than its shapes, and under another autocast."""
        if (active := _active_autocast(self.place.device)) not in (None, self._autocast):
            rule = f"runs {'without autocast' if self._autocast is None else f'under autocast to {self._autocast}'}"
            remedy = "helixrt.compile(..., autocast=torch.bfloat16) or the session's dtype, must be set before it is captured"
            raise MisuseError(f"autocast to {active} is active around a model that {rule}; {remedy}")
        if self._context is not None and weight is None and has_ignored(target):
            rule = "with mesh.cp above 1 a mean over each rank's positions is not that over all"
            raise MisuseError(f"target has ignored positions ({IGNORED}); {rule}: give sums, and step.train(..., weight=...)")
        try:
            batch = self._cut_batch(inputs, named, target)
        except ConfigError as error:
            raise MisuseError(f"this batch cannot be cut into micro-batches: {error}") from error
        if difference := batch.difference(self._example, shapes=False):
            raise MisuseError(f"this batch is unlike the example that the model was captured with: {difference}")
        return batch

    def _cut_batch(self, inputs: tuple[Any, ...], named: Mapping[str, Any], target: Any) -> Batch:
        """This rank's micro-batches. Raises ConfigError."""
        if self._context is not None:
            named, target = self._context.part_of(inputs, named, target)
            inputs = ()
        return Batch(inputs, named, target, self._options.microbatches, self._options.chunk_dims)


def fill(root: nn.Module, tensors: Tensors, names: Iterable[str]) -> None:
    """Put the tensors of these names into `root`, in submodules as the names say; a tied one under each of its names."""
    wanted = {id(tensor) for name in names if (tensor := _tensor(tensors, name)) is not None}
    for name in (*tensors.parameters, *tensors.buffers):
        tensor = _tensor(tensors, name)
        if id(tensor) not in wanted:
            continue
        *above, key = name.split(".")
        owner = root
        for piece in above:
            if piece not in owner._modules:
                owner.add_module(piece, nn.Module())
            owner = owner.get_submodule(piece)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(key, tensor)
        else:
            owner.register_buffer(key, tensor, persistent=name in tensors.persistent)


def _tensor(tensors: Tensors, name: str) -> torch.Tensor | None:
    return tensors.parameters.get(name, tensors.buffers.get(name))


def _names_of(stage: int, cut: CutModel, schedule: Schedule, model: nn.Module, loss: Any) -> list[str]:
    """The tensors that a stage has, in the model's order: those of its chunks, on the first stage also what no chunk uses and
    the model's state has, so that every name of `state_dict` is on a stage."""
    everywhere = places(model, loss)
    stages: dict[int, set[int]] = {}
    for chunk in cut.chunks:
        for name in (*chunk.parameters, *chunk.buffers, *chunk.changed):
            stages.setdefault(id(everywhere[name].tensor), set()).add(schedule.placement[chunk.number])
    stored = persistent_names(model, loss)
    first: dict[int, str] = {}
    for name, place in everywhere.items():
        homes = stages.get(id(place.tensor), {0} if name in stored else set())
        if stage in homes:
            first.setdefault(id(place.tensor), name)
    return list(first.values())


def _freeze_others(cut: CutModel, tensors: Tensors, place: StagePlace) -> set[str]:
    """Freeze parameters that get no gradient, as a plain loop leaves them; the names of the others that this stage has.

    Raises ConfigError for parameters to train of several types, or none.
    """
    trained = {name for chunk in cut.chunks for name in chunk.gradients}
    same = {id(tensors.parameters[name]) for name in trained if name in tensors.parameters}
    for parameter in tensors.parameters.values():
        if id(parameter) not in same:
            parameter.requires_grad_(False)
    types = sorted({str(tensors.parameters[name].dtype) for name in trained if name in tensors.parameters})
    if len(types) != 1:
        what = f"are of {' and '.join(types)}" if types else "are not there"
        raise ConfigError("model", f"stage {place.stage}", f"its parameters to train {what}; a stage has some, of one type")
    return {name for name in trained if name in tensors.parameters}


def _active_autocast(device: torch.device) -> torch.dtype | None:
    """The type that autocast is active for now. Raises ConfigError for one that needs a gradient scaler."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype = torch.get_autocast_dtype(device.type)
    if dtype is not torch.bfloat16:
        raise ConfigError("autocast", dtype, "must be torch.bfloat16: others need a gradient scaler")
    return dtype


def _lasting(chunks: Iterable[ModelChunk], tensors: Tensors) -> Values:
    found: Values = {}
    for chunk in chunks:
        found |= {Port(Role.PARAMETER, name): tensors.parameters[name] for name in chunk.parameters}
        found |= {Port(Role.BUFFER, name): tensors.buffers[name] for name in (*chunk.buffers, *chunk.changed)}
    return found
