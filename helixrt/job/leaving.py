"""How a rank's process learns that its replica is to leave, and how the replica leaves: at a step boundary, with its ranks'
work in the run and no exchange broken.

In: SIGTERM or SIGHUP of the process (`TermSignal`), or the user's `helixrt drain` by way of the driver; both are the replica's
`leave_key` in the run's store. Out: commands to the ranks (`Departure`). The key is read before a quorum. Whoever leaves
says in the store that its incarnation has ended, so that the others do not wait for it; from then on it holds nothing that
they may wait for.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from helixrt.errors import Departed, Retryable
from helixrt.job.finish import ObservedMembership
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.machine import StepMachine
from helixrt.replica.commands import Exit, RankCommand, Save
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import ended_key, leave_key, saver_key, saves_key

LEAVE_S = 120.0  # for the ranks of a replica that leaves at a step boundary to end
ASK_S = 0.05  # between two quorums before which the key is read
_PAUSE_S = 0.2  # before an unanswered store is asked again


class TermSignal:
    """SIGTERM or SIGHUP of this process puts the replica's `leave_key`. A context manager, to be entered in the main thread;
    elsewhere (a Ray actor) it does nothing. SIGTERM after that ends the process; SIGHUP does not, since a terminal that is
    closed may send several. Signals that are ignored stay so.

    While `at_once` is set, no loop runs that could leave: the process ends with Departed, raised in the main thread.
    """

    def __init__(self, store: RunStore, replica: int, incarnation: int, rank: str) -> None:
        self._store, self._key, self._rank = store, leave_key(replica, incarnation), rank
        self.at_once = True
        self.departed: Departed | None = None  # what was raised for a signal
        self._ended = threading.Event()
        self._wake, self._pid = -1, -1  # the writing end of a pipe: a handler may take no lock; whose handler it is
        self._thread: threading.Thread | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> TermSignal:
        if threading.current_thread() is threading.main_thread():
            reading, self._wake = os.pipe()
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._ask, args=(reading,), name="helixrt-sigterm", daemon=True)
            self._thread.start()
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            for number, before in self._before.items():
                signal.signal(number, before or signal.SIG_DFL)
            self._ended.set()
            os.close(self._wake)
            self._thread.join(timeout=2.0)
            self._thread = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        forked = os.getpid() != self._pid  # from this process, such as a worker of a loader
        for each in self._before:
            signal.signal(each, signal.SIG_IGN if each is signal.SIGHUP and not forked else signal.SIG_DFL)
        if forked:
            os.kill(os.getpid(), number)
        elif self.at_once:
            self.departed = Departed(self._why(number))
            raise self.departed
        else:
            os.write(self._wake, bytes([number]))

    def _why(self, number: int) -> str:
        return f"{signal.Signals(number).name} to {self._rank}"

    def _ask(self, reading: int) -> None:
        """In a thread of its own: the store's client may be in use in the main thread."""
        asked = os.read(reading, 1)
        os.close(reading)
        while asked and not self._ended.is_set():
            try:
                self._store.put_if_absent(self._key, self._why(asked[0]))
                return
            except Retryable:
                self._ended.wait(_PAUSE_S)


class Departure:
    """Of one replica's leader. `saves`: checkpoints are written in this run."""

    def __init__(
        self,
        replica: int,
        incarnation: int,
        store: RunStore,
        membership: ObservedMembership,
        saves: bool,
        tell: Callable[[RankCommand], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me, self._store, self._membership = (replica, incarnation), store, membership
        self._saves, self._tell, self._clock = saves, tell, clock
        self._asked_s = -math.inf

    def due(self) -> str:
        """Why the replica is to leave before its next quorum; "" if it stays. Short steps do not all ask the store: once in
        `ASK_S`. Raises Retryable without the store."""
        now = self._clock()
        if now - self._asked_s < ASK_S:
            return ""
        self._asked_s = now
        return self._store.get(leave_key(*self._me)) or ""

    def carry_out(self, machine: StepMachine, why: str) -> None:
        """Leave: in the leader's event thread, between two quorums. The state is saved if no replica stays that has it."""
        record = machine.log.get(machine.held)
        if record is not None and not machine.following.fetching and self.saves(record):
            with suppress(Retryable):  # then its ranks have the time of a departure without a checkpoint
                self._store.put_if_absent(saves_key(*self._me), "yes")
            with suppress(Retryable):
                self._tell(Save(record, departs=True))
        with suppress(Retryable):  # then the others wait for its heartbeats to pass
            self._store.put_if_absent(ended_key(*self._me), "yes")
        self._membership.close()
        self._tell(Exit(f"{why}; the replica left after step {machine.held_step}"))

    def saves(self, record: CommitRecord) -> bool:
        """Whether this replica, which has said that it ends, saves the state of this record: no replica stays that has it."""
        return self._saves and record.step > 0 and not self._someone_stays(record) and self._saves_it(record)

    def _saves_it(self, record: CommitRecord) -> bool:
        """Of the members of the newest quorum that leave together one saves: the first to say so. True where the store does not
        answer."""
        try:
            saver = self._store.put_if_absent(saver_key(record.hash), f"{self._me}")
        except Retryable:
            return True
        return saver not in {f"{(m.replica, m.incarnation)}" for m in self._membership.members if m.replica != self._me[0]}

    def _someone_stays(self, record: CommitRecord) -> bool:
        """Whether another member of the newest quorum that holds the state of this record is not to leave. A member that is
        behind does not count: what it fetches ends with this replica. False where the store does not answer."""
        others = {(m.replica, m.incarnation): m.lineage for m in self._membership.members if m.replica != self._me[0]}
        holders = [who for who, lineage in others.items() if lineage == record.hash or who in record.committers]
        try:
            return any(self._store.get(leave_key(*who)) is None and self._store.get(ended_key(*who)) is None for who in holders)
        except Retryable:
            return False
