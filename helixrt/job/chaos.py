"""Fault injection: which moment of a step a flight event is, and when a kill, a fault or a command is due.

In: `ChaosConfig` and the events of a rank's own flight record. Out: one call of `kill`, faults that are inflicted on
this process (`chaos_actions`), and commands that are run.

Kills and faults end a life of their replica, but for `slow`. The n-th of them listed for a replica (by step) belongs to
its n-th life, its incarnation counted from 0; so each happens once, and a restarted replica does not meet what ended it
before. One at `fetch` belongs to incarnation 1 at the earliest, since only a replica that came back fetches; it is due
at once, whatever its step, for such a replica does not know yet which step it will join.
It is due at the first such moment in its step or, if the replica had none there (no checkpoint is due, it was
fetching), in a later one. A kill is carried out by the first rank that comes to the moment, a fault by the rank it names.

A command and a `slow` fault happen once in a run, at the first such moment of their replica (a fault: of its rank) in or
after their step, in whatever life; the thread that came to the moment waits.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

from helixrt.errors import Fatal
from helixrt.job.chaos_actions import inflict
from helixrt.job.config import ChaosConfig, CommandConfig, FaultConfig, KillConfig
from helixrt.record import Event, FlightRecord, Kind

DRIVER = -1
COMMAND_S = 60.0  # a command may take so long

MOMENTS = (
    "before_quorum",  # about to join the step's quorum
    "forward",  # after the first forward operation; of a plain module, whose operations are not recorded, after its backwards
    "exchange_early",  # after the first bucket was exchanged
    "exchange_late",  # after the last bucket was exchanged
    "before_commit",  # voted, the record not put yet
    "after_record",  # the record is in the store (in a run of one process: on its way), the update not applied
    "checkpoint",  # while a checkpoint is half written
    "fetch",  # after the first shard of a fetch
    "driver",  # the driver itself, replica -1
)
LEADER_MOMENTS = ("before_quorum", "before_commit", "after_record")  # of a replica's first rank alone
FAULTS = ("stop", "hang", "hang_lock", "slow", "exception", "oom")
SLOW = "slow"


def fault_moments(kind: str) -> tuple[str, ...]:
    """Where a fault of this kind can happen. A thread that hangs while it writes a checkpoint looks like slow storage,
    for which there is no limit: nobody would end it."""
    return tuple(m for m in MOMENTS if m != "driver" and (kind, m) != ("hang", "checkpoint"))


class ChaosSink:
    """Attach it to a rank's FlightRecord, after the sink that writes the file.

    Calls `kill()` at most once, from the thread that wrote the event; `kill` should end all processes
    of the replica and need not return. With `record`, what is done is noted in the flight record first.
    `claim(name)`: whether a command or a slow fault of the settings is this rank's to carry out; asked when it is due.
    `rank` is this rank's number in its replica.
    """

    def __init__(
        self,
        config: ChaosConfig,
        replica: int,
        incarnation: int,
        kill: Callable[[], None],
        record: FlightRecord | None = None,
        claim: Callable[[str], bool] = lambda name: True,
        rank: int = 0,
    ) -> None:
        self._due = due_in(config, replica, incarnation)
        if isinstance(self._due, FaultConfig) and self._due.rank != rank:
            self._due = None
        self._commands = {index: command for index, command in enumerate(config.run) if command.replica == replica}
        self._slow = {
            index: fault
            for index, fault in enumerate(config.fault)
            if fault.kind == SLOW and (fault.replica, fault.rank) == (replica, rank)
        }
        self._claim = claim
        self._kill, self._record = kill, record
        self._buckets: tuple[int, int, int] = (-1, -1, 0)  # step, generation, buckets done

    def __call__(self, event: Event) -> None:
        if event.kind is Kind.EXCHANGE_BUCKET:
            key = (event.step, int(event.detail["generation"]))
            self._buckets = (*key, self._buckets[2] + 1 if self._buckets[:2] == key else 1)
        if self._due is None and not self._commands and not self._slow:
            return
        moments = moments_of(event, self._buckets[2])
        for index, command in list(self._commands.items()):
            if command.moment in moments and event.step >= command.step:
                del self._commands[index]
                if self._claim(f"run/{index}"):
                    self._run(command, event.step)
        for index, fault in list(self._slow.items()):
            if fault.moment in moments and event.step >= fault.step:
                del self._slow[index]
                if self._claim(f"fault/{index}"):
                    self._delay(fault, event.step)
        due = self._due
        if due is None or due.moment not in moments:
            return
        if event.step < due.step and due.moment != "fetch":
            return
        self._due = None
        if isinstance(due, FaultConfig):
            self._note(event.step, due.replica, f"chaos: {due.kind} at {due.moment} on rank {due.rank}")
            inflict(due)
        else:
            self._note(event.step, due.replica, f"chaos: killed at {due.moment}")
            self._kill()

    def _note(self, step: int, replica: int, reason: str) -> None:
        if self._record is not None:
            self._record.write(Kind.FAILURE, step=step, replica=replica, reason=reason)

    def _delay(self, fault: FaultConfig, step: int) -> None:
        begin_s = self._record.clock() if self._record is not None else 0.0
        inflict(fault)
        if self._record is not None:
            what = f"{fault.seconds:g} s slower at {fault.moment} on rank {fault.rank}"
            self._record.write(Kind.CHAOS, begin_s=begin_s, step=step, command=what)

    def _run(self, command: CommandConfig, step: int) -> None:
        begin_s = self._record.clock() if self._record is not None else 0.0
        run_command(command.command)
        if self._record is not None:
            self._record.write(Kind.CHAOS, begin_s=begin_s, step=step, command=command.command)


def run_command(command: str) -> None:
    """Run it to its end. Raises Fatal if it cannot be run, or fails."""
    try:
        done = subprocess.run(shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Fatal(f"chaos: {command!r}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Fatal(f"chaos: {command!r} ended with {done.returncode}" + (f": {said[-1]}" if said else ""))


def due_in(config: ChaosConfig, replica: int, incarnation: int) -> KillConfig | FaultConfig | None:
    """The kill or fault that belongs to this life of the replica, if any. `replica` is DRIVER for the driver."""
    life = 0
    ends: list[KillConfig | FaultConfig] = [*config.kill, *(f for f in config.fault if f.kind != SLOW)]
    for end in sorted((e for e in ends if e.replica == replica), key=lambda e: e.step):
        life = max(life, 1) if end.moment == "fetch" else life
        if life == incarnation:
            return end
        life += 1
    return None


def driver_is_due(config: ChaosConfig, step: int) -> bool:
    """Whether the driver has to kill itself now that the run has committed `step`. A resumed run passes none."""
    kill = due_in(config, DRIVER, 0)
    return kill is not None and step >= kill.step


def moments_of(event: Event, buckets_done: int) -> tuple[str, ...]:
    """Which moments an event is; `buckets_done` counts this generation's exchanged buckets, this one included."""
    match event.kind:
        case Kind.QUORUM_JOIN:
            return ("before_quorum",)
        case Kind.OPERATION if event.detail.get("op") == "F":
            return ("forward",)
        case Kind.WORK_END:  # a stage has had its first forward before
            return ("forward",)
        case Kind.EXCHANGE_BUCKET:
            early = ("exchange_early",) if buckets_done == 1 else ()
            late = ("exchange_late",) if buckets_done == event.detail["buckets"] else ()
            return early + late
        case Kind.VOTE:
            return ("before_commit",)
        case Kind.COMMIT:
            return ("after_record",)
        case Kind.CHECKPOINT_BEGIN:
            return ("checkpoint",)
        case Kind.FETCH_SHARD:
            return ("fetch",)
        case _:
            return ()
