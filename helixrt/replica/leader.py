"""The leader of a replica: drives the step machine, and tells the ranks.

In: reports of the ranks, answers of the membership service and of the run's store. Out: commands.
The machine (`helixrt.protocol.step.machine`) decides; this only carries out, in two threads: one feeds
events to the machine, one does whatever blocks (a quorum, the store), of which there is never
more than one at a time. Follows DESIGN.md, "The life of a step".
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from helixrt.errors import Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord, Kind
from helixrt.replica.commands import Broken, Digested, RankCommand, RankReport
from helixrt.replica.contracts import Membership
from helixrt.replica.runlog import RunLog
from helixrt.timeouts import Timeouts

STORE_PAUSE_S = 0.5  # before an unanswered store is asked again


@dataclasses.dataclass
class LeaderHooks:
    """What the job adds; called in the leader's event thread, so they must not block for long (`resting`: in
    the coordination thread, where it may, and may raise Retryable).

    `decided(index, record)`: the log has this entry; write it durably. `ordered(command)`: it was
    sent to the ranks. `resting(done)`: the last step is done; returns True when this replica may
    leave, called again and again. `broken(error)`: end this process. `doing(what)`: around each action, for the
    progress report.
    """

    decided: Callable[[int, CommitRecord], None]
    ordered: Callable[[RankCommand], None]
    resting: Callable[[StepMachine], bool]
    broken: Callable[[BaseException], None]
    doing: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()


class Leader:
    """One per replica, on its first rank. `tell` sends a command to all ranks of the replica, in order."""

    def __init__(
        self,
        machine: StepMachine,
        membership: Membership,
        log: RunLog,
        addresses: tuple[str, ...],
        tell: Callable[[RankCommand], None],
        record: FlightRecord,
        timeouts: Timeouts,
        hooks: LeaderHooks,
    ) -> None:
        self.machine, self.membership, self.log, self.addresses = machine, membership, log, addresses
        self.tell, self.record, self.timeouts, self.hooks = tell, record, timeouts, hooks
        self.digests: dict[int, Digested] = {}
        self._events: queue.Queue[tuple[int, RankReport] | p.Event | None] = queue.Queue()
        self._blocking: queue.Queue[Callable[[], p.Event] | None] = queue.Queue()
        self._fetched: dict[str, set[int]] = {}
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._event_loop, name="helixrt-leader", daemon=True),
            threading.Thread(target=self._blocking_loop, name="helixrt-coordination", daemon=True),
        ]

    def start(self) -> None:
        """Begin the first step."""
        self._events.put(p.Begin())
        for thread in self._threads:
            thread.start()

    def report(self, ring: int, report: RankReport) -> None:
        """A rank of this replica speaks; from any thread."""
        self._events.put((ring, report))

    def close(self) -> None:
        """End the threads; a quorum call under way is left to end by its own deadline. Idempotent."""
        self._closed.set()
        self._events.put(None)
        self._blocking.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=1.0)

    # ---------------------------------------------------------------- events

    def _event_loop(self) -> None:
        try:
            while (item := self._events.get()) is not None and not self._closed.is_set():
                event = self._hear(*item) if isinstance(item, tuple) else item
                if event is not None:
                    for action in self.machine.on(event):
                        with self.hooks.doing(type(action).__name__.lower()):
                            self._perform(action)
        except BaseException as error:
            self.hooks.broken(error)

    def _hear(self, ring: int, report: RankReport) -> p.Event | None:
        """The event that a rank's report completes, if any."""
        match report:
            case p.RingDone() | p.RingFailed():
                return report
            case p.FetchFailed():
                self._fetched.pop(report.lineage, None)
                return report
            case p.Fetched():
                ranks = self._fetched.setdefault(report.lineage, set())
                ranks.add(ring)
                if len(ranks) < self.machine.rings:
                    return None
                del self._fetched[report.lineage]
                return report
            case Digested():
                self.digests[ring] = report
                return None
            case Broken():
                raise StartAgain(f"rank {ring} of replica {self.machine.replica}: {report.reason}")

    # ---------------------------------------------------------------- actions

    def _perform(self, action: p.Action) -> None:
        match action:
            case p.Join():
                self.record.step = self.machine.held_step + 1
                self.record.write(Kind.QUORUM_JOIN, lineage=action.me.lineage)
                me = dataclasses.replace(action.me, addresses=self.addresses)
                known = len(self.machine.log)
                self._blocking.put(lambda: self._join(me, known))
            case p.Append():
                self.record.write(Kind.VOTE, generation=action.record.generation, step=action.record.step)
                self._blocking.put(lambda: self._append(action))
            case p.ReadLog():
                self._blocking.put(lambda: self._read(action.index))
            case p.Persist():
                self._decided(action)
            case p.Rest():
                self._blocking.put(self._rest)
            case p.Reload():
                raise StartAgain("no member holds a state of the chain: this replica starts again from durable state")
            case _:
                self._order(action)

    def _order(self, command: RankCommand) -> None:
        if isinstance(command, p.Apply):
            record = command.record
            self.record.write(
                Kind.COMMIT,
                step=record.step,
                generation=record.generation,
                record=record.hash,
                contributors=list(record.contributors),
            )
        elif isinstance(command, p.Exchange) and self.machine.attempt is not None:
            attempt = self.machine.attempt
            self.record.step = attempt.candidate.step
            self.record.write(
                Kind.QUORUM,
                generation=attempt.generation,
                members=list(command.members),
                contributors=list(command.contributors),
                behind=list(attempt.assessment.behind),
            )
        elif isinstance(command, p.FetchState | p.FetchReduced):
            self._fetched.clear()  # a newer fetch replaces an older, answers included
        self.tell(command)
        self.hooks.ordered(command)

    def _decided(self, action: p.Persist) -> None:
        before = self.machine.log.entries[action.index - 1] if action.index else None
        if before is not None and action.record.parent != before.hash:
            self.record.write(Kind.SUPERSEDE, step=action.record.step, old=before.hash, new=action.record.hash)
        self.hooks.decided(action.index, action.record)

    # ---------------------------------------------------------------- what blocks

    def _blocking_loop(self) -> None:
        try:
            while (call := self._blocking.get()) is not None and not self._closed.is_set():
                self._events.put(call())
        except BaseException as error:
            self.hooks.broken(error)

    def _join(self, me: Member, known: int) -> p.Event:
        try:
            formed = self.membership.join(me, self.timeouts.join_s)
            return p.Formed(formed.generation, formed.members, tuple(self.log.read_from(known)))
        except Retryable as error:
            self._closed.wait(STORE_PAUSE_S)
            return p.JoinFailed(str(error))

    def _append(self, action: p.Append) -> p.Event:
        try:
            return p.Appended(action.index, self.log.append(action.index, action.record))
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
            return p.StoreLost()

    def _read(self, index: int) -> p.Event:
        try:
            return p.LogRead(tuple(self.log.read_from(index)))
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
            return p.StoreLost()

    def _rest(self) -> p.Event:
        try:
            if self.hooks.resting(self.machine):
                self._closed.set()
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
        self._closed.wait(0.1)
        return p.Rested()
