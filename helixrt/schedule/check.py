"""The proof that a schedule can run: complete, on the right stages, and free of deadlock; and whether its result is the same
as that of other orders.

In: a schedule. Out: nothing, or a `ScheduleError` that names what is missing, doubled or misplaced, which operations
block each other, or which are out of order.

Execution is in order: a stage does not look past the entry it stands at. Since every order in which stages take turns
leads equally far, one run that lets each go as far as it can decides; it touches every operation a few times.
"""

from __future__ import annotations

from collections.abc import Iterable

from helixrt.errors import ConfigError
from helixrt.schedule.ir import Op, Operation, Pair, Schedule, ScheduleError, needs, operations_of, provides, route

_B, _W = "B and BW", "W and BW"
_ORDERED = {Op.F: ("forwards",), Op.B: (_B,), Op.W: (_W,), Op.BW: (_B, _W)}


def check(schedule: Schedule, send_queue: int | None = None) -> None:
    """Raise ScheduleError unless every stage can work through its list in order and nothing is missing.

    With `send_queue`, at most so many messages of one kind (activations or gradients) may stand between two stages, in
    one direction: sent, and not yet taken in by the operation they are for, which takes them when it begins. A
    stage puts every output of an entry into its queue as soon as there is room, and leaves the entry when all are in.
    None is for queues without bound. Raises ConfigError for a `send_queue` below 1.
    """
    if send_queue is not None and send_queue < 1:
        raise ConfigError("send_queue", send_queue, "must be at least 1")
    _check_shape(schedule)
    _check_complete(schedule)
    run = _Run(schedule, send_queue)
    run.go()
    if stuck := [stage for stage, entries in enumerate(schedule.entries) if run.at[stage] < len(entries)]:
        raise ScheduleError(f"schedule {schedule.name} blocks itself: {run.circle(stuck[0])}")


def check_microbatch_order(schedule: Schedule) -> None:
    """Raise ScheduleError unless each chunk runs its forwards, its B and BW, and its W and BW with increasing micro-batches.

    B (of a layer norm's weight), W and BW add to the chunk's gradients, and forwards change its running buffers, so schedules
    that pass give the same bits whatever else differs in their order. For a schedule that passes `check`.
    """
    for stage in range(schedule.stages):
        newest: dict[tuple[int, str], Operation] = {}  # by chunk and what it is
        for operation in schedule.operations(stage):
            for kind in _ORDERED[operation.op]:
                before = newest.get((operation.chunk, kind))
                if before is not None and before.microbatch > operation.microbatch:
                    raise ScheduleError(
                        f"schedule {schedule.name}: stage {stage} runs {before} before {operation}; orders give the same bits "
                        f"only if the {kind} of each chunk are in micro-batch order"
                    )
                newest[operation.chunk, kind] = operation


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
    n, chunks = schedule.microbatches, schedule.chunks
    kinds = (Op.F,) if schedule.forward_only else (Op.F, Op.B, Op.W)
    counted = {op: [0] * (chunks * n) for op in kinds}
    for stage in range(schedule.stages):
        for operation in schedule.operations(stage):
            chunk, microbatch = operation.chunk, operation.microbatch
            if not (0 <= chunk < chunks and schedule.placement[chunk] == stage and 0 <= microbatch < n):
                raise ScheduleError(f"schedule {schedule.name}: {operation} does not belong on stage {stage}")
            for result in (operation,) if operation.op is not Op.BW else provides(operation):
                counted[result.op][chunk * n + microbatch] += 1
    for stage in range(schedule.stages):
        missing: list[Operation] = []
        for op in kinds:
            for chunk in schedule.held[stage]:
                counts = counted[op][chunk * n : (chunk + 1) * n]
                for microbatch, count in enumerate(counts):
                    if count > 1:
                        twice = Operation(op, chunk, microbatch)
                        raise ScheduleError(f"schedule {schedule.name}: stage {stage} has {twice} {count} times")
                    if not count:
                        missing.append(Operation(op, chunk, microbatch))
        if missing:
            first = min(missing, key=lambda o: (o.op.value, o.chunk, o.microbatch))
            raise ScheduleError(f"schedule {schedule.name}: stage {stage} lacks {first} ({len(missing)} missing in all)")


class _Run:
    """Runs all stages as far as possible. Results are identified by (kind, chunk n + micro-batch)."""

    def __init__(self, schedule: Schedule, send_queue: int | None) -> None:
        self.schedule, self.send_queue = schedule, send_queue
        size = schedule.chunks * schedule.microbatches
        self.at = [0] * schedule.stages
        self.there = {op: bytearray(size) for op in (Op.F, Op.B, Op.W)}  # made and, over a link, sent
        self.taken = {op: bytearray(size) for op in (Op.F, Op.B)}  # sent over a link, and taken in at its end
        self.waiting: dict[tuple[int, int, Op], int] = {}  # messages in the queue from a to b of a kind
        self.outbox: list[list[Operation]] = [[] for _ in range(schedule.stages)]  # made here, no room yet
        # Per kind and chunk: from where to where its output goes, None if nowhere over a link.
        self.routes = {op: [route(schedule, Operation(op, c, 0)) for c in range(schedule.chunks)] for op in (Op.F, Op.B)}

    def go(self) -> None:
        ready = list(range(self.schedule.stages))
        queued = [True] * self.schedule.stages

        def wake(stages: Iterable[int]) -> None:
            for other in stages:
                if not queued[other]:
                    queued[other] = True
                    ready.append(other)

        while ready:
            stage = ready.pop()
            queued[stage] = False
            entries = self.schedule.entries[stage]
            while self.at[stage] < len(entries):
                if not self.outbox[stage]:
                    if not self._can_begin(stage):
                        break
                    operations = operations_of(entries[self.at[stage]])
                    for operation in operations:
                        wake(self._take_in(operation))
                    self.outbox[stage] = [o for operation in operations if (o := self._finish(operation))]
                wake(self._send(stage))
                if self.outbox[stage]:
                    break
                self.at[stage] += 1

    def _place(self, operation: Operation) -> int:
        return operation.chunk * self.schedule.microbatches + operation.microbatch

    def _can_begin(self, stage: int) -> bool:
        """Whether all is there that the stage's next entry takes in. What a pair makes itself is not: both begin together."""
        n, last = self.schedule.microbatches, self.schedule.chunks - 1
        for operation in operations_of(self.schedule.entries[stage][self.at[stage]]):
            op, place = operation.op, self._place(operation)
            if op is Op.F:
                if operation.chunk and not self.there[Op.F][place - n]:
                    return False
            elif op is Op.W:
                if not self.there[Op.B][place]:
                    return False
            elif not self.there[Op.F][place] or (operation.chunk < last and not self.there[Op.B][place + n]):
                return False
        return True

    def _take_in(self, operation: Operation) -> Iterable[int]:
        """Free the room of the operation's input message. Returns the stages that can continue."""
        if operation.op is Op.W:
            return ()
        op, step = (Op.F, -1) if operation.op is Op.F else (Op.B, 1)
        chunk = operation.chunk + step
        way = self.routes[op][chunk] if 0 <= chunk < self.schedule.chunks else None
        if way is None:
            return ()
        self.taken[op][chunk * self.schedule.microbatches + operation.microbatch] = 1
        self.waiting[*way, op] -= 1
        return (way[0],) if self.outbox[way[0]] else ()

    def _finish(self, operation: Operation) -> Operation | None:
        """Note what the operation makes; what of it has to be sent."""
        place = self._place(operation)
        if operation.op in (Op.W, Op.BW):
            self.there[Op.W][place] = 1
        if operation.op is Op.W:
            return None
        op = Op.F if operation.op is Op.F else Op.B
        if self.routes[op][operation.chunk] is None:
            self.there[op][place] = 1
            return None
        return operation

    def _send(self, stage: int) -> list[int]:
        """Put what the stage has made into the queues that have room; who gets something."""
        woken, left = [], []
        for operation in self.outbox[stage]:
            op = Op.F if operation.op is Op.F else Op.B
            way = self.routes[op][operation.chunk]
            assert way is not None
            if self.send_queue is not None and self.waiting.get((*way, op), 0) >= self.send_queue:
                left.append(operation)
                continue
            self.waiting[*way, op] = self.waiting.get((*way, op), 0) + 1
            self.there[op][self._place(operation)] = 1
            woken.append(way[1])
        self.outbox[stage] = left
        return woken

    def circle(self, stage: int) -> str:
        """The chain of waits from a blocked stage on: each next stage is blocked too, so the chain ends in a cycle."""
        trail: list[int] = []
        reasons: dict[int, str] = {}
        while stage not in trail:
            trail.append(stage)
            reasons[stage], stage = self._reason(stage)
        return "; ".join(reasons[s] for s in trail[trail.index(stage) :])

    def _reason(self, stage: int) -> tuple[str, int]:
        """Why a stage can not go on, and on which stage that hangs."""
        entry = self.schedule.entries[stage][self.at[stage]]
        if self.outbox[stage]:
            message = self.outbox[stage][0]
            op = Op.F if message.op is Op.F else Op.B
            way = self.routes[op][message.chunk]
            assert way is not None
            n = self.schedule.microbatches
            queued = [
                str(Operation(op, c, m))
                for c, other in enumerate(self.routes[op])
                for m in range(n)
                if other == way and self.there[op][c * n + m] and not self.taken[op][c * n + m]
            ]
            full = f"stage {stage} stands at {entry} and waits until stage {way[1]} takes in one of {', '.join(queued)}"
            return full, way[1]
        waited = next(n for o in operations_of(entry) for n in needs(self.schedule, o) if not self.there[n.op][self._place(n)])
        return f"stage {stage} stands at {entry} and waits for {waited}", self.schedule.placement[waited.chunk]
