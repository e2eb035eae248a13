"""A stage computed by graphs: F, B and W of each of its chunks, and woven ones for pairs.

In: the joint graphs of the stage's chunks (`JointStage`), or the chunks with an example of what comes in for each, to be
captured (`GraphStage`); later the operations of a schedule. Out: what the
operations make; gradients as autograd leaves them, in buckets too. B and W run where the schedule has them, BW is one
graph, and an overlapped pair is the forward of one chunk woven with the backward of the same or another chunk, made
once for each two chunks that the schedule pairs. DHelix, sections 4.1 and 5 (folded pipelines); zero-bubble schedules
(Qi et al., 2024) for W.

All ranks that share the stage's layers (tensor parallelism and the like) come here at the same time: graphs that
communicate are planned by measuring, and compared before any runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from helixrt.errors import ConfigError
from helixrt.passes.autocast import autocast_to
from helixrt.passes.capture import capture, watched
from helixrt.passes.early import early
from helixrt.passes.executable import Executable
from helixrt.passes.flat import Memory, lying_in
from helixrt.passes.guards_private import Guards
from helixrt.passes.lift import Cast, lift
from helixrt.passes.pair import Rules
from helixrt.passes.parts import Layout, Part, Port, Role
from helixrt.passes.pieces import Piece
from helixrt.passes.profile import Mode
from helixrt.passes.split import split, whole_backward
from helixrt.passes.weave import weave
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.gradients import BucketGradients
from helixrt.pipeline.held import Strand, Values, lasting_of, parameters_of, run_held
from helixrt.pipeline.program import Program
from helixrt.pipeline.stage import AutogradStage, Stage, StageChunk, Task
from helixrt.pipeline.strands import Plan, agree_among_ranks, group_names, planned
from helixrt.schedule.ir import Op

NAMED = frozenset({Role.PARAMETER, Role.CAST, Role.BUFFER, Role.GRADIENT})

Key = tuple[int, Op, int]  # of a woven graph: the forward's chunk, the backward's operation and chunk


@dataclass(frozen=True)
class Example:
    """A micro-batch as it comes into a chunk: shapes and dtypes count, contents do not. `target` for the last chunk."""

    x: torch.Tensor
    target: torch.Tensor | None = None


class ChunkGraphs:
    """The graphs of one captured chunk by operation, made when they are first asked for. Raises VerifyError.

    `output` names the chunk's output.
    """

    def __init__(self, joint: Part) -> None:
        self.halves = split(joint)
        self._parts = {Op.F: self.halves.forward}
        self._wanted: dict[Op, Collection[Port]] = {}
        (self.output,) = (port.name for port in joint.outputs if port.role is Role.OUTPUT)
        behind_b = frozenset(self.halves.weight.inputs)
        self._later = {Op.F: behind_b | frozenset(self.halves.backward.inputs), Op.B: behind_b}

    def part(self, op: Op) -> Part:
        if op not in self._parts:
            made = {Op.B: self.halves.backward, Op.W: self.halves.weight}
            self._parts[op] = early(made[op] if op in made else whole_backward(self.halves))
        return self._parts[op]

    def later(self, op: Op) -> Collection[Port]:
        """What graphs that follow on `op` in a micro-batch take in, too."""
        return self._later.get(op, ())

    def wanted(self, op: Op) -> Collection[Port]:
        """What `op` or graphs that follow on it take in."""
        if op not in self._wanted:
            self._wanted[op] = frozenset((*self.part(op).inputs, *self.later(op)))
        return self._wanted[op]

    def released(self, op: Op) -> Mapping[str, Memory]:
        """Where the inputs of a backward are stored; 0 bytes for those that W needs, which the backward does not free."""
        lies = lying_in(self.halves.forward)
        for_weight = self.halves.forward_to_weight if op is Op.B else ()
        kept = {lies[port.name].owner for port in for_weight}
        return {name: replace(memory, size_bytes=0) if memory.owner in kept else memory for name, memory in lies.items()}


def renamed(part: Part, prefix: str) -> Part:
    """The part with `prefix` before the names of parameters and buffers: those of several chunks may have equal names."""

    def new(port: Port) -> Port:
        return replace(port, name=prefix + port.name) if port.role in NAMED else port

    layouts = {prefix + name: layout for name, layout in part.layouts.items()}
    return replace(part, inputs=tuple(map(new, part.inputs)), outputs=tuple(map(new, part.outputs)), layouts=layouts)


class JointStage(Stage):
    """Runs F, B, W and BW, and pairs of an F with a B or BW; not forwards without a backward.

    `joints` are the joint graphs of this stage's chunks by number, `lasting` the parameters and buffers that they take in.
    `mode` and `rules` are for pairing strands that communicate; `group` is the process group of all ranks that share the
    stage's layers, needed where these communicate in several groups (tensor and expert parallelism). `pieces`: of parameters of
    which this rank has a part, by name, where their gradients come whole.
    """

    has_shapes = True

    def __init__(
        self,
        joints: Mapping[int, Part],
        lasting: Values,
        *,
        mode: Mode | str = Mode.AUTO,
        rules: Rules | None = None,
        group: Any = None,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.mode, self.rules, self.group = mode, rules, group
        self.pieces = pieces or {}
        self.graphs = {number: ChunkGraphs(joint) for number, joint in joints.items()}
        self.lasting, self.parameters = lasting, parameters_of(lasting)
        self.layouts: dict[str, Layout] = {}
        for joint in joints.values():
            self.layouts |= joint.layouts
        self.single: dict[tuple[int, Op], Executable] = {}  # by chunk
        self.woven: dict[Key, Executable] = {}
        self.plans: dict[Key, Plan] = {}  # of the woven ones
        self._held: dict[tuple[int, int], Values] = {}  # by chunk and micro-batch

    def prepare(self, program: Program) -> None:
        """Make the graphs that the program needs and that are not there yet; call it before the program runs.

        Raises VerifyError, DisagreementError when ranks would launch different collectives, ConfigError where `group` is
        needed.
        """
        self._prepare_singles({(action.chunk, action.op) for action in program.actions})
        pairs = {(e[0].chunk, e[1].op, e[1].chunk) for e in program.entries if len(e) == 2} - self.woven.keys()
        woven = {}
        for ahead, op, behind in sorted(pairs):
            forward, backward = self.graphs[ahead].part(Op.F), self.graphs[behind].part(op)
            saved, group = self.graphs[behind].released(op), self.planning_group(forward, backward)
            plan = planned(forward, backward, self.mode, self.rules, saved=saved, group=group)
            self.plans[ahead, op, behind] = plan
            woven[ahead, op, behind] = weave(forward, backward, plan.order)
        agree_among_ranks(list(woven.values()))
        self.woven |= {key: Executable(part) for key, part in woven.items()}

    def prepare_all(self) -> None:
        """Make the graphs of all single operations, so that programs without pairs need no others. Raises as `prepare`."""
        self._prepare_singles({(chunk, op) for chunk in self.graphs for op in (Op.F, Op.B, Op.W, Op.BW)})

    def _prepare_singles(self, wanted: Collection[tuple[int, Op]]) -> None:
        parts = {(chunk, op): self.graphs[chunk].part(op) for chunk, op in sorted(set(wanted) - self.single.keys())}
        agree_among_ranks(list(parts.values()))  # planning runs the collectives, and would hang as training would
        self.single |= {key: Executable(part) for key, part in parts.items()}

    def planning_group(self, *parts: Part) -> Any:
        """The ranks that make the same plan of a pair; None for those of the only group. Raises ConfigError if it is not given.

        Never all ranks of the job: other stages have other graphs.
        """
        names = group_names(parts)
        if self.group is None and len(names) > 1:
            rule = f"must be given: the process group of the ranks that share the stage, who communicate in {len(names)} groups"
            raise ConfigError("group", None, f"{rule} ({', '.join(names)})")
        return self.group

    def reset(self) -> None:
        self._held.clear()

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        assert buckets is not None, "these graphs have a backward"
        if len(tasks) == 1:
            graph = self.single[tasks[0].chunk, tasks[0].op]
        else:
            forward, backward = tasks
            graph = self.woven[forward.chunk, backward.op, backward.chunk]
        strands = [self._strand(task) for task in tasks]
        outputs = [self.graphs[task.chunk].output for task in tasks]
        tasks.clear()
        gradients = BucketGradients(self.parameters, self.layouts, buckets, self.pieces)
        results = run_held(graph, strands, self.lasting, gradients)
        return [made(output, result) for output, result in zip(outputs, results, strict=True)]

    def _strand(self, task: Task) -> Strand:
        """What the task's micro-batch holds, with what is given now."""
        graphs, place = self.graphs[task.chunk], (task.chunk, task.microbatch)
        later = graphs.later(task.op)
        if task.op is Op.F:
            held = self._held[place] = {}
            given = self.given(task)
        else:
            held = self._held[place] if task.op is Op.B else self._held.pop(place)
            given = {Port(Role.TANGENT, graphs.output): task.given}
        wanted = graphs.wanted(task.op)
        held |= {port: value for port, value in given.items() if value is not None and port in wanted}
        return Strand(held, later)

    def given(self, task: Task) -> Mapping[Port, torch.Tensor | None]:
        """What comes into a forward, by port; what the graphs do not take in may be among it."""
        return {Port(Role.INPUT, "0"): task.given, Port(Role.TARGET, "target"): task.target}


class GraphStage(JointStage):
    """As `JointStage`, of modules that it captures.

    `chunks` are this stage's by number, in the training mode that their graphs are to have; `examples` are of what
    comes in for each. A forward without a backward is the module's own. Raises CaptureError for a chunk that cannot be
    captured. With `autocast` they are captured under autocast to this type, and each weight is cast once per pass. `guards`:
    the Python values that they were captured with.
    """

    def __init__(
        self,
        chunks: Mapping[int, StageChunk],
        examples: Mapping[int, Example],
        *,
        mode: Mode | str = Mode.AUTO,
        rules: Rules | None = None,
        group: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        joints: dict[int, Part] = {}
        lasting: Values = {}
        casts: list[Cast] = []
        self.guards: dict[int, Guards | None] = {}
        for number, chunk in chunks.items():
            prefix = f"{number}."
            example = examples[number]
            x = example.x.detach().requires_grad_(number > 0)
            with autocast_to(autocast, x.device):
                joint = capture(chunk.module, (x,), loss=chunk.loss, target=example.target)
            self.guards[number] = watched(joint, chunk.module, chunk.loss, modes=False)
            lifted = lift(renamed(joint, prefix))
            joints[number] = lifted.part
            casts += lifted.casts
            lasting |= lasting_of(chunk.module, chunk.loss, prefix)
        super().__init__(joints, lasting, mode=mode, rules=rules, group=group)
        self.casts = Casts(lasting, casts)
        self.eager = AutogradStage(chunks)

    def reset(self) -> None:
        super().reset()
        self.eager.reset()
        self.casts.forget()
        self.casts.refresh()

    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        return self.eager.compute(tasks, None) if buckets is None else super().compute(tasks, buckets)


def made(output: str, result: Values) -> torch.Tensor | None:
    """What an operation makes for the neighbouring chunk, of what its graph gave."""
    value = result.get(Port(Role.OUTPUT, output))
    if value is not None and value.dim() == 0:
        return value.clone()  # as a view a loss would hold what it lies in
    return result.get(Port(Role.INPUT_GRADIENT, "0"), value)
