"""Trouble on purpose: which moment of a step a flight event is, and when a kill or a command is due.

In: `ChaosConfig` and the events of a rank's own flight record. Out: one call of `kill`, and commands that are run.

The n-th kill listed for a replica (by step) belongs to its n-th life, its incarnation counted from
0; so each happens once, and a restarted replica is not killed by what killed it before. A kill at
`fetch` belongs to incarnation 1 at the earliest, since only a replica that came back fetches; it is
due at once, whatever its step, for such a replica does not know yet which step it will join.
A kill is due at the first such moment in its step or, if the replica had none there (no checkpoint is
due, it was fetching), in a later one.

A command is run once in a run, at the first such moment of its replica in or after its step, in whatever life; the thread
that came to the moment waits for it.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace

from helixrt.errors import Fatal
from helixrt.record import Event, FlightRecord, Kind
from helixrt.train.config import ChaosConfig, CommandConfig, KillConfig

DRIVER = -1
COMMAND_S = 60.0  # a command may take so long

MOMENTS = (
    "before_quorum",  # about to join the step's quorum
    "forward",  # after the first forward operation
    "exchange_early",  # after the first bucket was exchanged
    "exchange_late",  # after the last bucket was exchanged
    "before_commit",  # voted, the record not put yet
    "after_record",  # the record is in the store, the update not applied
    "checkpoint",  # while a checkpoint is half written
    "fetch",  # after the first shard of a fetch
    "driver",  # the driver itself, replica -1
)


class ChaosSink:
    """Attach it to a rank's FlightRecord, after the sink that writes the file.

    Calls `kill()` at most once, from the thread that wrote the event; `kill` should end all processes
    of the replica and need not return. With `record`, the kill is noted in the flight record first, as is a command.
    `claim(i)`: whether command i of the settings is this rank's to run; asked when it is due.
    """

    def __init__(
        self,
        config: ChaosConfig,
        replica: int,
        incarnation: int,
        kill: Callable[[], None],
        record: FlightRecord | None = None,
        claim: Callable[[int], bool] = lambda index: True,
    ) -> None:
        self._due = kill_of(config, replica, incarnation)
        self._commands = {index: command for index, command in enumerate(config.run) if command.replica == replica}
        self._claim = claim
        self._kill, self._record = kill, record
        self._buckets: tuple[int, int, int] = (-1, -1, 0)  # step, generation, buckets done

    def __call__(self, event: Event) -> None:
        if event.kind is Kind.EXCHANGE_BUCKET:
            key = (event.step, int(event.detail["generation"]))
            self._buckets = (*key, self._buckets[2] + 1 if self._buckets[:2] == key else 1)
        if self._due is None and not self._commands:
            return
        moments = moments_of(event, self._buckets[2])
        for index, command in list(self._commands.items()):
            if command.moment in moments and event.step >= command.step:
                del self._commands[index]
                if self._claim(index):
                    self._run(command, event.step)
        due = self._due
        if due is None or due.moment not in moments:
            return
        if event.step < due.step and due.moment != "fetch":
            return
        self._due = None
        if self._record is not None:
            self._record.write(Kind.FAILURE, step=event.step, replica=due.replica, reason=f"chaos: killed at {due.moment}")
        self._kill()

    def _run(self, command: CommandConfig, step: int) -> None:
        begin_s = self._record.clock() if self._record is not None else 0.0
        run_command(command.command)
        if self._record is not None:
            self._record.write(Kind.CHAOS, begin_s=begin_s, step=step, command=command.command)


def run_command(command: str) -> None:
    """Run it to its end. Raises Fatal if it cannot be run, or fails."""
    try:
        done = subprocess.run(
            shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Fatal(f"chaos: {command!r}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Fatal(f"chaos: {command!r} ended with {done.returncode}" + (f": {said[-1]}" if said else ""))


def kill_of(config: ChaosConfig, replica: int, incarnation: int) -> KillConfig | None:
    """The kill that belongs to this life of the replica, if any. `replica` is DRIVER for the driver."""
    life = 0
    for kill in sorted((k for k in config.kill if k.replica == replica), key=lambda k: k.step):
        life = max(life, 1) if kill.moment == "fetch" else life
        if life == incarnation:
            return replace(kill)
        life += 1
    return None


def driver_is_due(config: ChaosConfig, step: int) -> bool:
    """Whether the driver has to kill itself now that the run has committed `step`. A resumed run passes none."""
    kill = kill_of(config, DRIVER, 0)
    return kill is not None and step >= kill.step


def moments_of(event: Event, buckets_done: int) -> tuple[str, ...]:
    """Which moments an event is; `buckets_done` counts this generation's exchanged buckets, this one included."""
    match event.kind:
        case Kind.QUORUM_JOIN:
            return ("before_quorum",)
        case Kind.OPERATION if event.detail.get("op") == "F":
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
