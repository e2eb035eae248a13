"""The proof that a schedule can run: complete, on the right stages, and free of deadlock.

In: a schedule. Out: nothing, or a `ScheduleError` that names what is missing, doubled or misplaced, or which
operations block each other. Execution is in order: a stage does not look past the entry it stands at.
"""

from __future__ import annotations

from collections import Counter

from helixrt.schedule.ir import Op, Operation, Pair, Schedule, ScheduleError, needs, operations_of, provides


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
            if isinstance(entry, Pair) and (entry.forward.op is not Op.F or entry.backward.op not in (Op.B, Op.BW)):
                raise ScheduleError(f"schedule {schedule.name}: stage {stage}: a pair is an F with a B or BW, not {entry}")


def _check_complete(schedule: Schedule) -> None:
    kinds = (Op.F,) if schedule.forward_only else (Op.F, Op.B, Op.W)
    for stage in range(schedule.stages):
        counted = Counter(result for operation in schedule.operations(stage) for result in provides(operation))
        expected = {
            Operation(op, chunk, microbatch)
            for op in kinds
            for chunk in schedule.held[stage]
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
                done.update(r for o in operations_of(entries[at[stage]]) for r in provides(o))
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
