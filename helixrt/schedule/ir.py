"""The schedule IR: per stage an ordered list of operations, and the proof that it can run.

In: operations F (forward), B (backward for inputs), W (backward for weights) or an overlapped pair of
a forward and a backward, each of one chunk and one micro-batch; where every chunk lives. Out: `check`
raises `ScheduleError` unless the schedule is complete and every stage, working through its list in
order with sends that never block, gets to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from helixrt.errors import HelixError


class ScheduleError(HelixError):
    """A schedule that is incomplete or cannot finish; the message names the operations."""


class Op(StrEnum):
    """What is done to one micro-batch in one chunk."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True)
class Operation:
    """One operation of one micro-batch in one chunk of the model."""

    op: Op
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}(chunk {self.chunk}, micro-batch {self.microbatch})"


@dataclass(frozen=True)
class Pair:
    """A forward and a backward (for inputs) on the same stage that overlap; starts when both can."""

    forward: Operation
    backward: Operation

    def __str__(self) -> str:
        return f"{self.forward} with {self.backward}"


Entry = Operation | Pair


def operations_of(entry: Entry) -> tuple[Operation, ...]:
    """The operations of an entry, in the order they run when they do not overlap."""
    return (entry.forward, entry.backward) if isinstance(entry, Pair) else (entry,)


@dataclass(frozen=True)
class Schedule:
    """What every stage does in one step, in order.

    `placement[chunk]` is the stage that holds the chunk; activations go from chunk to chunk + 1.
    `entries[stage]` is the stage's list. A schedule without any B or W is forward only (evaluation).
    """

    name: str
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def chunks(self) -> int:
        return len(self.placement)

    def operations(self, stage: int) -> Iterator[Operation]:
        """The stage's operations in order, pairs taken apart."""
        for entry in self.entries[stage]:
            yield from operations_of(entry)

    @property
    def forward_only(self) -> bool:
        return all(o.op is Op.F for stage in range(self.stages) for o in self.operations(stage))


def needs(schedule: Schedule, operation: Operation) -> tuple[Operation, ...]:
    """The operations whose results `operation` takes in."""
    op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
    if op is Op.F:
        return (Operation(Op.F, chunk - 1, microbatch),) if chunk else ()
    if op is Op.W:
        return (Operation(Op.B, chunk, microbatch),)
    own = Operation(Op.F, chunk, microbatch)
    return (own, Operation(Op.B, chunk + 1, microbatch)) if chunk + 1 < schedule.chunks else (own,)


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage can work through its list in order and nothing is missing."""
    _check_shape(schedule)
    _check_complete(schedule)
    _check_progress(schedule)


def _check_shape(schedule: Schedule) -> None:
    if schedule.stages < 1 or schedule.microbatches < 1 or not schedule.placement:
        raise ScheduleError(f"schedule {schedule.name}: needs at least one stage, one chunk and one micro-batch")
    if len(schedule.entries) != schedule.stages:
        raise ScheduleError(f"schedule {schedule.name}: {len(schedule.entries)} lists for {schedule.stages} stages")
    if empty := set(range(schedule.stages)) ^ set(schedule.placement):
        raise ScheduleError(f"schedule {schedule.name}: placement and stages differ in stages {sorted(empty)}")
    for stage, entries in enumerate(schedule.entries):
        for entry in entries:
            if isinstance(entry, Pair) and (entry.forward.op is not Op.F or entry.backward.op is not Op.B):
                raise ScheduleError(f"schedule {schedule.name}: stage {stage}: a pair is an F with a B, not {entry}")


def _check_complete(schedule: Schedule) -> None:
    kinds = (Op.F,) if schedule.forward_only else tuple(Op)
    for stage in range(schedule.stages):
        counted = Counter(schedule.operations(stage))
        expected = {
            Operation(op, chunk, microbatch)
            for op in kinds
            for chunk, home in enumerate(schedule.placement)
            if home == stage
            for microbatch in range(schedule.microbatches)
        }
        for operation, count in counted.items():
            if operation not in expected:
                raise ScheduleError(f"schedule {schedule.name}: {operation} does not belong on stage {stage}")
            if count > 1:
                raise ScheduleError(f"schedule {schedule.name}: stage {stage} has {operation} {count} times")
        missing = expected - counted.keys()
        if missing:
            first = min(missing, key=lambda o: (o.op.value, o.chunk, o.microbatch))
            raise ScheduleError(f"schedule {schedule.name}: stage {stage} lacks {first} ({len(missing)} missing in all)")


def _check_progress(schedule: Schedule) -> None:
    """Let every stage go as far as it can, until all are done or all that are left wait."""
    done: set[Operation] = set()
    at = [0] * schedule.stages

    def blocker(stage: int) -> Operation | None:
        """What the stage's next entry waits for. A pair's own F does not count: both begin together."""
        return next(
            (n for o in operations_of(schedule.entries[stage][at[stage]]) for n in needs(schedule, o) if n not in done),
            None,
        )

    moved = True
    while moved:
        moved = False
        for stage, entries in enumerate(schedule.entries):
            while at[stage] < len(entries) and blocker(stage) is None:
                done.update(operations_of(entries[at[stage]]))
                at[stage] += 1
                moved = True
    stuck = [stage for stage, entries in enumerate(schedule.entries) if at[stage] < len(entries)]
    if not stuck:
        return
    # Every stuck stage waits for an operation of a stuck stage: following that leads into a circle.
    trail: list[int] = []
    stage = stuck[0]
    while stage not in trail:
        trail.append(stage)
        waited = blocker(stage)
        assert waited is not None
        stage = schedule.placement[waited.chunk]
    circle = trail[trail.index(stage) :]
    waits = "; ".join(f"stage {s} stands at {schedule.entries[s][at[s]]} and waits for {blocker(s)}" for s in circle)
    raise ScheduleError(f"schedule {schedule.name} blocks itself: {waits}")
