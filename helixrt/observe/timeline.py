"""One step as lanes of bars, from the flight records, for whoever draws it.

In: the events of all ranks. Out: a `Timeline`: for every rank what it computed, sent, waited for and
exchanged between the step's begin and its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from helixrt.record import Event, Kind

_DRAWN = {
    Kind.SEND: "send",
    Kind.RECV: "recv",
    Kind.EXCHANGE_BUCKET: "exchange",
    Kind.APPLY: "apply",
    Kind.FETCH_SHARD: "fetch",
    Kind.SNAPSHOT: "snapshot",
}
_MARKED = {Kind.QUORUM: "quorum", Kind.COMMIT: "commit", Kind.EXCHANGE_FAILED: "exchange failed", Kind.FAILURE: "failure"}
COMPUTE = frozenset({"F", "B", "W", "apply"})


@dataclass(frozen=True)
class Bar:
    """Something that took time: `what` is F, B, W, apply, send, recv, exchange, fetch or snapshot. Seconds from the begin."""

    what: str
    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Lane:
    rank: str
    bars: tuple[Bar, ...]
    marks: tuple[Bar, ...]  # instants: quorum, commit, failures


@dataclass(frozen=True)
class Timeline:
    step: int
    begin_s: float  # Unix time
    duration_s: float
    lanes: tuple[Lane, ...]


def timeline(events: Iterable[Event], step: int) -> Timeline | None:
    """The lanes of one step, ranks in the order of their names; None if nothing of it was recorded.

    Stages other than the first may not know the step of a message, so what a rank did belongs to
    the step by its time: from the step's first quorum or operation to its last update.
    """
    ordered = sorted(events, key=lambda e: e.begin_s)
    inside = [e for e in ordered if e.step == step and e.kind in (Kind.QUORUM_JOIN, Kind.OPERATION, Kind.APPLY)]
    if not any(e.kind is Kind.OPERATION for e in inside):
        return None
    begin_s = min(e.begin_s for e in inside)
    end_s = _end(inside, begin_s)
    bars: dict[str, list[Bar]] = defaultdict(list)
    marks: dict[str, list[Bar]] = defaultdict(list)
    for event in ordered:
        if event.end_s <= begin_s or event.begin_s >= end_s:
            continue
        bar = _bar(event, begin_s)
        if bar is not None:
            bars[event.rank].append(bar)
        elif event.kind in _MARKED:
            what = _MARKED[event.kind]
            marks[event.rank].append(Bar(what, _told(event, what), event.begin_s - begin_s, event.end_s - begin_s))
    ranks = sorted({e.rank for e in inside if e.kind in (Kind.OPERATION, Kind.APPLY)} | set(bars))
    lanes = tuple(Lane(rank, tuple(bars[rank]), tuple(marks[rank])) for rank in ranks)
    return Timeline(step, begin_s, end_s - begin_s, lanes)


def typical_step(events: Sequence[Event], avoid: Iterable[int] = ()) -> int | None:
    """A step that shows how an undisturbed one goes: of those on which most ranks computed, the one of median duration."""
    ranks: dict[int, set[str]] = defaultdict(set)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for event in events:
        if event.kind is Kind.OPERATION and event.step > 0:
            ranks[event.step].add(event.rank)
            first[event.step] = min(first.get(event.step, event.begin_s), event.begin_s)
            last[event.step] = max(last.get(event.step, event.end_s), event.end_s)
    shunned = {s + d for s in avoid for d in (-1, 0, 1)}
    steps = [s for s in ranks if s not in shunned] or list(ranks)
    if not steps:
        return None
    most = Counter(len(ranks[s]) for s in steps)
    full = sorted((s for s in steps if len(ranks[s]) == max(most)), key=lambda s: (last[s] - first[s], s))
    return full[len(full) // 2]


def _end(inside: Sequence[Event], begin_s: float) -> float:
    """The last update of the step; one long after the first is a replica's that catches up."""
    first_s = min((e.end_s for e in inside if e.kind is Kind.APPLY), default=None)
    worked_s = max(e.end_s for e in inside if e.kind is not Kind.APPLY)
    if first_s is None:
        return worked_s
    limit_s = begin_s + 2 * (first_s - begin_s)
    return max(e.end_s for e in inside if e.end_s <= limit_s)


def _bar(event: Event, origin_s: float) -> Bar | None:
    begin_s, end_s = event.begin_s - origin_s, event.end_s - origin_s
    if event.kind is Kind.OPERATION:
        op = str(event.detail["op"])
        return Bar(op, f"{op} chunk {event.detail.get('chunk')} micro-batch {event.detail.get('microbatch')}", begin_s, end_s)
    if event.kind not in _DRAWN or event.end_s <= event.begin_s:
        return None
    what = _DRAWN[event.kind]
    return Bar(what, _told(event, what), begin_s, end_s)


def _told(event: Event, what: str) -> str:
    return ", ".join([what, *(f"{key} {value}" for key, value in event.detail.items())])
