"""When a replica is started, killed, started again or given up, and when the run ends.

In: what happened (`Event`), the time (a number), the state, the options. Out: the new state and
the decisions, which the controller executes. Pure: no clock, no process, no store; the same
code runs with local processes, with Ray and in simulation.

A replica is the unit of failure (FT-HSDP, section 3): one unexpected end of one of its ranks ends
all of them, and a new incarnation of all is started. The new one waits until the old one's ranks
are known to be gone (for at most `gone_s`: a rank on a lost node never reports).

A replica that leaves at a step boundary, because one of its ranks got SIGTERM or because the user drains it, is not killed:
its ranks end by themselves within `leave_s` (LEFT_EXIT), or `save_s` if nobody else holds its state. It is started again; if it
is drained, only when the user says so.

Restarts have a budget, and a pause before each but the first that grows. Both begin again when the replica has contributed to
a commit. A reload that the step protocol asked for (RELOAD_EXIT), a departure (LEFT_EXIT) and time without resources for the
ranks do not count against the budget.

Errors that would come again are not tried again. MISUSE_EXIT and DIVERGED_EXIT end the run, and so does CONFIG_EXIT at the
first start; later it gives the replica up. An exception of the program (FATAL_EXIT) that ends a replica again at the same
place, without a commit between, gives the replica up; if a replica on another host has met it, too, it ends the run. One that
all replicas have met ends the run at once.
A batch on which two incarnations of a replica ended while they worked on it is a poison batch;
`on_poison` says whether the run stops or the batch is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

CONFIG_EXIT = 2  # exit code of a rank whose settings or model cannot work there: no restart there will help
MISUSE_EXIT = 64  # EX_USAGE: of a rank whose program breaks a rule of the API; every replica runs that program
DIVERGED_EXIT = 65  # EX_DATAERR: of a rank whose replica holds another state than the others; the run ends, and may go back
FATAL_EXIT = 70  # exit code of a rank that met a Fatal: its process cannot go on, a new one may
RETRY_EXIT = 75  # EX_TEMPFAIL: of a rank for which something else broke (a stage of its replica, the store)
RELOAD_EXIT = 76  # exit code of a rank that must start again from durable state without a failure of its own

LEFT_EXIT = 77  # exit code of a rank whose replica left at a step boundary, as it was asked to

STOP, SKIP = "stop", "skip"
ON_POISON = (STOP, SKIP)


class Phase(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"  # incarnation 0 was started and has not joined a quorum yet
    RUNNING = "running"  # has joined
    LOST = "lost"  # a rank ended unexpectedly; waits for the rest to be gone and for the backoff
    RESTARTING = "restarting"  # a later incarnation was started and has not joined yet
    FINISHED = "finished"  # said that it is done; how its ranks end no longer matters
    GIVEN_UP = "given_up"  # will not be started again
    DRAINED = "drained"  # has left, and is started again when the user says so


ACTIVE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})  # its ranks should live
SETTLED = frozenset({Phase.FINISHED, Phase.GIVEN_UP, Phase.DRAINED})  # nothing more is expected of it


@dataclass(frozen=True)
class ReplicaState:
    """One replica: its phase since when and why, and what is known of its newest incarnation.

    Incarnations count from 0, so `incarnation` is also how often the replica was restarted.
    `ended` names the ranks of the newest incarnation that ended. `losses`, `failures` and `fatals` count since the replica's
    newest commit: every loss, those that count against the budget, those with FATAL_EXIT. `code`: by which exit code the newest
    loss is judged; None if no rank's end was its cause. `error`, `host`: the newest exception since that commit, and where;
    `repeats`: how often in turn. `batch`: the position that
    the newest incarnation that ended during work was working on, and why it ended. `left`: the newest loss was a departure,
    before which the replica `saves` its state. `drained`: the user wants it to leave, and to stay away.
    """

    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    why: str = ""
    incarnation: int = 0
    ended: frozenset[str] = frozenset()
    losses: int = 0
    failures: int = 0
    fatals: int = 0
    code: int | None = None
    error: str = ""
    host: str = ""
    repeats: int = 0
    batch: tuple[int, str] | None = None
    left: bool = False
    saves: bool = False
    drained: bool = False


@dataclass(frozen=True)
class Options:
    """What the decisions depend on. Times in seconds."""

    replicas: int
    ranks_per_replica: int
    max_restarts: int = 3  # of one replica, without a commit of it between them
    fatal_restarts: int = 2  # of these, after FATAL_EXIT
    start_timeout_s: float = 120.0  # from start to the first step; time without resources, or asked for, does not count
    backoff_s: float = 1.0  # before the second restart without a commit; doubles with each; the first is immediate
    backoff_max_s: float = 30.0
    gone_s: float = 5.0  # how long a restart waits for the old incarnation's ranks to be gone
    leave_s: float = 120.0  # how long the ranks of a replica that leaves have to end by themselves
    save_s: float = 120.0  # the same for a replica that saves its state before
    on_poison: str = STOP  # what happens to a batch that ends the same replica twice: stop | skip


@dataclass(frozen=True)
class Began:
    """The run begins: start everything."""


@dataclass(frozen=True)
class ReplicaRunning:
    """This incarnation has joined a quorum."""

    replica: int
    incarnation: int


@dataclass(frozen=True)
class ReplicaDone:
    """The replica has trained to the end and written what it had to."""

    replica: int


@dataclass(frozen=True)
class RankEnded:
    """A rank's process ended; `code` as in subprocess, `reason` names the rank and its log.

    `position`: of the batch that the rank was working on, None if it did something else. `saves`: the replica leaves, and the
    other ranks may still write their parts of a checkpoint. `error`, `host`: as of `RankExit`.
    """

    replica: int
    incarnation: int
    rank: str
    code: int
    reason: str
    position: int | None = None
    saves: bool = False
    error: str = ""
    host: str = ""


@dataclass(frozen=True)
class Committed:
    """This incarnation has contributed to a step that was committed."""

    replica: int
    incarnation: int


@dataclass(frozen=True)
class RankStuck:
    """A rank's process lives and makes no progress; `reason` names the rank. `position` as in `RankEnded`."""

    replica: int
    incarnation: int
    rank: str
    reason: str
    position: int | None = None


@dataclass(frozen=True)
class CapacityAwaited:
    """The launcher has no resources yet for a rank of this incarnation."""

    replica: int
    incarnation: int


@dataclass(frozen=True)
class TimeAsked:
    """A rank of this incarnation does something for which it has asked for time, and has some of it left."""

    replica: int
    incarnation: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Began | ReplicaRunning | Committed | ReplicaDone | RankEnded | RankStuck | CapacityAwaited | TimeAsked | Tick


@dataclass(frozen=True)
class StartReplica:
    replica: int
    incarnation: int


@dataclass(frozen=True)
class KillReplica:
    replica: int


@dataclass(frozen=True)
class GiveUp:
    replica: int
    reason: str


@dataclass(frozen=True)
class StopRun:
    """The last decision of a run. With `ok` the ranks are let go, else they are killed."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class SkipBatch:
    """No incarnation of the replica that starts later works on the batch at `position` of its stream."""

    replica: int
    position: int
    reason: str


Decision = StartReplica | KillReplica | GiveUp | SkipBatch | StopRun


@dataclass(frozen=True)
class RunState:
    """All replicas, whether any of them has joined a quorum, and how the run was stopped (None while it goes on)."""

    replicas: tuple[ReplicaState, ...]
    has_run: bool = False
    stopped: StopRun | None = None

    @staticmethod
    def initial(options: Options) -> RunState:
        return RunState(tuple(ReplicaState() for _ in range(options.replicas)))


def backoff_s(restarts: int, options: Options) -> float:
    """Pause before the next restart of a replica that was restarted `restarts` times without a commit: 0, b, 2b, 4b …"""
    if restarts <= 0:
        return 0.0
    return min(options.backoff_max_s, options.backoff_s * 2.0 ** min(restarts - 1, 60))


def severity(code: int) -> int:
    """Order of exits seen at one moment, likeliest root cause first.

    A rank that was killed or that blames itself comes before one that complains of a peer.
    """
    if code in (CONFIG_EXIT, MISUSE_EXIT, FATAL_EXIT):
        return 0
    return 1 if code < 0 else 3 if code in (0, RELOAD_EXIT, LEFT_EXIT) else 2


def decide(state: RunState, event: Event, now: float, options: Options) -> tuple[RunState, tuple[Decision, ...]]:
    """The new state and what to do, in order. After `StopRun` nothing is decided any more."""
    if state.stopped is not None:
        return state, ()
    if isinstance(event, Began):
        replicas = tuple(replace(r, since_s=now) for r in state.replicas)
        return RunState(replicas), tuple(StartReplica(i, r.incarnation) for i, r in enumerate(replicas))
    replicas_, decisions = list(state.replicas), list[Decision]()
    for index, replica in enumerate(state.replicas):
        if not isinstance(event, Tick) and event.replica != index:
            continue
        if isinstance(event, RankEnded) and event.incarnation == replica.incarnation and (why := _ends_run(state, event)):
            stop = StopRun(False, why)
            return replace(state, stopped=stop), (stop,)
        replicas_[index], made = _decide_replica(index, replica, event, now, options)
        decisions += made
    has_run = state.has_run or any(r.phase in (Phase.RUNNING, Phase.FINISHED) for r in replicas_)
    stopped = next((d for d in decisions if isinstance(d, StopRun)), None)
    if stopped is None and (stopped := _end_of_run(tuple(replicas_))):
        decisions.append(stopped)
    return RunState(tuple(replicas_), has_run, stopped), tuple(decisions)


def _ends_run(state: RunState, ended: RankEnded) -> str:
    """Why this end of a rank ends the run; "" if it does not, or only its replica."""
    if ended.code in (MISUSE_EXIT, DIVERGED_EXIT):  # a rule that all replicas break; states that no restart makes equal
        return ended.reason
    if ended.code == CONFIG_EXIT and ended.incarnation == 0 and not state.has_run:
        return ended.reason
    replica = state.replicas[ended.replica]
    if ended.code != FATAL_EXIT or not ended.error or replica.phase in SETTLED:
        return ""
    others = [r for i, r in enumerate(state.replicas) if i != ended.replica and r.phase is not Phase.DRAINED]
    same = [r for r in others if r.error == ended.error]
    if others and len(same) == len(others):
        return f"the same error in all replicas: {ended.reason}"
    if replica.error == ended.error and any(r.host != ended.host for r in same):
        return f"the same error on several hosts, and again after a restart: {ended.reason}"
    return ""


def _decide_replica(
    index: int, replica: ReplicaState, event: Event, now: float, options: Options
) -> tuple[ReplicaState, tuple[Decision, ...]]:
    starting = replica.phase in (Phase.STARTING, Phase.RESTARTING)
    if isinstance(event, ReplicaRunning):
        if starting and event.incarnation == replica.incarnation:
            return replace(replica, phase=Phase.RUNNING, since_s=now, why=""), ()
        return replica, ()
    if isinstance(event, Committed):
        if event.incarnation == replica.incarnation:
            return replace(replica, losses=0, failures=0, fatals=0, error="", repeats=0), ()
        return replica, ()
    if isinstance(event, CapacityAwaited | TimeAsked):
        if starting and event.incarnation == replica.incarnation:
            return replace(replica, since_s=now), ()
        return replica, ()
    if isinstance(event, ReplicaDone):
        # A replica that said so is done even if it was lost right after: its result is written.
        if replica.phase in SETTLED:
            return replica, ()
        return replace(replica, phase=Phase.FINISHED, since_s=now, why=""), ()
    decisions: tuple[Decision, ...] = ()
    if isinstance(event, RankEnded):
        if event.incarnation != replica.incarnation or event.rank in replica.ended:
            return replica, ()
        replica = replace(replica, ended=replica.ended | {event.rank})
        if replica.phase in ACTIVE:
            replica, decisions = _lose(index, replica, event, event.reason, now, options)
        elif replica.phase is Phase.LOST and _is_its_cause(replica, event):
            replica = _count(replace(replica, why=event.reason), event)
            if _hopeless(replica, options):
                replica, decisions = _give_up(index, replica, now, options)
        if replica.phase is Phase.LOST and replica.left and event.code not in (0, LEFT_EXIT):
            replica = replace(replica, saves=False)  # its part of the checkpoint will not come
    elif isinstance(event, RankStuck):
        if event.incarnation != replica.incarnation or replica.phase not in ACTIVE:
            return replica, ()
        replica, decisions = _lose(index, replica, event, event.reason, now, options)
    elif starting and now - replica.since_s >= options.start_timeout_s:
        limit = "(step_timeout_s sets this limit; session.busy asks for more)"
        why = f"replica {index} did not run {options.start_timeout_s:g} s after its start {limit}"
        replica, decisions = _lose(index, replica, event, why, now, options)
    if replica.phase is Phase.LOST and _may_restart(replica, now, options):
        if replica.left and len(replica.ended) < options.ranks_per_replica:
            decisions = (*decisions, KillReplica(index))
        if replica.drained:
            return replace(replica, phase=Phase.DRAINED, since_s=now), decisions
        replica = replace(replica, phase=Phase.RESTARTING, since_s=now, incarnation=replica.incarnation + 1, ended=frozenset())
        decisions = (*decisions, StartReplica(index, replica.incarnation))
    return replica, decisions


def _lose(
    index: int, replica: ReplicaState, event: Event, why: str, now: float, options: Options
) -> tuple[ReplicaState, tuple[Decision, ...]]:
    code = event.code if isinstance(event, RankEnded) else None
    replica = replace(replica, phase=Phase.LOST, since_s=now, why=why, losses=replica.losses + 1, code=code)
    replica = replace(replica, left=code == LEFT_EXIT, saves=isinstance(event, RankEnded) and event.saves)
    if replica.left:
        return replica, ()
    if code != RELOAD_EXIT:
        replica = _count(replica, event)
    position = event.position if isinstance(event, RankEnded | RankStuck) and code != RELOAD_EXIT else None
    poison: tuple[Decision, ...] = ()
    if position is not None and replica.batch is not None and replica.batch[0] == position:
        poison = (_poisoned(index, position, replica.batch[1], why, options),)
        if options.on_poison == STOP:
            return replace(replica, phase=Phase.GIVEN_UP), (KillReplica(index), *poison)
        replica = replace(replica, batch=None, error="", repeats=0)
    elif position is not None:
        replica = replace(replica, batch=(position, why))
    if _hopeless(replica, options):
        return _give_up(index, replica, now, options)
    return replica, (KillReplica(index), *poison)


def _poisoned(index: int, position: int, before: str, now: str, options: Options) -> Decision:
    what = f"the batch at position {position} of replica {index}'s stream ended this replica twice: {before}; then: {now}"
    if options.on_poison == SKIP:
        return SkipBatch(index, position, what)
    return StopRun(False, f"{what}; on_poison=skip leaves such a batch out")


def _count(replica: ReplicaState, event: Event) -> ReplicaState:
    """Put a loss on the budgets."""
    if not isinstance(event, RankEnded):
        return replace(replica, failures=replica.failures + 1)
    fatal, new = event.code == FATAL_EXIT, replica.code in (event.code, RELOAD_EXIT, LEFT_EXIT)  # else it was put there already
    replica = replace(replica, code=event.code, failures=replica.failures + new, fatals=replica.fatals + fatal)
    if not (fatal and event.error):
        return replica
    repeats = replica.repeats + 1 if event.error == replica.error else 1
    return replace(replica, error=event.error, host=event.host, repeats=repeats)


def _is_its_cause(replica: ReplicaState, ended: RankEnded) -> bool:
    """Whether the rank that left first only followed this one. A rank that was killed did not, and later signals may be the
    controller's own."""
    return ended.code > 0 and replica.code is not None and replica.code >= 0 and severity(ended.code) < severity(replica.code)


def _hopeless(replica: ReplicaState, options: Options) -> str:
    """Why the replica is not started again after the newest loss; empty if it is."""
    if replica.code == CONFIG_EXIT:
        return "this would come again"
    if replica.repeats > 1:
        return "the same error again after a restart, without a commit"
    fatal = ("exception", replica.fatals, "fatal_restarts", options.fatal_restarts)
    for what, count, name, budget in (fatal, ("failure", replica.failures, "restarts", options.max_restarts)):
        if count > budget:
            return f"{count} {what}{'s' if count > 1 else ''} without a commit ({name}={budget})"
    return ""


def _give_up(index: int, replica: ReplicaState, now: float, options: Options) -> tuple[ReplicaState, tuple[Decision, ...]]:
    why = f"{_hopeless(replica, options)}: {replica.why}"
    return replace(replica, phase=Phase.GIVEN_UP, since_s=now, why=why), (KillReplica(index), GiveUp(index, why))


def _may_restart(replica: ReplicaState, now: float, options: Options) -> bool:
    waited = now - replica.since_s
    leave_s = max(options.leave_s, options.save_s) if replica.saves else options.leave_s
    gone = len(replica.ended) >= options.ranks_per_replica or waited >= (leave_s if replica.left else options.gone_s)
    return gone and waited >= backoff_s(replica.losses - 1, options)


def _end_of_run(replicas: tuple[ReplicaState, ...]) -> StopRun | None:
    """Ends when nothing is expected of any replica; fails when none finished, with the first cause."""
    if any(r.phase not in SETTLED for r in replicas):
        return None
    given_up = sorted((r for r in replicas if r.phase is Phase.GIVEN_UP), key=lambda r: r.since_s)
    if all(r.phase is not Phase.FINISHED for r in replicas):
        return StopRun(False, given_up[0].why if given_up else "every replica was drained")
    return StopRun(True, "; ".join(f"given up: {r.why}" for r in given_up))
