"""How long F, B, W and BW of a chunk take on this device, run as a stage of a pipeline runs them.

In: a chunk of a cut model. Out: times of its operations, for `ChunkTimes.of`. The chunk's graphs run as they do in a step, on
example values: what F saves is what B and W take in, casts of parameters are made once, and gradients are added to buckets. A
low quantile of several runs counts; of one processor thread that is its own time, without what other programs take of the core.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from helixrt.passes.cut_model import BOUNDARY, ModelChunk
from helixrt.passes.example_values import DEVIATION, Pool
from helixrt.passes.lift import lift
from helixrt.passes.measure import Stopwatch
from helixrt.passes.parts import Port, Role
from helixrt.passes.pieces import Piece
from helixrt.passes.ranks import Ranks
from helixrt.passes.seeding import SEED, seed_of
from helixrt.passes.verify import returned
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.casts import Casts
from helixrt.pipeline.graph_stage import JointStage
from helixrt.pipeline.held import Values, parameters_of
from helixrt.pipeline.program import compile_program
from helixrt.pipeline.stage import Task
from helixrt.schedule.generators.classic import one_f_one_b
from helixrt.schedule.generators.zero_bubble import zb_h1
from helixrt.schedule.ir import Op

BUCKET_BYTES = 16 << 20
WARM_UP = 1  # rounds that do not count


class ChunkTimer:
    """Runs a chunk. Its graphs are made once; parameters lie in the pool, and there is memory for gradients only within `run`.

    Raises VerifyError, ValueError for a chunk that takes in what no example can be made of.
    """

    def __init__(self, chunk: ModelChunk, pool: Pool) -> None:
        self._chunk, self._values = chunk, pool.values(chunk.part)
        if SEED in self._values:
            self._values[SEED] = seed_of(0)
        for port, node in zip(chunk.part.outputs, returned(chunk.part), strict=True):
            if port.role is Role.BUFFER and port not in self._values:  # set and not read
                made = node.meta["val"]
                self._values[port] = torch.empty(made.shape, dtype=made.dtype, device=made.device)
        self._stage = _ExampleStage(chunk, self._values)
        for schedule in (one_f_one_b(1, 1), zb_h1(1, 1)):
            self._stage.prepare(compile_program(schedule, 0))
        devices = [value.device for port, value in self._values.items() if port.role is Role.PARAMETER]
        self._watch = Stopwatch(devices[0] if devices else torch.device("cpu"), Ranks())

    def run(self, rounds: int) -> dict[Op, list[float]]:
        """Microseconds of each operation, `rounds` times: F, B, W, then F again and BW."""
        parameters = self._stage.renew(self._chunk.gradients)
        buckets = GradientBuckets({0: nn.ParameterList(parameters)}, BUCKET_BYTES)
        buckets.begin(lambda bucket: None)
        found: dict[Op, list[float]] = {op: [] for op in (Op.F, Op.B, Op.W, Op.BW)}
        for number in range(WARM_UP + rounds):
            for operations in ((Op.F, Op.B, Op.W), (Op.F, Op.BW)):
                for op in operations:
                    taken_us = self._time(op, buckets)
                    if number >= WARM_UP:
                        found[op].append(taken_us)
            self._stage.reset()
        buckets.close()
        self._stage.renew(())  # nothing holds the buckets any more
        return found

    def _time(self, op: Op, buckets: GradientBuckets) -> float:
        tasks = [Task(op, 0, 0, self._given(op))]
        return self._watch.work_us(lambda: self._stage.compute(tasks, buckets))

    def _given(self, op: Op) -> torch.Tensor | None:
        """The gradient that comes into a backward; what comes into F is the stage's own."""
        if op in (Op.F, Op.W):
            return None
        after = self._chunk.after
        if after is not None:
            return torch.full(after.shape, DEVIATION, dtype=after.dtype, device=after.device)
        nodes = self._chunk.part.graph.find_nodes(op="placeholder")
        (loss,) = (n for p, n in zip(self._chunk.part.inputs, nodes, strict=True) if p.role is Role.TANGENT)
        value = loss.meta["val"]
        return torch.ones(value.shape, dtype=value.dtype, device=self._watch.device)


def _pieces(chunk: ModelChunk) -> dict[str, Piece]:
    """A part of each gradient that comes whole where this rank has a part of the parameter (tensor parallelism)."""
    found = {}
    given = zip(chunk.part.inputs, chunk.part.graph.find_nodes(op="placeholder"), strict=True)
    shapes = {port.name: node.meta["val"].shape for port, node in given if port.role is Role.PARAMETER}
    for port, node in zip(chunk.part.outputs, returned(chunk.part), strict=True):
        if port.role is Role.GRADIENT and node.meta["val"].shape != shapes[port.name]:
            pairs = zip(shapes[port.name], node.meta["val"].shape, strict=True)
            dim = next(at for at, (own, whole) in enumerate(pairs) if own != whole)
            found[port.name] = Piece(dim, ((0, shapes[port.name][dim]),))
    return found


class _ExampleStage(JointStage):
    """One chunk, whose inputs are always the same ones."""

    def __init__(self, chunk: ModelChunk, values: Mapping[Port, torch.Tensor]) -> None:
        lifted = lift(replace(chunk.part, layouts={}))
        self._values, self._casts = values, lifted.casts
        super().__init__({0: lifted.part}, {}, pieces=_pieces(chunk))

    def renew(self, trained: Collection[str]) -> list[nn.Parameter]:
        """New parameters on the same memory, without gradients and hooks, and casts of them; those `trained` are returned."""
        lasting: Values = {port: value for port, value in self._values.items() if port.role is Role.BUFFER}
        for port, value in self._values.items():
            if port.role is Role.PARAMETER:
                lasting[port] = nn.Parameter(value, requires_grad=port.name in trained)
        self.lasting, self.parameters = lasting, parameters_of(lasting)
        Casts(lasting, self._casts).refresh()
        return [self.parameters[name] for name in trained]

    def given(self, task: Task) -> Mapping[Port, torch.Tensor | None]:
        found = {port: value for port, value in self._values.items() if port.role in (Role.INPUT, Role.TARGET)}
        if (boundary := Port(Role.INPUT, BOUNDARY)) in found and found[boundary].is_floating_point():
            found[boundary] = found[boundary].clone()  # as a message: freed with its last use
        return found
