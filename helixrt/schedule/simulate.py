"""Exact timing of a schedule in a fixed order, under costs: no time step, every time a maximum of sums.

In: a schedule, its costs, and how stages communicate. Out: a `Timeline` (or its makespan alone). A stage works
through its list in order; an entry starts when the stage is free and its inputs are there; a pair starts when both of its
operations can, and both results are there at its end.

Two ways to communicate:

- **Delegated** (ADAPTRA, Section 5.2): sends and receives never hold up compute. A message is ready when its
  operation ends; each directed link carries one message at a time, for its wire time, in the order in which they
  became ready (which is the order of the sender's list), and a message arrives one delay after it left the wire.
- **Direct** (Sections 3.2 and 5.1, Figures 2 and 6): every stage has one in-order queue for all its communication, as a
  GPU's kernels share one NCCL communicator. In program order: an entry's receives, the entry, its sends (of a
  pair, the forward's before the backward's). Only the head of the queue moves. A receive stays at the head
  until its message has arrived; a send enters the wire when it comes to the head and stays there until its message
  has arrived at the other side (wire time and delay), whether or not the receiver waits for it: so direct
  communication never adds a deadlock to what `check` finds. When `depth` communications in the queue are unfinished, the
  next one can not be put in, and the stage starts nothing until it is. With depth 1 a slow send of F1 holds up F3 (the
  paper's Figure 2), with depth 2 it holds up F4 (Figure 6).

Neither needs a queue of events ordered by time: a link's messages all come from one stage, in the order of its list, so
a single pass over the entries, each taken up once its inputs are known, computes every time from earlier ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.host_memory import HostMemory, Tier, tiers
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule
from helixrt.schedule.memory import held
from helixrt.schedule.timeline import Bubble, Cause, Message, Span, Timeline


@dataclass(frozen=True, slots=True)
class Delegated:
    """Workers at the host's side carry every message; compute never waits for a send, nor a message for another's."""


@dataclass(frozen=True, slots=True)
class Direct:
    """One in-order queue per stage for all its sends and receives, of `depth` unfinished ones.

    Raises ConfigError for a depth below 1.
    """

    depth: int = 2

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError("comm.depth", self.depth, "must be at least 1")


Comm = Delegated | Direct
DELEGATED = Delegated()


def simulate(schedule: Schedule, costs: Costs, comm: Comm = DELEGATED, host: HostMemory | None = None) -> Timeline:
    """When everything happens, why stages stand idle, and what they hold.

    Times in ms from the start of the step. The idle time before an entry is a warm-up for the stage's first, else a
    dependency up to the moment at which the entry could have started had every input been sent as soon as it was
    made over an idle link, and head-of-line blocking from then on (direct only: when delegated, waiting for a link
    that carries other messages counts as dependency). After the last entry comes cool-down. Busy and idle time tile
    [0, makespan] on every stage. With `host`, what exceeds a stage's memory cap is copied to the host and back (see
    `host_memory`); waiting for a copy counts as dependency, and the timeline's memory is that of both tiers.
    Without it, caps do not matter here.

    Raises ConfigError when the costs are of another placement, ScheduleError when the schedule blocks itself. What else
    `check` proves (that nothing is missing or doubled) is not asked here.
    """
    run = _run(schedule, costs, comm, host)
    spans = tuple(
        tuple(map(Span, entries, starts, ends))
        for entries, starts, ends in zip(schedule.entries, run.starts, run.ends, strict=True)
    )
    makespan_ms = run.makespan_ms
    bubbles = tuple(_bubbles(spans[s], run.clear[s], makespan_ms) for s in range(schedule.stages))
    memory = tuple(_memory_steps(schedule, costs, s, spans[s]) for s in range(schedule.stages))
    return Timeline(schedule, costs, spans, tuple(run.messages), bubbles, memory)


def makespan_ms(schedule: Schedule, costs: Costs, comm: Comm = DELEGATED, host: HostMemory | None = None) -> float:
    """The makespan of `simulate` alone, at a fraction of its work. Raises as `simulate` does."""
    return _run(schedule, costs, comm, host).makespan_ms


@dataclass(slots=True)
class _Run:
    """Per stage and entry its start, its end and when it could have started on idle links without queues."""

    starts: list[list[float]]
    ends: list[list[float]]
    clear: list[list[float]]
    messages: list[Message]

    @property
    def makespan_ms(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)


@dataclass(slots=True)
class _Queue:
    """A stage's communications under direct mode: the ends of the last `depth` of them, in order."""

    ends: deque[float]

    def put(self, at_ms: float) -> float:
        """When a communication that comes up at `at_ms` finds room."""
        return max(at_ms, self.ends[0]) if len(self.ends) == self.ends.maxlen else at_ms

    def head(self, put_ms: float) -> float:
        """The time at which an entry of `put_ms` reaches the head."""
        return max(put_ms, self.ends[-1]) if self.ends else put_ms


@dataclass(frozen=True, slots=True)
class _Way:
    """Where an operation's output goes: the slot in which its consumer looks for it, and the link, None on one stage."""

    slot: int  # of micro-batch 0; slots of one consumer are consecutive
    source: int
    target: int
    wire_ms: float
    delay_ms: float


def _ways(schedule: Schedule, costs: Costs) -> tuple[list[_Way | None], list[_Way | None]]:
    """Per chunk, where its activation and its gradient go."""
    n, chunks, placement = schedule.microbatches, schedule.chunks, schedule.placement

    def way(chunk: int, to: int, slot: int) -> _Way | None:
        if not 0 <= to < chunks:
            return None
        link = costs.link(placement[chunk], placement[to])
        return _Way(slot, placement[chunk], placement[to], link.wire_ms, link.delay_ms)

    forward = [way(c, c + 1, (c + 1) * n) for c in range(chunks)]
    backward = [way(c, c - 1, (chunks + c - 1) * n) for c in range(chunks)]
    return forward, backward


def _run(schedule: Schedule, costs: Costs, comm: Comm, host: HostMemory | None) -> _Run:
    if costs.placement != schedule.placement:
        raise ConfigError("costs.placement", costs.placement, f"must be the schedule's, {schedule.placement}")
    stages, n, chunks = schedule.stages, schedule.microbatches, schedule.chunks
    forward_way, backward_way = _ways(schedule, costs)
    durations = {
        Op.F: costs.forward,
        Op.B: costs.backward,
        Op.W: costs.weight,
        Op.BW: tuple(b + w for b, w in zip(costs.backward, costs.weight, strict=True)),
    }
    # Slot c n + m: the input of F(c, m); (chunks + c) n + m: the gradient into B(c, m). Negative until it is known.
    arrived = [-1.0] * (2 * chunks * n)
    arrived[:n] = [0.0] * n
    arrived[(2 * chunks - 1) * n :] = [0.0] * n
    sent_clear = arrived[:]  # when it would be there, sent at once over an idle link
    done = {op: bytearray(chunks * n) for op in (Op.F, Op.B)}  # what a stage's own B and W ask for
    linked = [a != b for a, b in pairwise(schedule.placement)]  # whether chunks c and c + 1 talk over a link

    run = _Run([[] for _ in range(stages)], [[] for _ in range(stages)], [[] for _ in range(stages)], [])
    link_free: dict[tuple[int, int], float] = {}
    queues = [_Queue(deque(maxlen=comm.depth)) for _ in range(stages)] if isinstance(comm, Direct) else None
    free = [0.0] * stages  # when the stage may take up its next entry
    awaited = [-1] * stages  # the slot that a stopped stage waits for
    pair_ms: dict[tuple[int, Op, int], float] = {}
    memory: list[Tier | None] = tiers(schedule, costs, host) if host is not None else [None] * stages

    def send(operation: Operation, way: _Way, end_ms: float, at_ms: float) -> float:
        """Put the output of `operation` on its way, its turn being at `at_ms`; when the stage may go on."""
        slot = way.slot + operation.microbatch
        source, target = way.source, way.target
        if source == target:
            arrived[slot] = sent_clear[slot] = end_ms
        else:
            if queues is None:
                begin_ms = max(end_ms, link_free.get((source, target), 0.0))
                link_free[source, target] = begin_ms + way.wire_ms
            else:
                at_ms = queues[source].put(at_ms)
                begin_ms = queues[source].head(at_ms)
            arrive_ms = begin_ms + way.wire_ms + way.delay_ms
            if queues is not None:
                queues[source].ends.append(arrive_ms)
            arrived[slot] = arrive_ms
            sent_clear[slot] = end_ms + way.wire_ms + way.delay_ms
            run.messages.append(Message(operation, source, target, end_ms, begin_ms, arrive_ms))
        if awaited[target] == slot:
            awaited[target] = -1
            ready.append(target)
        return at_ms

    ready = list(range(stages - 1, -1, -1))
    while ready:
        stage = ready.pop()
        entries, starts, ends, clears = schedule.entries[stage], run.starts[stage], run.ends[stage], run.clear[stage]
        tier = memory[stage]
        for index in range(len(ends), len(entries)):
            entry = entries[index]
            operations = (entry.forward, entry.backward) if isinstance(entry, Pair) else (entry,)
            # What a stage made itself is there since its last entry ended: only whether it was made can matter.
            stuck = False
            for operation in operations:
                op, place = operation.op, operation.chunk * n + operation.microbatch
                slot = -1 if op is Op.W else place if op is Op.F else chunks * n + place
                if op is not Op.F and not done[Op.B if op is Op.W else Op.F][place]:
                    stuck = True
                elif slot >= 0 and arrived[slot] < 0.0:
                    awaited[stage] = slot
                    stuck = True
            if stuck:
                break
            start = at = free[stage]
            clear = ends[-1] if ends else 0.0
            if tier is not None:
                copied_ms = tier.begin(entry)
                start, clear = max(start, copied_ms), max(clear, copied_ms)
            for operation in operations:
                op, chunk = operation.op, operation.chunk
                if op is Op.W:
                    continue
                slot = (chunk if op is Op.F else chunks + chunk) * n + operation.microbatch
                there = arrived[slot]
                if queues is not None:
                    clear = max(clear, sent_clear[slot])
                    if linked[chunk - 1] if op is Op.F and chunk else op is not Op.F and chunk + 1 < chunks and linked[chunk]:
                        at = queues[stage].put(at)
                        there = max(queues[stage].head(at), there)
                        queues[stage].ends.append(there)
                if there > start:
                    start = there
            if at > start:
                start = at
            if isinstance(entry, Pair):
                key = (entry.forward.chunk, entry.backward.op, entry.backward.chunk)
                if key not in pair_ms:
                    pair_ms[key] = costs.duration_ms(entry)
                end = start + pair_ms[key]
            else:
                end = start + durations[entry.op][entry.chunk]
            if tier is not None:
                tier.end(entry, end)
            starts.append(start)
            ends.append(end)
            clears.append(start if queues is None else clear)
            at = end
            for operation in operations:
                op, chunk = operation.op, operation.chunk
                if op is Op.W:
                    continue
                done[Op.F if op is Op.F else Op.B][chunk * n + operation.microbatch] = 1
                way = (forward_way if op is Op.F else backward_way)[chunk]
                if way is not None:
                    at = send(operation, way, end, at)
            free[stage] = at
    if any(len(run.ends[s]) < len(schedule.entries[s]) for s in range(stages)):
        check(schedule)
        raise AssertionError("a schedule that passes the check runs to its end")
    return run


def _bubbles(spans: tuple[Span, ...], clear: list[float], makespan_ms: float) -> tuple[Bubble, ...]:
    """The idle times of one stage, each from one end to the next start, cut where the cause changes."""
    bubbles: list[Bubble] = []

    def add(start_ms: float, end_ms: float, cause: Cause, waiting: Entry | None) -> None:
        if end_ms > start_ms:
            bubbles.append(Bubble(start_ms, end_ms, cause, waiting))

    before_ms = 0.0
    for index, span in enumerate(spans):
        if index == 0:
            add(before_ms, span.start_ms, Cause.WARM_UP, span.entry)
        else:
            add(before_ms, clear[index], Cause.DEPENDENCY, span.entry)
            add(clear[index], span.start_ms, Cause.BLOCKING, span.entry)
        before_ms = span.end_ms
    add(before_ms, makespan_ms, Cause.COOL_DOWN, None)
    return tuple(bubbles)


def _memory_steps(schedule: Schedule, costs: Costs, stage: int, spans: tuple[Span, ...]) -> tuple[tuple[float, float], ...]:
    steps = [(0.0, 0.0)]
    for span, (at_start, at_end) in zip(spans, held(schedule, costs, stage), strict=True):
        for at_ms, amount in ((span.start_ms, at_start), (span.end_ms, at_end)):
            if amount != steps[-1][1]:
                steps.append((at_ms, amount))
    return tuple(steps)
