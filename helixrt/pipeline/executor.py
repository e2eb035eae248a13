"""Works through one stage's list of a schedule, in order.

In: a schedule, turned once into this stage's program; the step's micro-batches. Out: the losses of the
last chunk, gradients in the buckets, an OPERATION event per operation. It decides nothing: another order
is another schedule, passed in at a step boundary.

Until backward is split into two graphs, B and W of a micro-batch run as one: W must stand right after B.
A pair runs its forward, then its backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import Channel, Lane, RecvHandle, SendHandle, Tag
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.check import check
from helixrt.schedule.ir import Op, Operation, Schedule, ScheduleError

LANES = {Op.F: Lane.F, Op.B: Lane.B}
POSTED_AHEAD = 4  # messages a stage expects before it needs them; each costs one boundary tensor


@dataclass(frozen=True)
class Action:
    """One operation as this stage runs it. B stands for B and W.

    `source` and `target` are the stages at the other ends, None at the ends of the model (no tensor
    comes or goes). `last` marks the last backward of its chunk. When this operation's input is there,
    `source` must have taken in what the actions `proves` (indices into the program) sent to it.
    """

    op: Op
    chunk: int
    microbatch: int
    source: int | None
    target: int | None
    last: bool
    proves: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """What one stage does in one step."""

    schedule: Schedule
    stage: int
    actions: tuple[Action, ...]


def compile_program(schedule: Schedule, stage: int) -> Program:
    """This stage's part of a schedule. Raises ScheduleError for one that is not valid, or has a W apart from its B."""
    check(schedule)
    operations = [o for o in schedule.operations(stage)]
    actions: list[Action] = []
    last_backward = {o.chunk: o for o in operations if o.op is Op.B}
    arrivals = {peer: _Arrivals(schedule, stage, peer) for peer in range(schedule.stages) if peer != stage}
    unproven: dict[Operation, int] = {}
    for at, operation in enumerate(operations):
        op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
        if op is Op.W:
            continue
        if op is Op.B and operations[at + 1 : at + 2] != [Operation(Op.W, chunk, microbatch)]:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage}: W of {operation} must stand right after it, "
                "as long as backward is not split"
            )
        below = schedule.placement[chunk - 1] if chunk else None
        above = schedule.placement[chunk + 1] if chunk + 1 < schedule.chunks else None
        source, target = (below, above) if op is Op.F else (above, below)
        last = operation == last_backward.get(chunk)
        proves: list[int] = []
        if source is not None and source != stage:
            proves = [unproven.pop(o) for o in arrivals[source].until(_producer(operation))]
        if target is not None and target != stage:
            unproven[operation] = len(actions)
        actions.append(Action(op, chunk, microbatch, source, target, last, tuple(proves)))
    return Program(schedule, stage, tuple(actions))


def _producer(operation: Operation) -> Operation:
    """The operation whose output comes to this one from another chunk."""
    return replace(operation, chunk=operation.chunk + (-1 if operation.op is Op.F else 1))


class _Arrivals:
    """What a peer is known to have taken in from a stage, as it works through its list."""

    def __init__(self, schedule: Schedule, stage: int, peer: int) -> None:
        self._operations = list(schedule.operations(peer))
        self._position = {operation: at for at, operation in enumerate(self._operations)}
        self._reached = 0
        self._from_stage = {
            Operation(op, chunk, m)
            for chunk, home in enumerate(schedule.placement)
            if home == stage
            for op in (Op.F, Op.B)
            for m in range(schedule.microbatches)
        }

    def until(self, done: Operation) -> list[Operation]:
        """The stage's operations whose outputs the peer took in up to `done`, that were not told before."""
        new = self._operations[self._reached : self._position[done] + 1]
        self._reached = max(self._reached, self._position[done] + 1)
        producers = [_producer(operation) for operation in new if operation.op is not Op.W]
        return [producer for producer in producers if producer in self._from_stage]


class Executor:
    """Runs programs of one stage.

    `chunks` are this stage's, by number; `channels` lead to other stages; `boundary` has the shape and
    dtype of what goes between chunks (one micro-batch's hidden states; contents do not matter).
    """

    def __init__(
        self,
        chunks: Mapping[int, StageChunk],
        channels: Mapping[int, Channel],
        boundary: torch.Tensor,
        record: FlightRecord,
    ) -> None:
        self.chunks, self.channels, self.boundary, self.record = chunks, channels, boundary, record

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        buckets: GradientBuckets | None,
        *,
        generation: int,
        step: int,
    ) -> list[torch.Tensor]:
        """One pass. `inputs` are needed where the first chunk is, `targets` where the last one is, by micro-batch.

        Returns the last chunk's losses in the order of micro-batches (elsewhere an empty list). Backward
        adds the gradient of their mean to `buckets` (which has begun; None for a forward-only schedule).
        """
        for channel in self.channels.values():
            channel.settle()  # what the last pass left: its receivers have gone on to this one, or are about to
        for chunk in self.chunks.values():
            chunk.reset()
        losses: dict[int, torch.Tensor] = {}
        local: dict[tuple[Op, int, int], torch.Tensor] = {}
        sent: dict[int, SendHandle] = {}
        scale = torch.tensor(1.0 / program.schedule.microbatches, dtype=self.boundary.dtype)
        remote = deque(i for i, a in enumerate(program.actions) if a.source is not None and a.source != program.stage)
        posted: dict[int, RecvHandle] = {}

        def expect() -> None:
            while remote and len(posted) < POSTED_AHEAD:
                index = remote.popleft()
                action = program.actions[index]
                assert action.source is not None
                tag = Tag(generation, step, action.chunk, action.microbatch, LANES[action.op])
                posted[index] = self.channels[action.source].recv(tag, self.boundary)

        def incoming(index: int, action: Action) -> torch.Tensor | None:
            if action.source is None:
                return None
            if action.source == program.stage:
                return local.pop((action.op, action.chunk, action.microbatch))
            tensor = posted.pop(index).wait()
            for done in action.proves:
                sent.pop(done).wait()  # returns at once
            expect()
            return tensor

        def hand_on(index: int, action: Action, tensor: torch.Tensor) -> None:
            chunk = action.chunk + (1 if action.op is Op.F else -1)
            if action.target == program.stage:
                local[action.op, chunk, action.microbatch] = tensor
            elif action.target is not None:
                tag = Tag(generation, step, chunk, action.microbatch, LANES[action.op])
                sent[index] = self.channels[action.target].send(tag, tensor.contiguous())

        expect()
        with torch.set_grad_enabled(buckets is not None):
            for index, action in enumerate(program.actions):
                chunk, microbatch = self.chunks[action.chunk], action.microbatch
                tensor = incoming(index, action)
                begin_s = self.record.clock()
                if action.op is Op.F:
                    target = targets[microbatch] if action.target is None else None
                    out = chunk.forward(microbatch, inputs[microbatch] if tensor is None else tensor, target)
                    if action.target is None:
                        losses[microbatch] = out
                    hand_on(index, action, out)
                else:
                    assert buckets is not None
                    if action.last:
                        buckets.last_backward(action.chunk)
                    grad = chunk.backward(microbatch, scale if tensor is None else tensor)
                    if grad is not None:
                        hand_on(index, action, grad)
                    if action.last:
                        buckets.finish(action.chunk)
                self.record.write(
                    Kind.OPERATION, begin_s=begin_s, op=action.op.value, chunk=action.chunk, microbatch=microbatch
                )
        return [losses[m] for m in sorted(losses)]
