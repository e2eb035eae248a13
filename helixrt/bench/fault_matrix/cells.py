"""The cells of the fault matrix, and what each of them must show. Pure: no process, no clock.

In: what ranks answered, and when. Out: a `Finding` per cell: what is wrong (nothing, it is hoped), and how long
survivors were blocked after the fault struck.

What is asked of survivors (FT-HSDP section 4.2 asks for less: there a collective's time-out ends a hang):

- a death, or a peer that talks garbage: whoever waits raises `Retryable` within 200 ms;
- a stopped process, or a link that is down beyond the host: within 1.5 heartbeat periods;
- what is no failure of a member (slow, its interpreter lock held for seconds, a connection that broke, a stranger, a
  straggler of an older generation, a full disk, a jumping clock): nothing; the sums are exact, also for the struck rank;
- always: no hang, no other exception, no wrong sum, and the next generation's sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Consequence(Enum):
    """What a fault means to the others."""

    GONE = "gone"  # known at once
    SILENT = "silent"  # noticed within 1.5 periods
    NONE = "none"  # no failure


class Fault(Enum):
    """Strikes rank `VICTIM`; the stranger and the straggler are a fourth process that claims to be a rank."""

    KILL = ("SIGKILL", Consequence.GONE)
    STOP = ("SIGSTOP", Consequence.SILENT)
    EXIT = ("exit", Consequence.GONE)
    EXCEPTION = ("exception", Consequence.GONE)
    CLOSED = ("closed socket", Consequence.NONE)  # all its connections; the process lives, they are made anew
    HALF_OPEN = ("half-open socket", Consequence.SILENT)
    SLOW = ("slow peer", Consequence.NONE)
    HELD = ("interpreter lock held", Consequence.NONE)  # for longer than any silence is borne; its kernel acknowledges
    GARBAGE = ("garbage", Consequence.GONE)
    SECRET = ("wrong secret", Consequence.NONE)
    STALE = ("older generation", Consequence.NONE)
    DISK = ("full disk for logs", Consequence.NONE)
    CLOCK = ("clock jump", Consequence.NONE)

    def __init__(self, title: str, consequence: Consequence) -> None:
        self.title, self.consequence = title, consequence


class Phase(Enum):
    """Where the victim is when the fault strikes."""

    CONNECTING = "connecting"  # in its first generation, its dials begun
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
    def parts(self) -> bool:
        """The victim leaves while nobody needs it, and says farewell: known at once, and a failure to who needs it next."""
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

    FINE = "fine"  # and its sum, if it was an all-reduce, exact
    WRONG = "wrong sum"
    RETRYABLE = "retryable"  # it raised what it may raise
    CRASHED = "crashed"  # it raised something else
    ENDED = "ended"  # the process did not live to answer
    HUNG = "hung"


@dataclass(frozen=True)
class Answer:
    """What one rank said of one call. `end_s` is monotonic time, the same clock in all processes of a machine."""

    rank: int
    outcome: Outcome
    end_s: float = 0.0
    said: str = ""


@dataclass(frozen=True)
class Refusals:
    """What a rank turned away so far: see `transport.contract.Refused`."""

    strangers: int
    stale: int


@dataclass
class Observed:
    """Everything that came of one cell."""

    cell: Cell
    struck_s: float = 0.0  # monotonic; of who parted: when it was needed
    struck: dict[int, Answer] = field(default_factory=dict)  # to the call that the fault fell into
    noticed_s: dict[int, float] = field(default_factory=dict)  # idle: when a survivor's endpoint reported the loss
    after: list[Answer] = field(default_factory=list)  # of everything that must be fine
    victim: Answer | None = None  # of a victim that was silent and came back: it must have learnt that it is out
    refusals: dict[int, Refusals] = field(default_factory=dict)  # of a stranger's or straggler's cell
    exit_codes: dict[int, int | None] = field(default_factory=dict)  # of who must leave in peace


@dataclass(frozen=True)
class Finding:
    """What a cell showed. `unblocked_s`: of each survivor that the fault kept waiting, from the fault on."""

    cell: Cell
    problems: tuple[str, ...]
    unblocked_s: tuple[float, ...]
    said: tuple[str, ...]

    def late(self, heartbeat_s: float) -> bool:
        return any(s > self.cell.bound_s(heartbeat_s) for s in self.unblocked_s)


def judge(seen: Observed, timeout_s: float) -> Finding:
    """`timeout_s`: of the ranks' calls; a survivor that only this unblocked had hung."""
    cell = seen.cell
    fails = cell.consequence is not Consequence.NONE
    problems = [f"{_who(answer)} afterwards: {_what(answer)}" for answer in seen.after if answer.outcome is not Outcome.FINE]
    must_raise = fails and cell.phase is not Phase.SHUTTING_DOWN
    wanted = Outcome.RETRYABLE if must_raise else Outcome.FINE
    for rank, answer in seen.struck.items():
        if rank != VICTIM and answer.outcome is not wanted:
            problems.append(f"rank {rank} is to be {wanted.value}: {_what(answer)}")
        if rank == VICTIM and not fails and answer.outcome is not Outcome.FINE:
            problems.append(f"the struck rank is to be fine: {_what(answer)}")
    problems += [f"rank {rank} did not answer" for rank in SURVIVORS if rank not in seen.struck]
    if seen.victim is not None:
        allowed = {Outcome.RETRYABLE} if must_raise else {Outcome.RETRYABLE, Outcome.FINE}
        if seen.victim.outcome not in allowed:
            problems.append(f"the struck rank, back again: {_what(seen.victim)}")
    problems += _not_refused(cell, seen.refusals)
    problems += [f"rank {rank} left with exit code {code}" for rank, code in seen.exit_codes.items() if code != 0]
    ended = dict(seen.noticed_s)
    if cell.phase is not Phase.IDLE or cell.parts:
        ended = {rank: answer.end_s for rank, answer in seen.struck.items() if rank != VICTIM}
    if must_raise and cell.phase is Phase.IDLE:
        problems += [f"rank {rank} did not notice" for rank in SURVIVORS if rank not in ended]
    unblocked = tuple(max(0.0, end - seen.struck_s) for _, end in sorted(ended.items())) if fails else ()
    problems += [f"blocked for {s:.1f} s: nothing but its own time-out ended it" for s in unblocked if s >= 0.9 * timeout_s]
    said = tuple(answer.said for rank, answer in sorted(seen.struck.items()) if answer.said and rank != VICTIM)
    return Finding(cell, tuple(problems), unblocked, said)


def _not_refused(cell: Cell, refusals: Mapping[int, Refusals]) -> Iterable[str]:
    """A stranger that was never seen at the door shows nothing."""
    if cell.fault is Fault.SECRET and not any(r.strangers for r in refusals.values()):
        yield "no rank turned the stranger away"
    if cell.fault is Fault.STALE and not any(r.stale for r in refusals.values()):
        yield "no rank turned the straggler away"


def _who(answer: Answer) -> str:
    return f"rank {answer.rank}"


def _what(answer: Answer) -> str:
    return answer.outcome.value + (f" ({answer.said})" if answer.said else "")
