"""The cells of the fault matrix, and what each of them must show. Pure: no process, no clock.

In: what ranks answered, and when. Out: a `Finding` per cell: the problems, and how long survivors were blocked after the
fault.

Requirements for survivors (FT-HSDP section 4.2 requires less: there a collective's time-out ends a hang):

- a process ended, or a peer sends garbage: each waiting call raises `Retryable` within 200 ms;
- a process is stopped, or a link is down beyond the host: within 1.5 heartbeat periods;
- a fault that is no failure of a member (slow, its interpreter lock held for seconds, a connection that broke, an
  unauthenticated process, a process of an older generation, a full disk, a jumping clock): no error; the sums are exact, also
  those of the victim;
- always: no hang, no other exception, no wrong sum, and the next generation's sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Consequence(Enum):
    """How the other ranks must react to a fault."""

    GONE = "gone"  # detected at once
    SILENT = "silent"  # detected within 1.5 heartbeat periods
    NONE = "none"  # no failure


class Fault(Enum):
    """Injected into rank `VICTIM`; for SECRET and STALE a fourth process claims to be a rank."""

    KILL = ("SIGKILL", Consequence.GONE)
    STOP = ("SIGSTOP", Consequence.SILENT)
    EXIT = ("exit", Consequence.GONE)
    EXCEPTION = ("exception", Consequence.GONE)
    CLOSED = ("closed socket", Consequence.NONE)  # all its connections; the process continues and connects again
    HALF_OPEN = ("half-open socket", Consequence.SILENT)
    SLOW = ("slow peer", Consequence.NONE)
    HELD = ("interpreter lock held", Consequence.NONE)  # for longer than the silence limit; its kernel acknowledges
    GARBAGE = ("garbage", Consequence.GONE)
    SECRET = ("wrong secret", Consequence.NONE)
    STALE = ("older generation", Consequence.NONE)
    DISK = ("full disk for logs", Consequence.NONE)
    CLOCK = ("clock jump", Consequence.NONE)

    def __init__(self, title: str, consequence: Consequence) -> None:
        self.title, self.consequence = title, consequence


class Phase(Enum):
    """What the victim does when the fault is injected."""

    CONNECTING = "connecting"  # in its first generation, after its connection attempts have begun
    IDLE = "idle"  # no operation anywhere
    REDUCE_SCATTER = "reduce-scatter"  # the first of its partial sums is ready to be sent on
    ALL_GATHER = "all-gather"  # about to send the second chunk of its totals, in the last partition
    RECONFIGURING = "reconfiguring"  # as connecting, in the second generation
    SHUTTING_DOWN = "shutting down"  # has begun to close, as the others do


RANKS, VICTIM = 3, 1  # the victim dials one of the others and is dialled by the other one
SURVIVORS = (0, 2)
DEATH_S = 0.2  # bounds for survivors
SILENCE_PERIODS = 1.5


@dataclass(frozen=True)
class Cell:
    fault: Fault
    phase: Phase
    transport: str = "tcp"

    def __str__(self) -> str:
        return f"{self.fault.title}, {self.phase.value}, {self.transport}"

    @property
    def consequence(self) -> Consequence:
        return self.fault.consequence

    @property
    def leaves_idle(self) -> bool:
        """The victim leaves between operations, with a farewell message. The others detect it at once, and their next operation
        with it fails."""
        return self.phase is Phase.IDLE and self.fault in (Fault.EXIT, Fault.EXCEPTION)

    def bound_s(self, heartbeat_s: float) -> float:
        return SILENCE_PERIODS * heartbeat_s if self.consequence is Consequence.SILENT else DEATH_S


TCP_CELLS = tuple(Cell(fault, phase) for fault in Fault for phase in Phase)
SHARED_MEMORY_CELLS = tuple(
    Cell(fault, phase, "shared_memory") for fault in (Fault.KILL, Fault.STOP, Fault.EXIT, Fault.HELD) for phase in Phase
)
ALL_CELLS = TCP_CELLS + SHARED_MEMORY_CELLS


class Outcome(Enum):
    """How a call of a rank ended."""

    FINE = "fine"  # no exception; the sum of an all-reduce is exact
    WRONG = "wrong sum"
    RETRYABLE = "retryable"  # it raised Retryable
    CRASHED = "crashed"  # it raised another exception
    ENDED = "ended"  # the process ended before it answered
    HUNG = "hung"


@dataclass(frozen=True)
class Answer:
    """The result of one call of one rank. `end_s` is monotonic time, the same clock in all processes of a machine."""

    rank: int
    outcome: Outcome
    end_s: float = 0.0
    said: str = ""


@dataclass(frozen=True)
class Refusals:
    """Connections that a rank has refused so far: see `transport.contract.Refused`."""

    strangers: int
    stale: int


@dataclass
class Observed:
    """All observations of one cell."""

    cell: Cell
    fault_s: float = 0.0  # monotonic time of the fault; with `leaves_idle`: of the next operation
    answers: dict[int, Answer] = field(default_factory=dict)  # to the call during which the fault was injected
    detected_s: dict[int, float] = field(default_factory=dict)  # idle: when a survivor's endpoint reported the loss
    after: list[Answer] = field(default_factory=list)  # to all other calls; each must be FINE
    victim: Answer | None = None  # of a victim that was unreachable and came back: it must report the loss
    refusals: dict[int, Refusals] = field(default_factory=dict)  # in cells with an intruder
    exit_codes: dict[int, int | None] = field(default_factory=dict)  # of processes that must end with code 0


@dataclass(frozen=True)
class Finding:
    """The result of a cell. `unblocked_s`: for each survivor that the fault blocked, the seconds from the fault on."""

    cell: Cell
    problems: tuple[str, ...]
    unblocked_s: tuple[float, ...]
    said: tuple[str, ...]

    def late(self, heartbeat_s: float) -> bool:
        return any(s > self.cell.bound_s(heartbeat_s) for s in self.unblocked_s)


def judge(seen: Observed, timeout_s: float) -> Finding:
    """`timeout_s`: of the ranks' calls; a survivor that only this time-out unblocked counts as hung."""
    cell = seen.cell
    fails = cell.consequence is not Consequence.NONE
    problems = [
        f"{_rank(answer)} afterwards: {_outcome(answer)}" for answer in seen.after if answer.outcome is not Outcome.FINE
    ]
    must_raise = fails and cell.phase is not Phase.SHUTTING_DOWN
    wanted = Outcome.RETRYABLE if must_raise else Outcome.FINE
    for rank, answer in seen.answers.items():
        if rank != VICTIM and answer.outcome is not wanted:
            problems.append(f"rank {rank} must be {wanted.value}: {_outcome(answer)}")
        if rank == VICTIM and not fails and answer.outcome is not Outcome.FINE:
            problems.append(f"the victim must be fine: {_outcome(answer)}")
    problems += [f"rank {rank} did not answer" for rank in SURVIVORS if rank not in seen.answers]
    if seen.victim is not None:
        allowed = {Outcome.RETRYABLE} if must_raise else {Outcome.RETRYABLE, Outcome.FINE}
        if seen.victim.outcome not in allowed:
            problems.append(f"the victim, after its return: {_outcome(seen.victim)}")
    problems += _not_refused(cell, seen.refusals)
    problems += [f"rank {rank} left with exit code {code}" for rank, code in seen.exit_codes.items() if code != 0]
    ended = dict(seen.detected_s)
    if cell.phase is not Phase.IDLE or cell.leaves_idle:
        ended = {rank: answer.end_s for rank, answer in seen.answers.items() if rank != VICTIM}
    if must_raise and cell.phase is Phase.IDLE:
        problems += [f"rank {rank} did not detect the loss" for rank in SURVIVORS if rank not in ended]
    unblocked = tuple(max(0.0, end - seen.fault_s) for _, end in sorted(ended.items())) if fails else ()
    problems += [f"blocked for {s:.1f} s: only the call's own time-out ended it" for s in unblocked if s >= 0.9 * timeout_s]
    said = tuple(answer.said for rank, answer in sorted(seen.answers.items()) if answer.said and rank != VICTIM)
    return Finding(cell, tuple(problems), unblocked, said)


def _not_refused(cell: Cell, refusals: Mapping[int, Refusals]) -> Iterable[str]:
    """The cell shows nothing unless the intruder's connection was really refused."""
    if cell.fault is Fault.SECRET and not any(r.strangers for r in refusals.values()):
        yield "no rank refused the connection with a wrong secret"
    if cell.fault is Fault.STALE and not any(r.stale for r in refusals.values()):
        yield "no rank refused the connection of an older generation"


def _rank(answer: Answer) -> str:
    return f"rank {answer.rank}"


def _outcome(answer: Answer) -> str:
    return answer.outcome.value + (f" ({answer.said})" if answer.said else "")
