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
from helixrt.pipeline.channels import Channel, RecvHandle, SendHandle, Tag
from helixrt.pipeline.program import Action, Program, Transfer
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.ir import Op

POSTED_AHEAD = 4  # messages a stage expects before it needs them; each costs one boundary tensor


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
        local: dict[Transfer, torch.Tensor] = {}
        sent: dict[Transfer, SendHandle] = {}
        posted: dict[Transfer, RecvHandle] = {}
        remote = deque(
            (a.takes, a.source)
            for a in program.actions
            if a.takes is not None and a.source is not None and a.source != program.stage
        )
        scale = torch.tensor(1.0 / program.schedule.microbatches, dtype=self.boundary.dtype)

        def tag(transfer: Transfer) -> Tag:
            return Tag(generation, step, transfer.chunk, transfer.microbatch, transfer.lane)

        def expect() -> None:
            while remote and len(posted) < POSTED_AHEAD:
                transfer, source = remote.popleft()
                posted[transfer] = self.channels[source].recv(tag(transfer), self.boundary)

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

        def hand_on(action: Action, tensor: torch.Tensor | None) -> None:
            if action.gives is None:
                return
            assert tensor is not None and action.target is not None
            if action.target == program.stage:
                local[action.gives] = tensor
            else:
                sent[action.gives] = self.channels[action.target].send(tag(action.gives), tensor.contiguous())

        expect()
        with torch.set_grad_enabled(buckets is not None):
            for action in program.actions:
                chunk, microbatch = self.chunks[action.chunk], action.microbatch
                tensor = incoming(action)
                begin_s = self.record.clock()
                if action.op is Op.F:
                    ends = action.gives is None
                    out = chunk.forward(
                        microbatch, inputs[microbatch] if tensor is None else tensor, targets[microbatch] if ends else None
                    )
                    if ends:
                        losses[microbatch] = out
                    hand_on(action, out)
                else:
                    assert buckets is not None
                    if action.last:
                        buckets.last_backward(action.chunk)
                    hand_on(action, chunk.backward(microbatch, scale if tensor is None else tensor))
                    if action.last:
                        buckets.finish(action.chunk)
                self.record.write(
                    Kind.OPERATION, begin_s=begin_s, op=action.op.value, chunk=action.chunk, microbatch=microbatch
                )
        return [losses[m] for m in sorted(losses)]
