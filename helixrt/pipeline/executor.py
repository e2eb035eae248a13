"""Works through one stage's program, in order.

In: a program (one stage's part of a schedule); the step's micro-batches. Out: the losses of the last chunk,
gradients in the buckets, an OPERATION event per operation. It decides nothing: another order is another
schedule, passed in at a step boundary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import Channel, Lane, RecvHandle, SendHandle, Tag
from helixrt.pipeline.program import Action, Program, Transfer
from helixrt.pipeline.stage import Stage, Task
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.ir import Op

POSTED_AHEAD = 4  # messages a stage expects before it needs them; each costs one boundary tensor


class Executor:
    """Runs programs of one stage.

    `stage` computes; `channels` lead to other stages; `boundary` has the shape and dtype of what goes between chunks
    (one micro-batch's hidden states; contents do not matter): one tensor for all, or one for each two neighbours in order.
    """

    def __init__(
        self,
        stage: Stage,
        channels: Mapping[int, Channel],
        boundary: torch.Tensor | Sequence[torch.Tensor],
        record: FlightRecord,
    ) -> None:
        self.stage, self.channels, self.boundary, self.record = stage, channels, boundary, record

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor | None],
        targets: Sequence[torch.Tensor | None],
        buckets: GradientBuckets | None,
        *,
        generation: int,
        step: int,
        factor: float | None = None,
    ) -> list[torch.Tensor]:
        """One pass. `inputs` are needed where the first chunk is, `targets` where the last one is, by micro-batch; None where
        the stage has them already.

        Returns the last chunk's losses in the order of micro-batches (elsewhere an empty list). Backward
        adds the gradient of their sum times `factor`, by default of their mean, to `buckets` (which has begun; None for a
        forward-only schedule).
        """
        for channel in self.channels.values():
            channel.settle()  # what the last pass left: its receivers have gone on to this one, or are about to
        self.stage.reset()
        factor = 1.0 / program.schedule.microbatches if factor is None else factor
        losses: dict[int, torch.Tensor] = {}
        local: dict[Transfer, torch.Tensor] = {}
        sent: dict[Transfer, SendHandle] = {}
        posted: dict[Transfer, RecvHandle] = {}
        remote = deque(
            (a.takes, a.source)
            for a in program.actions
            if a.takes is not None and a.source is not None and a.source != program.stage
        )

        def tag(transfer: Transfer) -> Tag:
            return Tag(generation, step, transfer.chunk, transfer.microbatch, transfer.lane)

        def expect() -> None:
            while remote and len(posted) < POSTED_AHEAD:
                transfer, source = remote.popleft()
                posted[transfer] = self.channels[source].recv(tag(transfer), self.like(transfer))

        def incoming(action: Action) -> torch.Tensor | None:
            if action.takes is None:
                return None
            if action.source == program.stage:
                return local.pop(action.takes)
            tensor = posted.pop(action.takes).wait()
            for done in action.proves:
                sent.pop(done).wait()  # returns at once
            expect()
            return tensor

        def task(action: Action) -> Task:
            op, microbatch, given = action.op, action.microbatch, incoming(action)
            if op is Op.F:
                target = targets[microbatch] if action.gives is None else None
                return Task(op, action.chunk, microbatch, inputs[microbatch] if given is None else given, target)
            if given is None and op is not Op.W:
                given = losses[microbatch].new_full((), factor)
            return Task(op, action.chunk, microbatch, given)

        def hand_on(action: Action, tensor: torch.Tensor | None) -> None:
            if action.gives is None:
                return
            assert tensor is not None and action.target is not None
            tensor = tensor.contiguous()  # also for a chunk on this stage: all get what a message would bring
            if action.target == program.stage:
                local[action.gives] = tensor
            else:
                sent[action.gives] = self.channels[action.target].send(tag(action.gives), tensor)

        expect()
        with torch.set_grad_enabled(buckets is not None):
            for entry in program.entries:
                tasks = [task(action) for action in entry]
                ending = [action.chunk for action in entry if action.last]
                begin_s = self.record.clock()
                for chunk in ending:
                    assert buckets is not None
                    buckets.last_backward(chunk)
                results = self.stage.compute(tasks, buckets)
                for action, result in zip(entry, results, strict=True):
                    if action.op is Op.F and action.gives is None:
                        assert result is not None
                        losses[action.microbatch] = result
                    hand_on(action, result)
                for chunk in ending:
                    assert buckets is not None
                    buckets.finish(chunk)
                self._note(entry, begin_s)
        return [losses[m] for m in sorted(losses)]

    def like(self, transfer: Transfer) -> torch.Tensor:
        """A tensor of the shape and dtype of what is transferred."""
        if isinstance(self.boundary, torch.Tensor):
            return self.boundary
        return self.boundary[transfer.chunk - 1 if transfer.lane is Lane.F else transfer.chunk]

    def _note(self, entry: Sequence[Action], begin_s: float) -> None:
        woven = {"woven": True} if len(entry) > 1 else {}
        for action in entry:
            op, chunk, microbatch = action.op.value, action.chunk, action.microbatch
            self.record.write(Kind.OPERATION, begin_s=begin_s, op=op, chunk=chunk, microbatch=microbatch, **woven)
