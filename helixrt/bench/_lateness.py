"""Where a step's time goes beyond what its simulation says: the parts of its critical path, as the flight record has them.

In: what the ranks of one replica wrote in a step: operations, messages, begin and end of the work; by one clock. Out: a
`Lateness`. The path is followed backwards from the last operation: what began last before it, the operation before it on its
stage or the message that it took in, is what it waited for. So the times of a path add up to the step's work exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

from helixrt.record import Event, Kind
from helixrt.schedule.ir import Op

Place = tuple[str, int, int]  # of a message: F or B, the chunk that takes it in, the micro-batch


@dataclass(frozen=True)
class Lateness:
    """Of one step's critical path, in ms. `operations` and `messages` are on the path; `nominal_ms` is what these take with
    nothing late, and never more than the simulation of the step. `work_ms` is the sum of all fields in ms but itself."""

    work_ms: float
    operations: int
    messages: int
    nominal_ms: float
    before_ms: float  # the first operation, from where the first rank begins
    overlong_ms: float  # operations beyond their time
    between_ms: float  # an operation and the next one of its stage, which waits for nothing else
    queueing_ms: float  # from the end of an operation until its message is begun: the thread of the queue wakes up
    transport_ms: float  # from there to the arrival, without the link's delay
    starting_ms: float  # from the arrival until the stage begins the step
    waking_ms: float  # from then, or the arrival, until the operation begins that waits for it
    behind_ms: float  # the last operation: the loss, gradients of tied copies, buckets

    @staticmethod
    def medians(of: Sequence[Lateness]) -> dict[str, float]:
        """Of each field, rounded; nothing of no steps."""
        if not of:
            return {}
        return {field.name: round(median(getattr(each, field.name) for each in of), 2) for field in fields(Lateness)}


@dataclass(frozen=True)
class _Operation:
    stage: int
    op: Op
    chunk: int
    microbatch: int
    begin_s: float
    end_s: float

    @property
    def takes(self) -> Place | None:
        """The message that it takes in, if another stage sends one; None for W."""
        return None if self.op is Op.W else ("F" if self.op is Op.F else "B", self.chunk, self.microbatch)

    @property
    def gives(self) -> Place | None:
        if self.op is Op.W:
            return None
        return ("F", self.chunk + 1, self.microbatch) if self.op is Op.F else ("B", self.chunk - 1, self.microbatch)


@dataclass(frozen=True)
class _Message:
    begun_s: float
    arrived_s: float


def lateness(
    events: Iterable[Event],
    stage_of: Callable[[str], int],
    operation_ms: Callable[[Op], float],
    delays_ms: Mapping[tuple[int, int], float],
) -> Lateness | None:
    """`stage_of` a rank, by its name. `operation_ms` is what an operation takes, `delays_ms` what a link does, from stage to
    stage (absent: nothing). None where the record lacks a part of the step."""
    operations: list[_Operation] = []
    messages: dict[Place, _Message] = {}
    begins: dict[int, float] = {}  # of each stage
    ends: list[float] = []
    for event in events:
        detail = event.detail
        match event.kind:
            case Kind.OPERATION:
                place = (stage_of(event.rank), Op(detail["op"]), detail["chunk"], detail["microbatch"])
                operations.append(_Operation(*place, event.begin_s, event.end_s))
            case Kind.RECV if detail["tag"].endswith((".F", ".B")):
                _, _, chunk, microbatch, lane = detail["tag"].split(".")
                messages[lane, int(chunk[1:]), int(microbatch[1:])] = _Message(detail["sent_s"], detail["arrived_s"])
            case Kind.WORK_BEGIN:
                stage = stage_of(event.rank)
                begins[stage] = min(event.begin_s, begins.get(stage, event.begin_s))
            case Kind.WORK_END:
                ends.append(event.end_s)
            case _:
                pass
    if not (operations and begins and ends):
        return None
    return _followed(operations, messages, operation_ms, delays_ms, begins, max(ends))


def _followed(
    operations: Sequence[_Operation],
    messages: Mapping[Place, _Message],
    operation_ms: Callable[[Op], float],
    delays_ms: Mapping[tuple[int, int], float],
    begins_s: Mapping[int, float],
    end_s: float,
) -> Lateness | None:
    givers = {each.gives: each for each in operations if each.gives is not None}
    now = max(operations, key=lambda each: each.end_s)
    behind_s = end_s - now.end_s
    count, hops, nominal_ms = 0, 0, 0.0
    overlong_s = between_s = queueing_s = transport_s = starting_s = waking_s = 0.0
    while True:
        count += 1
        nominal_ms += operation_ms(now.op)
        overlong_s += now.end_s - now.begin_s - operation_ms(now.op) / 1e3
        before = max((e for e in operations if e.stage == now.stage and e.end_s <= now.begin_s), key=_end_s, default=None)
        takes = now.takes
        message = None if takes is None else messages.get(takes)
        if message is not None and takes is not None and (before is None or message.arrived_s > before.end_s):
            giver = givers.get(takes)
            if giver is None:
                return None
            delay_s = delays_ms.get((giver.stage, now.stage), 0.0) / 1e3
            hops, nominal_ms = hops + 1, nominal_ms + delay_s * 1e3
            there_s = message.arrived_s
            if before is None:
                there_s = max(there_s, begins_s[now.stage])
            starting_s += there_s - message.arrived_s
            waking_s += now.begin_s - there_s
            transport_s += message.arrived_s - message.begun_s - delay_s
            queueing_s += message.begun_s - giver.end_s
            now = giver
        elif before is not None:
            between_s += now.begin_s - before.end_s
            now = before
        else:
            break
    begin_s = min(begins_s.values())
    parts = (now.begin_s - begin_s, overlong_s, between_s, queueing_s, transport_s, starting_s, waking_s, behind_s)
    return Lateness((end_s - begin_s) * 1e3, count, hops, nominal_ms, *(part * 1e3 for part in parts))


def _end_s(operation: _Operation) -> float:
    return operation.end_s
