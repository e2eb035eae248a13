"""One stage's part of a schedule, as the executor runs it.

In: a schedule of any placement, and a stage. Out: a `Program`: what is done in order, which tensors come and go
over which channel, from when on each may come, and which sends each arrival proves to be done.

A pair is one entry of it, as in the schedule: it begins when all that either takes in is there, and what both give
leaves when it ends. Autograd knows neither pairs nor a W of its own; `whole_backwards` makes of any schedule one
that it can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from helixrt.pipeline.channels import Lane
from helixrt.schedule.check import check
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, operations_of


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor on its way from one chunk to a neighbouring one; `chunk` is the one that takes it in."""

    lane: Lane
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Action:
    """One operation as this stage runs it.

    `takes` comes from stage `source` and `gives` goes to `target`, either of which may be this stage itself; None at
    the ends of the model, and for W. `last` marks the last W or BW of its chunk, after which its gradients are final.
    Once `takes` is there, `source` has taken in everything in `proves`, which this stage sent to it.
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


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor that another stage sends, and its place in the order in which this stage takes such tensors in."""

    place: int
    transfer: Transfer
    source: int


@dataclass(frozen=True)
class Program:
    """What one stage does in one step: entries of one action, or of two that overlap (forward and backward).

    `arrivals[i]` are the tensors of other stages that can be sent once this stage has done its first i entries, and no sooner:
    what makes them waits for the last of those entries.
    """

    schedule: Schedule
    stage: int
    entries: tuple[tuple[Action, ...], ...]
    arrivals: tuple[tuple[Arrival, ...], ...]

    @property
    def actions(self) -> Iterator[Action]:
        """All actions in order, pairs taken apart."""
        return (action for entry in self.entries for action in entry)


def needs_graphs(schedule: Schedule) -> bool:
    """Whether the schedule has what autograd does not do: a W of its own, or a pair."""
    return any(isinstance(entry, Pair) or entry.op is Op.W for entries in schedule.entries for entry in entries)


def whole_backwards(schedule: Schedule) -> Schedule:
    """The schedule with every backward in one piece where its B stands, and pairs one after the other, forward first.

    By the schedule neither of a pair needs the other, and what the forward gives is wanted first, further down the
    pipeline. Both only take dependencies away, so a schedule without deadlock stays one.
    """

    def apart(entries: tuple[Entry, ...]) -> Iterator[Entry]:
        for entry in entries:
            for operation in operations_of(entry):
                if operation.op is not Op.W:
                    yield replace(operation, op=Op.BW) if operation.op is Op.B else operation

    return replace(schedule, entries=tuple(tuple(apart(entries)) for entries in schedule.entries))


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
    last = {o.chunk: o for o in schedule.operations(stage) if o.op in (Op.W, Op.BW)}
    arrivals = {peer: _Arrivals(schedule, stage, peer) for peer in range(schedule.stages) if peer != stage}

    def action(operation: Operation) -> Action:
        takes, gives = taken(schedule, operation), given(schedule, operation)
        source = maker(schedule, takes) if takes is not None else None
        target = schedule.placement[gives.chunk] if gives is not None else None
        proves: tuple[Transfer, ...] = ()
        if takes is not None and source is not None and source != stage:
            proves = arrivals[source].until(takes)
        op, chunk, microbatch = operation.op, operation.chunk, operation.microbatch
        return Action(op, chunk, microbatch, takes, source, gives, target, operation == last.get(chunk), proves)

    entries = tuple(tuple(map(action, operations_of(entry))) for entry in schedule.entries[stage])
    return Program(schedule, stage, entries, _arrivals(schedule, stage, entries))


def _arrivals(schedule: Schedule, stage: int, entries: tuple[tuple[Action, ...], ...]) -> tuple[tuple[Arrival, ...], ...]:
    """`Program.arrivals` of a schedule without deadlock, by one pass over all stages."""
    possible: dict[Transfer, int] = {}  # how many entries of this stage are done before it can be made
    at, done = [0] * schedule.stages, [0] * schedule.stages
    waiting: dict[Transfer, int] = {}
    ready = list(range(schedule.stages))
    while ready:
        other = ready.pop()
        for entry in schedule.entries[other][at[other] :]:
            operations = operations_of(entry)
            needed = [transfer for o in operations if (transfer := taken(schedule, o)) is not None]
            if missing := [transfer for transfer in needed if transfer not in possible]:
                waiting[missing[0]] = other
                break
            at[other] += 1
            done[other] = at[other] if other == stage else max([done[other], *(possible[each] for each in needed)])
            for made in filter(None, (given(schedule, o) for o in operations)):
                possible[made] = done[other]
                if made in waiting:
                    ready.append(waiting.pop(made))
    found: list[list[Arrival]] = [[] for _ in range(len(entries) + 1)]
    takes = [(a.takes, a.source) for entry in entries for a in entry if a.takes is not None and a.source not in (None, stage)]
    for place, (transfer, source) in enumerate(takes):
        assert source is not None
        found[possible[transfer]].append(Arrival(place, transfer, source))
    return tuple(map(tuple, found))


class _Arrivals:
    """What a peer is known to have taken in from a stage.

    A peer works in order: when it gives something, it has taken in all that it needed until then, and all that a pair
    needs before that gives anything. And what it took in, this stage had sent before what comes back could be made,
    so each is reported after it was sent.
    """

    def __init__(self, schedule: Schedule, stage: int, peer: int) -> None:
        self._entries: list[list[Transfer]] = []
        self._made_at: dict[Transfer, int] = {}
        self._reached = 0
        for entry in schedule.entries[peer]:
            own: list[Transfer] = []
            for operation in operations_of(entry):
                takes, gives = taken(schedule, operation), given(schedule, operation)
                if gives is not None:
                    self._made_at[gives] = len(self._entries)
                if takes is not None and maker(schedule, takes) == stage:
                    own.append(takes)
            self._entries.append(own)

    def until(self, made: Transfer) -> tuple[Transfer, ...]:
        """What the peer took in from this stage up to the entry that made `made`, and that was not reported before."""
        end = max(self._reached, self._made_at[made] + 1)
        new = self._entries[self._reached : end]
        self._reached = end
        return tuple(transfer for own in new for transfer in own)
