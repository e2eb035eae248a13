"""What a lost replica cost, figured from the flight records.

In: the events of all ranks, and the driver's notes of what it saw end. Out: one `Failure` per loss:
when it was detected, how long the survivors waited, when it was back. Pure: events carry their times,
which come from clocks of one host or of hosts kept in step.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from helixrt.record import Event, Kind

DRIVER = -1
_AROUND = 500  # steps before and after a loss whose median is the usual step time


@dataclass(frozen=True)
class Loss:
    """A replica's life that ended before its time. `seen_s`: when the driver saw it (Unix time)."""

    replica: int
    incarnation: int
    seen_s: float
    reason: str


@dataclass(frozen=True)
class Failure:
    """A loss and its consequences, in seconds after it; None for what did not happen (or has no survivor)."""

    replica: int
    step: int  # in which it was lost
    lost_s: float  # Unix time
    reason: str
    detected_after_s: float | None  # first survivor whose exchange broke, or that formed a quorum without it
    survivors_stalled_s: float | None  # how much longer than usual the steps around it took, for the slowest survivor
    rejoined_after_s: float | None  # first quorum in which it contributed again
    survivors_recomputed: int  # how often ranks of survivors began the work of that step again
    seen: str = ""  # what the driver saw: which rank ended or is stuck, and how; `reason` may be an injected fault


def failures(events: Iterable[Event], losses: Sequence[Loss]) -> list[Failure]:
    """One failure per loss, in the order of time."""
    told = _Told(events)
    found = [_failure(told, loss, losses) for loss in losses]
    return sorted(found, key=lambda f: f.lost_s)


class _Told:
    """The events in the order of time, as they are looked for: of a run with many losses each is looked at a few times."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.of: dict[int, list[Event]] = defaultdict(list)  # by replica
        starts: dict[int, list[Event]] = defaultdict(list)
        self.exchanges: list[Event] = []  # quorums and exchanges that failed
        self.works: dict[int, list[Event]] = defaultdict(list)  # by step
        self.steps: dict[str, list[tuple[float, float]]] = defaultdict(list)  # by rank; begin and end
        before: dict[str, tuple[int, float]] = {}  # by rank: step and time of its newest commit; at first, when its work began
        for event in sorted(events, key=_end_s):
            replica = replica_of(event.rank)
            self.of[replica].append(event)
            match event.kind:
                case Kind.RANK_START:
                    starts[replica].append(event)
                    before.pop(event.rank, None)
                case Kind.QUORUM | Kind.EXCHANGE_FAILED:
                    self.exchanges.append(event)
                case Kind.WORK_BEGIN:
                    self.works[event.step].append(event)
                    before.setdefault(event.rank, (event.step - 1, event.end_s))
                case Kind.COMMIT:
                    step, since_s = before.get(event.rank, (event.step, 0.0))
                    if step == event.step - 1:  # else the record of those between is gone, or they were superseded
                        self.steps[event.rank].append((since_s, event.end_s))
                    before[event.rank] = event.step, event.end_s
        self.lives = {replica: births(of_one) for replica, of_one in starts.items()}

    def exchanges_from(self, begin_s: float) -> Iterator[Event]:
        return islice(self.exchanges, bisect_left(self.exchanges, begin_s, key=_end_s), None)


def _end_s(event: Event) -> float:
    return event.end_s


def replica_of(rank: str) -> int:
    """The replica in a rank's name (`r1.pp0…`), or DRIVER for any other name."""
    head = rank.split(".")[0]
    return int(head[1:]) if head[:1] == "r" and head[1:].isdigit() else DRIVER


def _failure(told: _Told, loss: Loss, losses: Sequence[Loss]) -> Failure:
    own = told.of[loss.replica]
    born_s, reborn_s = _life(told.lives.get(loss.replica, ()), loss)
    words = own[bisect_left(own, born_s, key=_end_s) : bisect_right(own, loss.seen_s, key=_end_s)]
    words = words[: bisect_left(words, reborn_s, key=_end_s)]
    noted = [e for e in words if e.kind is Kind.FAILURE and e.detail.get("replica") == loss.replica]
    lost_s = noted[-1].end_s if noted else _silent_since(words, loss.seen_s)
    gone = {o.replica for o in losses if abs(o.seen_s - loss.seen_s) < 1.0} | {loss.replica, DRIVER}
    back = next((e.end_s for e in told.exchanges_from(reborn_s) if _contributes(e, loss.replica)), None)
    until_s = math.inf if back is None else back  # its successor may be starting before the loss is detected
    worked = any(e.kind is Kind.WORK_BEGIN for e in words)
    after = takewhile(lambda e: e.end_s < until_s, told.exchanges_from(lost_s))
    noticed = next((e.end_s for e in after if replica_of(e.rank) not in gone and _notices(e, loss.replica, worked)), None)
    step = max((e.step for e in noted or words), default=0)
    return Failure(
        replica=loss.replica,
        step=step,
        lost_s=lost_s,
        reason=str(noted[-1].detail.get("reason", loss.reason)) if noted else loss.reason,
        detected_after_s=None if noticed is None else noticed - lost_s,
        survivors_stalled_s=None if noticed is None else _stall(told, gone, lost_s, noticed),
        rejoined_after_s=None if back is None else back - lost_s,
        survivors_recomputed=_recomputed(told, gone, step, lost_s, until_s),
        seen=loss.reason,
    )


def births(starts: Iterable[Event]) -> list[tuple[int, float]]:
    """(incarnation, Unix time) of each life of a replica, from the RANK_START of its ranks in the order of time. In each life
    of a run incarnations begin at 0 again, but no rank starts twice in one life of its replica."""
    found: list[tuple[int, float]] = []
    ranks: set[str] = set()
    for event in starts:
        incarnation = int(event.detail.get("incarnation", 0))
        if not found or found[-1][0] != incarnation or event.rank in ranks:
            found.append((incarnation, event.begin_s))
            ranks.clear()
        ranks.add(event.rank)
    return found


def _life(lives: Sequence[tuple[int, float]], loss: Loss) -> tuple[float, float]:
    """When the life of the replica that was lost began, and when the next one did (infinity if there was none)."""
    for number in reversed(range(len(lives))):
        incarnation, born_s = lives[number]
        if incarnation == loss.incarnation and born_s <= loss.seen_s:
            return born_s, lives[number + 1][1] if number + 1 < len(lives) else math.inf
    return -math.inf, next((born_s for _, born_s in lives if born_s > loss.seen_s), math.inf)


def _silent_since(words: Sequence[Event], seen_s: float) -> float:
    """The last sign of life of the rank that fell silent first; when the driver saw it, if none ever spoke."""
    last: dict[str, float] = {}
    for event in words:
        last[event.rank] = event.end_s
    return min(last.values(), default=seen_s)


def _notices(event: Event, lost: int, worked: bool) -> bool:
    """A successor that is behind proves the loss of a working replica, as its absence does."""
    if event.kind is Kind.QUORUM:
        return lost not in event.detail.get("contributors" if worked else "members", ())
    return event.kind is Kind.EXCHANGE_FAILED


def _contributes(event: Event, replica: int) -> bool:
    return event.kind is Kind.QUORUM and replica in event.detail.get("contributors", ())


def _recomputed(told: _Told, gone: Collection[int], step: int, lost_s: float, until_s: float) -> int:
    """Work that began after the loss, by ranks of survivors that had begun the same step's work before."""
    began = [e for e in told.works.get(step, ()) if replica_of(e.rank) not in gone]
    before = {e.rank for e in began if e.end_s < lost_s}
    return sum(1 for e in began if lost_s <= e.end_s < until_s and e.rank in before)


def _stall(told: _Told, gone: Collection[int], lost_s: float, noticed_s: float) -> float | None:
    """Over all ranks of survivors, the most time by which the steps that overlap the loss took longer than the median of the
    steps around them; None if the record of these steps is of none of them whole."""
    stalls: list[float] = []
    for rank, steps in told.steps.items():
        if replica_of(rank) in gone:
            continue
        first, end = bisect_left(steps, lost_s, key=_end), bisect_right(steps, noticed_s, key=_begin)
        hit, calm = steps[first:end], [*steps[max(0, first - _AROUND) : first], *steps[end : end + _AROUND]]
        whole = all(before[1] == after[0] for before, after in zip(hit, hit[1:], strict=False))
        if hit and calm and whole and hit[0][0] <= lost_s and noticed_s <= hit[-1][1]:
            usual_s = statistics.median(end - begin for begin, end in calm)
            stalls.append(max(0.0, sum(end - begin for begin, end in hit) - len(hit) * usual_s))
    return max(stalls, default=None)


def _begin(step: tuple[float, float]) -> float:
    return step[0]


def _end(step: tuple[float, float]) -> float:
    return step[1]
