"""Works through one stage's program, in order.

In: a program (one stage's part of a schedule); the step's micro-batches. Out: the losses of the last chunk,
gradients in the buckets, an OPERATION event per operation (on a CUDA device once it is over: `operation_times`). It decides
nothing: another order is another schedule, passed in at a step boundary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from helixrt.errors import MisuseError
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import AHEAD_BYTES, CPU, Channel, Lane, RecvHandle, SendHandle, Tag
from helixrt.pipeline.operation_times import times_on
from helixrt.pipeline.program import Action, Arrival, Program, Transfer
from helixrt.pipeline.stage import Stage, Task
from helixrt.record import FlightRecord
from helixrt.schedule.ir import Op


class Slowdown(NamedTuple):
    """An injected slowdown of operations: `factor` times as long as they took, and each F, B and W at least `least_s`."""

    factor: float = 1.0
    least_s: float = 0.0

    def sleep_s(self, took_s: float, operations: Sequence[Op]) -> float:
        """What is missing of that, for operations that took so long together; a backward in one piece is a B and a W."""
        parts = sum(2 if op is Op.BW else 1 for op in operations)
        return max(0.0, self.factor * took_s - took_s, parts * self.least_s - took_s)


class Executor:
    """Runs programs of one stage.

    `stage` computes; `channels` lead to other stages; `boundary` has the shape and dtype of what goes between chunks
    (one micro-batch's hidden states; contents do not matter): one tensor for all, or one for each two neighbours in order.
    `device`: where the stage computes.

    A message is expected from the moment on at which the schedule lets it be sent, so that a slow link carries as many at once
    as the order allows. What is expected and not needed yet has at most `ahead_bytes`, unless a channel `expects_all`; the
    message that is needed next is expected in any case.
    """

    def __init__(
        self,
        stage: Stage,
        channels: Mapping[int, Channel],
        boundary: torch.Tensor | Sequence[torch.Tensor],
        record: FlightRecord,
        ahead_bytes: int = AHEAD_BYTES,
        device: torch.device = CPU,
    ) -> None:
        self.stage, self.channels, self.boundary, self.record = stage, channels, boundary, record
        self.ahead_bytes, self.times = ahead_bytes, times_on(device, record)
        self.slowdown: Callable[[int], Slowdown] | None = None
        """The injected slowdown of a step (`chaos.slow`)."""

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
        draws: Callable[[int, int], None] | None = None,
    ) -> list[torch.Tensor]:
        """One pass. `inputs` are needed where the first chunk is, `targets` where the last one is, by micro-batch; None where
        the stage has them already. `draws(chunk, microbatch)` is called before each forward, which may draw random numbers.

        Returns the last chunk's losses in the order of micro-batches (elsewhere an empty list). Backward
        adds the gradient of their sum times `factor`, by default of their mean, to `buckets` (which has begun; None for a
        forward-only schedule).
        """
        for channel in self.channels.values():
            channel.settle()  # what the last pass left: its receivers have gone on to this one, or are about to
        self.stage.reset()
        self.times.begin_pass()
        factor = 1.0 / program.schedule.microbatches if factor is None else factor
        losses: dict[int, torch.Tensor] = {}
        local: dict[Transfer, torch.Tensor] = {}
        sent: dict[Transfer, SendHandle] = {}
        expected = _Expected(self, lambda transfer: Tag(generation, step, transfer.chunk, transfer.microbatch, transfer.lane))

        def incoming(action: Action) -> torch.Tensor | None:
            if action.takes is None:
                return None
            assert action.source is not None
            if action.source == program.stage:
                return local.pop(action.takes)
            tensor = expected.take(action.takes, action.source)
            for done in action.proves:
                sent.pop(done).wait()  # returns at once
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
            if action.target != program.stage or (buckets is not None and self.stage.has_shapes):
                self._check(action, tensor, self.like(action.gives))
            if action.target == program.stage:
                local[action.gives] = tensor
            else:
                sent[action.gives] = self.channels[action.target].send(expected.tag(action.gives), tensor)

        expected.may_come(program.arrivals[0])
        with torch.set_grad_enabled(buckets is not None):
            for entry, arrivals in zip(program.entries, program.arrivals[1:], strict=True):
                tasks = [task(action) for action in entry]
                ending = [action.chunk for action in entry if action.last]
                for action in entry:
                    if draws is not None and action.op is Op.F:
                        draws(action.chunk, action.microbatch)
                begun = self.times.begin()
                for chunk in ending:
                    assert buckets is not None
                    buckets.last_backward(chunk)
                results = self._compute(tasks, buckets)
                self.times.end(begun, entry)  # before sends, which may hold up this stage
                self.times.write_passed()
                expected.may_come(arrivals)
                for action, result in zip(entry, results, strict=True):
                    if action.op is Op.F and action.gives is None:
                        assert result is not None
                        losses[action.microbatch] = result
                    hand_on(action, result)
                for chunk in ending:
                    assert buckets is not None
                    buckets.finish(chunk)
        return [losses[m] for m in sorted(losses)]

    def _compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        if self.slowdown is None:
            return self.stage.compute(tasks, buckets)
        operations = [task.op for task in tasks]  # the stage empties the list, to free what was given
        begin_s = time.perf_counter()
        results = self.stage.compute(tasks, buckets)
        self.times.wait()
        time.sleep(self.slowdown(self.record.step).sleep_s(time.perf_counter() - begin_s, operations))
        return results

    def like(self, transfer: Transfer) -> torch.Tensor:
        """A tensor of the shape and dtype of what is transferred."""
        if isinstance(self.boundary, torch.Tensor):
            return self.boundary
        return self.boundary[transfer.chunk - 1 if transfer.lane is Lane.F else transfer.chunk]

    @staticmethod
    def _check(action: Action, tensor: torch.Tensor, like: torch.Tensor) -> None:
        """Raise MisuseError for what no receiver expects: over a link it would be a lost message."""
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            of = "gives" if action.op is Op.F else "gives, as the gradient of its input,"
            raise MisuseError(
                f"part {action.chunk} {of} {tensor.dtype} {list(tensor.shape)}, and the boundary between parts was declared as "
                f"{like.dtype} {list(like.shape)}. Declare the boundary as parts give it; dtype='bfloat16' may change its type"
            )


class _Expected:
    """The messages of one pass that other stages may have sent, in the order in which this stage needs them."""

    def __init__(self, executor: Executor, tag: Callable[[Transfer], Tag]) -> None:
        self.tag, self._executor = tag, executor
        bounded = not any(channel.expects_all for channel in executor.channels.values())
        self._limit = executor.ahead_bytes if bounded else math.inf
        self._possible: list[tuple[int, Transfer, int]] = []  # heap by place; those that `take` expected stay in it
        self._posted: dict[Transfer, RecvHandle] = {}
        self._taken: set[Transfer] = set()
        self._bytes = 0

    def may_come(self, arrivals: Sequence[Arrival]) -> None:
        """Those can be sent from now on."""
        for arrival in arrivals:
            heappush(self._possible, (arrival.place, arrival.transfer, arrival.source))
        self._post()

    def take(self, transfer: Transfer, source: int) -> torch.Tensor:
        """Wait for a message, which is the next that is needed."""
        if transfer not in self._posted:
            self._expect(transfer, source)
        tensor = self._posted.pop(transfer).wait()
        self._taken.add(transfer)
        self._bytes -= self._executor.like(transfer).nbytes
        self._post()
        return tensor

    def _post(self) -> None:
        while self._possible:
            _, transfer, source = self._possible[0]
            if transfer not in self._taken and transfer not in self._posted:
                if self._bytes + self._executor.like(transfer).nbytes > self._limit:
                    return
                self._expect(transfer, source)
            heappop(self._possible)

    def _expect(self, transfer: Transfer, source: int) -> None:
        like = self._executor.like(transfer)
        self._bytes += like.nbytes
        self._posted[transfer] = self._executor.channels[source].recv(self.tag(transfer), like)
