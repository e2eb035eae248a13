"""When a replica is started, killed, started again or given up, and when the run ends.

In: what happened (`Event`), the time (a number), the state, the options. Out: the new state and
the decisions, which the controller executes. Pure: no clock, no process, no store; the same
code runs with local processes, with Ray and in simulation.

A replica is the unit of failure (FT-HSDP, section 3): one unexpected end of one of its ranks ends
all of them, and a new incarnation of all is started. The new one waits until the old one's ranks
are known to be gone (for at most `gone_s`: a rank on a lost node never reports).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

CONFIG_EXIT = 2  # exit code of a rank whose settings cannot work: no restart will help
FATAL_EXIT = 70  # exit code of a rank that met a Fatal: its process cannot go on, a new one may


class Phase(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"  # incarnation 0 was started and has not joined a quorum yet
    RUNNING = "running"  # has joined
    LOST = "lost"  # a rank ended unexpectedly; waits for the rest to be gone and for the backoff
    RESTARTING = "restarting"  # a later incarnation was started and has not joined yet
    FINISHED = "finished"  # said that it is done; how its ranks end no longer matters
    GIVEN_UP = "given_up"  # will not be started again


ACTIVE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})  # its ranks should live
SETTLED = frozenset({Phase.FINISHED, Phase.GIVEN_UP})  # nothing more is expected of it


@dataclass(frozen=True)
class ReplicaState:
    """One replica: its phase since when and why, and what is known of its newest incarnation.

    Incarnations count from 0, so `incarnation` is also how often the replica was restarted.
    `ended` names the ranks of the newest incarnation that ended; `fatals` counts FATAL_EXITs.
    """

    phase: Phase = Phase.STARTING
    since_s: float = 0.0
    why: str = ""
    incarnation: int = 0
    ended: frozenset[str] = frozenset()
    fatals: int = 0


@dataclass(frozen=True)
class Options:
    """What the decisions depend on. Times in seconds."""

    replicas: int
    ranks_per_replica: int
    max_restarts: int = 3  # of one replica, in all
    fatal_restarts: int = 2  # of one replica after FATAL_EXIT
    start_timeout_s: float = 120.0  # from start to the first quorum
    backoff_s: float = 1.0  # before the second restart; doubles with each; the first is immediate
    backoff_max_s: float = 30.0
    gone_s: float = 5.0  # how long a restart waits for the old incarnation's ranks to be gone


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
    """A rank's process ended; `code` as in subprocess, `reason` names the rank and its log."""

    replica: int
    incarnation: int
    rank: str
    code: int
    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Began | ReplicaRunning | ReplicaDone | RankEnded | Tick


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


Decision = StartReplica | KillReplica | GiveUp | StopRun


@dataclass(frozen=True)
class RunState:
    """All replicas, and how the run was stopped (None while it goes on)."""

    replicas: tuple[ReplicaState, ...]
    stopped: StopRun | None = None

    @staticmethod
    def initial(options: Options) -> RunState:
        return RunState(tuple(ReplicaState() for _ in range(options.replicas)))


def backoff_s(restarts: int, options: Options) -> float:
    """Pause before the next restart of a replica that was restarted `restarts` times: 0, b, 2b, 4b …"""
    if restarts == 0:
        return 0.0
    return min(options.backoff_max_s, options.backoff_s * 2.0 ** min(restarts - 1, 60))


def severity(code: int) -> int:
    """Order of exits seen at one moment, likeliest root cause first.

    A rank that was killed or that blames itself comes before one that complains of a peer.
    """
    return 0 if code in (CONFIG_EXIT, FATAL_EXIT) else 1 if code < 0 else 2 if code else 3


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
        if isinstance(event, RankEnded) and event.code == CONFIG_EXIT and event.incarnation == replica.incarnation:
            stop = StopRun(False, event.reason)
            return RunState(state.replicas, stop), (stop,)
        replicas_[index], made = _decide_replica(index, replica, event, now, options)
        decisions += made
    stopped = _end_of_run(tuple(replicas_))
    return RunState(tuple(replicas_), stopped), (*decisions, stopped) if stopped else tuple(decisions)


def _decide_replica(
    index: int, replica: ReplicaState, event: Event, now: float, options: Options
) -> tuple[ReplicaState, tuple[Decision, ...]]:
    if isinstance(event, ReplicaRunning):
        if replica.phase in (Phase.STARTING, Phase.RESTARTING) and event.incarnation == replica.incarnation:
            return replace(replica, phase=Phase.RUNNING, since_s=now, why=""), ()
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
            fatals = replica.fatals + (event.code == FATAL_EXIT)
            replica, decisions = _lose(index, replace(replica, fatals=fatals), event.reason, now, options)
    elif replica.phase in (Phase.STARTING, Phase.RESTARTING) and now - replica.since_s >= options.start_timeout_s:
        why = f"replica {index} did not run {options.start_timeout_s:g} s after its start (step_timeout_s sets this limit)"
        replica, decisions = _lose(index, replica, why, now, options)
    if replica.phase is Phase.LOST and _may_restart(replica, now, options):
        replica = replace(
            replica, phase=Phase.RESTARTING, since_s=now, incarnation=replica.incarnation + 1, ended=frozenset()
        )
        decisions = (*decisions, StartReplica(index, replica.incarnation))
    return replica, decisions


def _lose(
    index: int, replica: ReplicaState, why: str, now: float, options: Options
) -> tuple[ReplicaState, tuple[Decision, ...]]:
    if replica.incarnation >= options.max_restarts or replica.fatals > options.fatal_restarts:
        gone = replace(replica, phase=Phase.GIVEN_UP, since_s=now, why=why)
        return gone, (KillReplica(index), GiveUp(index, why))
    return replace(replica, phase=Phase.LOST, since_s=now, why=why), (KillReplica(index),)


def _may_restart(replica: ReplicaState, now: float, options: Options) -> bool:
    waited = now - replica.since_s
    gone = len(replica.ended) >= options.ranks_per_replica or waited >= options.gone_s
    return gone and waited >= backoff_s(replica.incarnation, options)


def _end_of_run(replicas: tuple[ReplicaState, ...]) -> StopRun | None:
    """Ends when nothing is expected of any replica; fails when none finished, with the first cause."""
    if any(r.phase not in SETTLED for r in replicas):
        return None
    given_up = sorted((r for r in replicas if r.phase is Phase.GIVEN_UP), key=lambda r: r.since_s)
    if len(given_up) == len(replicas):
        return StopRun(False, given_up[0].why)
    return StopRun(True, "; ".join(f"given up: {r.why}" for r in given_up))
