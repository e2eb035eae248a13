"""Which rank of a replica is stuck: its process lives, and it makes no progress although it should.

In: the ranks' progress reports (`helixrt.replica.progress`) and how much time was observed since the last look. Out:
what is known of each rank (`RankWatch`), and the rank that is most likely the cause (`Stuck`), or nobody. Pure: time is
what the caller says it observed, so a driver that was stopped meanwhile accuses nobody.

A rank is stuck when
- it has not reported for the limit: its process is stopped, or its interpreter lock is held; or
- one of its threads has been in the same command for the limit and has completed no part of it. A thread that
  waits for orders is not in a command. An exchange that waits for gradients is not stuck while the main thread
  makes progress, or has asked for more time and has time left.
The limit is `step_s`, before the rank's first committed step `start_s`, and at least what the thread itself has asked
for (`limit_s` of its report). Ranks of a replica wait for each other, so several are stuck at once: one that does not
report comes first, then one that computes, then one that waits for a rank of its replica. One that waits is not stuck
while the main thread of another rank has asked for more time and has time left, and has the whole limit again after
that (`excused`): the other rank goes on where it was, and sends what is waited for only then. One that has waited for the
limit is itself named only if no other rank has completed nothing for half of it: who began to wait before its neighbour
stopped reaches the limit before that neighbour does. A main thread that is in the user's loop between two steps (LOOP) has
nothing to complete, and is not stuck for that; it is the cause where another rank, or its own exchange, waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from helixrt.replica.progress import EXCHANGE, LOOP, MAIN, ProgressReport, ThreadReport


@dataclass(frozen=True)
class Limits:
    """Times in seconds without progress; `look_s` is the most that one look may add to the observed time."""

    step_s: float
    start_s: float
    look_s: float


@dataclass(frozen=True)
class RankWatch:
    """One rank: its newest report, for how long (observed seconds) there is none after it, and for how long each
    thread (by name) has completed nothing."""

    report: ProgressReport
    silent_s: float = 0.0
    still_s: Mapping[str, float] = field(default_factory=dict)


class Suspicion(IntEnum):
    """The most likely cause first."""

    SILENT = 0
    COMPUTING = 1
    WAITING = 2  # for another rank of its replica


@dataclass(frozen=True)
class Stuck:
    rank: str
    suspicion: Suspicion
    reason: str


def observe(watch: RankWatch | None, report: ProgressReport | None, elapsed_s: float, limits: Limits) -> RankWatch | None:
    """What is known of a rank after a look that found `report` (None: there is none), `elapsed_s` after the last one."""
    elapsed_s = min(elapsed_s, limits.look_s)
    if report is None or (watch is not None and report.sequence == watch.report.sequence):
        return watch and RankWatch(watch.report, watch.silent_s + elapsed_s, watch.still_s)
    if watch is None:
        return RankWatch(report, still_s={t.thread: 0.0 for t in report.threads})
    before = {t.thread: t.completed for t in watch.report.threads}
    now = {t.thread: t.completed for t in report.threads}
    still = {}
    for thread, completed in now.items():
        moved = before.get(thread) != completed or (thread == EXCHANGE and before.get(MAIN) != now.get(MAIN))
        still[thread] = 0.0 if moved else watch.still_s.get(thread, 0.0) + watch.silent_s + elapsed_s
    return RankWatch(report, 0.0, still)


def excused(watches: Mapping[str, RankWatch], limits: Limits) -> dict[str, RankWatch]:
    """The ranks of one replica, after a look, without the time that they waited for one that has asked for more and has time
    left. The time of a rank that itself waits does not count: ranks that wait for each other would never be found."""
    busy = {rank for rank, watch in watches.items() if _has_time_left(watch, limits) and not _waits(watch)}
    return {rank: _restarted(watch) if _waits(watch) and busy - {rank} else watch for rank, watch in watches.items()}


def _waits(watch: RankWatch) -> bool:
    return any(t.thread == MAIN and t.waits_for_peer for t in watch.report.threads)


def _restarted(watch: RankWatch) -> RankWatch:
    """An exchange waits for the gradients of the main thread, which waits."""
    waiting = {t.thread for t in watch.report.threads if t.waits_for_peer or t.thread == EXCHANGE}
    return replace(watch, still_s={thread: 0.0 if thread in waiting else s for thread, s in watch.still_s.items()})


def most_likely_stuck(watches: Mapping[str, RankWatch], limits: Limits) -> Stuck | None:
    """Of the ranks of one replica, by name."""
    likely = _likeliest(watches, limits)
    if likely is None or likely.suspicion is not Suspicion.WAITING:
        return likely
    return complaint(watches, likely.rank, limits) or likely


def _likeliest(watches: Mapping[str, RankWatch], limits: Limits, loops: bool = False) -> Stuck | None:
    """`loops`: a main thread in the user's loop counts."""
    found = [s for rank, watch in watches.items() if (s := _stuck(rank, watch, limits, loops)) is not None]
    likely = min(found, key=lambda s: (s.suspicion, s.rank), default=None)
    if likely is not None and likely.suspicion is Suspicion.WAITING:
        if any(_has_time_left(watch, limits) for rank, watch in watches.items() if rank != likely.rank):
            return None
    return likely


def complaint(watches: Mapping[str, RankWatch], ended: str, limits: Limits) -> Stuck | None:
    """Who, if anybody, the rank `ended` waited for, and gave up: another rank of its replica that has completed nothing for
    half the limit. It may give up before the limit, when its link to that rank fails."""
    others = {rank: watch for rank, watch in watches.items() if rank != ended}
    halved = replace(limits, step_s=limits.step_s / 2, start_s=limits.start_s / 2)
    likely = _likeliest(others, halved, loops=True)
    return None if likely is None or likely.suspicion is Suspicion.WAITING else likely


def asks_for_time(watch: RankWatch) -> bool:
    """Whether a thread of the rank has asked for time, and has some of it left."""
    return any(_has_left(watch, t) for t in watch.report.threads)


def _has_left(watch: RankWatch, thread: ThreadReport) -> bool:
    return watch.still_s.get(thread.thread, 0.0) + watch.silent_s < thread.limit_s


def _has_time_left(watch: RankWatch, limits: Limits) -> bool:
    """Whether the main thread has asked for more than the usual time, and has some of it left."""
    usual_s = limits.step_s if watch.report.committed else limits.start_s
    return any(t.thread == MAIN and t.limit_s > usual_s and _has_left(watch, t) for t in watch.report.threads)


def _stuck(rank: str, watch: RankWatch, limits: Limits, loops: bool) -> Stuck | None:
    report = watch.report
    usual_s = limits.step_s if report.committed else limits.start_s
    silence_s = max((t.limit_s for t in report.threads), default=0.0)
    if watch.silent_s >= max(usual_s, silence_s):
        last = "; last: " + ", ".join(_said(t) for t in report.threads) if report.threads else ""
        why = f"has not reported for {watch.silent_s:.0f} s: it is stopped, or its interpreter lock is held{last}"
        return Stuck(rank, Suspicion.SILENT, why)
    every = [t for t in report.threads if watch.still_s.get(t.thread, 0.0) >= max(usual_s, t.limit_s)]
    still = [t for t in every if t.doing != LOOP]
    if _has_time_left(watch, limits):  # the exchange may wait for gradients of that thread
        still = [t for t in still if t.thread != EXCHANGE]
    loop = [t for t in every if t.doing == LOOP]
    if not still and not (loops and loop):
        return None
    waits = {t.thread for t in (*still, *loop) if t.waits_for_peer or (t.thread == EXCHANGE and _waits(watch))}
    thread = min([*still, *loop], key=lambda t: (t.thread in waits, t.thread != MAIN, t.thread))
    suspicion = Suspicion.WAITING if thread.thread in waits else Suspicion.COMPUTING
    why = f"has made no progress for {watch.still_s[thread.thread]:.0f} s: {_said(thread)}"
    return Stuck(rank, suspicion, why)


def _said(thread: ThreadReport) -> str:
    return f"{thread.thread} thread in {thread.doing}" + (f" at {thread.where}" if thread.where else "")
