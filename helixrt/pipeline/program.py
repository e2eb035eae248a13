"""One stage's part of a schedule, as the executor runs it.

In: a schedule of any placement, and a stage. Out: a `Program`: what is done in order, which tensors come and go
over which channel, and which sends each arrival proves to be done.

Until backward is split into two graphs, a micro-batch's whole backward runs where its B (or BW) stands: its gradient
leaves at once, and its W, which stands later, is nothing. A pair runs its forward, then its backward: by the
schedule neither needs the other, and what the forward gives is wanted first, further down the pipeline. Both only take
dependencies away, so a schedule without deadlock stays one.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.pipeline.channels import Lane
from helixrt.schedule.check import check
from helixrt.schedule.ir import Op, Operation, Schedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way from one chunk to a neighbouring one; `chunk` is the one that takes it in."""

    lane: Lane
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Action:
    """One operation as this stage runs it: F, or a whole backward (B or BW).

    `takes` comes from stage `source` and `gives` goes to `target`, either of which may be this stage itself; None at
    the ends of the model. `last` marks the last backward of its chunk. Once `takes` is there, `source` has taken in
    everything in `proves`, which this stage sent to it.
    """

    op: Op
    chunk: int
    microbatch: int
    takes: Transfer | None
    source: int | None
    gives: Transfer | None
    target: int | None
    last: bool
    proves: tuple[Transfer, ...]


@dataclass(frozen=True)
class Program:
    """What one stage does in one step."""

    schedule: Schedule
    stage: int
    actions: tuple[Action, ...]


def taken(schedule: Schedule, operation: Operation) -> Transfer | None:
    """What comes from the neighbouring chunk for this operation."""
    op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
    if op is Op.F:
        return Transfer(Lane.F, chunk, microbatch) if chunk else None
    return Transfer(Lane.B, chunk, microbatch) if op is not Op.W and chunk + 1 < schedule.chunks else None


def given(schedule: Schedule, operation: Operation) -> Transfer | None:
    """What this operation makes for the neighbouring chunk."""
    op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
    if op is Op.F:
        return Transfer(Lane.F, chunk + 1, microbatch) if chunk + 1 < schedule.chunks else None
    return Transfer(Lane.B, chunk - 1, microbatch) if op is not Op.W and chunk else None


def maker(schedule: Schedule, transfer: Transfer) -> int:
    """The stage that a transfer comes from."""
    return schedule.placement[transfer.chunk - 1 if transfer.lane is Lane.F else transfer.chunk + 1]


def compile_program(schedule: Schedule, stage: int) -> Program:
    """This stage's part of a schedule. Raises ScheduleError for one that is not valid."""
    check(schedule)
    operations = [o for o in schedule.operations(stage) if o.op is not Op.W]
    last_backward = {o.chunk: o for o in operations if o.op is not Op.F}
    arrivals = {peer: _Arrivals(schedule, stage, peer) for peer in range(schedule.stages) if peer != stage}
    actions: list[Action] = []
    for operation in operations:
        takes, gives = taken(schedule, operation), given(schedule, operation)
        source = maker(schedule, takes) if takes is not None else None
        target = schedule.placement[gives.chunk] if gives is not None else None
        proves: tuple[Transfer, ...] = ()
        if takes is not None and source is not None and source != stage:
            proves = arrivals[source].until(takes)
        last = operation == last_backward.get(operation.chunk)
        actions.append(Action(operation.op, operation.chunk, operation.microbatch, takes, source, gives, target, last, proves))
    return Program(schedule, stage, tuple(actions))


class _Arrivals:
    """What a peer is known to have taken in from a stage.

    A peer works in order: when it gives something, it has taken in all that it needed until then, pairs taken apart as
    the executor does. And what it took in, this stage had sent before what comes back could be made, so each is
    told after it was sent.
    """

    def __init__(self, schedule: Schedule, stage: int, peer: int) -> None:
        self._steps: list[Transfer | None] = []
        self._made_at: dict[Transfer, int] = {}
        self._reached = 0
        for operation in schedule.operations(peer):
            takes, gives = taken(schedule, operation), given(schedule, operation)
            if gives is not None:
                self._made_at[gives] = len(self._steps)
            self._steps.append(takes if takes is not None and maker(schedule, takes) == stage else None)

    def until(self, made: Transfer) -> tuple[Transfer, ...]:
        """What the peer took in from this stage up to the operation that made `made`, and that was not told before."""
        end = max(self._reached, self._made_at[made] + 1)
        new = self._steps[self._reached : end]
        self._reached = end
        return tuple(transfer for transfer in new if transfer is not None)
