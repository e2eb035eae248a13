"""One step as lanes of bars, from the flight records, as data for drawing.

In: the events of all ranks. Out: a `Timeline`: for every rank what it computed, waited for and exchanged
between the step's begin and its end, and the activations and gradients that went from rank to rank.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from helixrt.record import Event, Kind

_DRAWN = {
    Kind.RECV: "awaited",
    Kind.EXCHANGE_BUCKET: "exchange",
    Kind.APPLY: "apply",
    Kind.FETCH_SHARD: "fetch",
    Kind.SNAPSHOT: "snapshot",
}
_MARKED = {Kind.QUORUM: "quorum", Kind.COMMIT: "commit", Kind.EXCHANGE_FAILED: "exchange failed", Kind.FAILURE: "failure"}
COMPUTE = frozenset({"F", "B", "W", "apply"})
_BETWEEN_STAGES = re.compile(r"\.m(\d+)\.([FB])$")  # the end of such a message's tag
_AT_ONCE_S = 1e-4  # a shorter wait was none: the message was there


@dataclass(frozen=True)
class Bar:
    """What took time: F, B, W, apply, awaited (a message), quorum, exchange, fetch, snapshot. Seconds from the begin."""

    what: str
    label: str
    begin_s: float
    end_s: float
    other_step: bool = False  # belongs to the step before or after
    woven: bool = False  # F or B of a pair that ran as one, in the same time


@dataclass(frozen=True)
class Message:
    """An activation (F) or a gradient (B), from when it was handed over until the receiver had it in hand."""

    what: str
    microbatch: int
    sender: str
    receiver: str
    sent_s: float
    taken_s: float
    nbytes: int


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
    messages: tuple[Message, ...]


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
        bar = _bar(event, begin_s, step)
        if bar is not None:
            if bar.begin_s < end_s - begin_s:
                bars[event.rank].append(bar)
        elif event.kind in _MARKED:
            what = _MARKED[event.kind]
            marks[event.rank].append(Bar(what, _told(event, what), event.begin_s - begin_s, event.end_s - begin_s))
    for bar_rank, waiting in _quorums(ordered, begin_s, end_s):
        bars[bar_rank].append(waiting)
    ranks = sorted({e.rank for e in inside if e.kind in (Kind.OPERATION, Kind.APPLY)} | set(bars))
    lanes = tuple(Lane(rank, tuple(bars[rank]), tuple(marks[rank])) for rank in ranks)
    messages = tuple(m for m in _messages(ordered, begin_s, end_s) if {m.sender, m.receiver} <= set(ranks))
    return Timeline(step, begin_s, end_s - begin_s, lanes, messages)


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
    return max((e.end_s for e in inside if e.end_s <= limit_s), default=worked_s)  # none if the clock stepped back


def _bar(event: Event, origin_s: float, step: int) -> Bar | None:
    begin_s, end_s = event.begin_s - origin_s, event.end_s - origin_s
    other = event.step != step
    if event.kind is Kind.OPERATION:
        op = str(event.detail["op"])
        label = f"{op} chunk {event.detail.get('chunk')} micro-batch {event.detail.get('microbatch')}"
        woven = bool(event.detail.get("woven"))
        return Bar("B" if op == "BW" else op, label + ", woven" * woven, begin_s, end_s, other, woven)
    if event.kind not in _DRAWN or event.end_s <= event.begin_s:
        return None
    what = _DRAWN[event.kind]
    if event.kind is Kind.RECV:  # posted ahead; waited for only since it was needed
        needed_s = float(event.detail.get("needed_s", event.begin_s))
        if event.end_s - needed_s < _AT_ONCE_S or event.end_s <= origin_s:
            return None
        return Bar(what, f"awaited, tag {event.detail.get('tag')}", needed_s - origin_s, end_s)
    return Bar(what, _told(event, what), begin_s, end_s, other and event.kind is Kind.APPLY)


def _quorums(ordered: Iterable[Event], origin_s: float, until_s: float) -> Iterable[tuple[str, Bar]]:
    """From asking for a quorum to having it, by rank."""
    asked: dict[str, Event] = {}
    for event in ordered:
        if event.kind is Kind.QUORUM_JOIN:
            asked[event.rank] = event
        elif event.kind is Kind.QUORUM and event.rank in asked:
            begin_s = asked.pop(event.rank).begin_s
            if event.end_s > origin_s and begin_s < until_s:
                yield event.rank, Bar("quorum", _told(event, "quorum"), begin_s - origin_s, event.end_s - origin_s)


def _messages(ordered: Sequence[Event], origin_s: float, until_s: float) -> tuple[Message, ...]:
    """What went between the stages of each replica, along each of its pipelines: a receipt and the last sending before it with
    the same tag."""
    sent: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in ordered:
        if event.kind is Kind.SEND:
            sent[_pipeline(event.rank), str(event.detail.get("tag"))].append(event)
    found = []
    for event in ordered:
        tag = str(event.detail.get("tag"))
        named = _BETWEEN_STAGES.search(tag)
        if event.kind is not Kind.RECV or named is None or not origin_s < event.end_s <= until_s:
            continue
        candidates = [s for s in sent[_pipeline(event.rank), tag] if s.rank != event.rank and s.begin_s <= event.end_s]
        if candidates and candidates[-1].begin_s >= origin_s:
            begin_s, nbytes = candidates[-1].begin_s - origin_s, int(event.detail.get("bytes", 0))
            took = (begin_s, event.end_s - origin_s)
            found.append(Message(named[2], int(named[1]), candidates[-1].rank, event.rank, *took, nbytes))
    return tuple(found)


def _pipeline(rank: str) -> str:
    """The ranks that a rank's messages go to, named by what they have in common: r1.pp0.tp1 is in r1.tp1."""
    return ".".join(part for part in rank.split(".") if not part.startswith("pp"))


def _told(event: Event, what: str) -> str:
    return ", ".join([what, *(f"{key} {value}" for key, value in event.detail.items())])
