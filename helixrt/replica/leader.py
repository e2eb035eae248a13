"""The leader of a replica: drives the step machine, and commands the ranks.

In: reports of the ranks, answers of the membership service and of the run's store. Out: commands.
The machine (`helixrt.protocol.step.machine`) decides; this only carries out. The thread that brings an event (a rank's report,
the answer to a call) also handles it, unless another thread is at it: then that one takes it next. So events are handled in
order, one at a time, and a step needs no hand-over to a thread of the leader's own. That thread also appends the step's record:
everybody waits for it. One thread, `helixrt-coordination`, makes the other calls that block (a quorum, the store), of which
there is never more than one at a time. In a run of one replica a quorum does not wait, and the thread that handles an event
joins as well, but once in `ASK_S`, when the store is asked whether the replica is to leave; in one of a single rank its
records are put in the background (`appends`). Follows DESIGN.md, "The life of a step".
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from helixrt.errors import Fatal, MisuseError, Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord, Kind
from helixrt.replica.appends import Appends, GatheredAppends
from helixrt.replica.commands import (
    Broken,
    Digested,
    LoadDurable,
    LoadedDurable,
    Measured,
    OrderPrepared,
    PrepareOrder,
    RankCommand,
    RankReport,
    StopAsked,
)
from helixrt.replica.contracts import Membership
from helixrt.replica.evidence import Holders
from helixrt.replica.leader_hooks import LeaderHooks
from helixrt.replica.runlog import RunLog
from helixrt.timeouts import Timeouts

ASK_S = 0.05  # between two questions of a replica alone whether it is to leave
STORE_PAUSE_S = 0.5  # before an unanswered store is asked again
WAIT_PAUSE_S = 0.5  # between two quorums that wait for a holder of newer state
HOLD_PAUSE_S = 0.1  # between two looks for the end of a fetch that all wait for
LOAD_ATTEMPTS = 5  # to read a checkpoint that the others do not delete meanwhile


@dataclasses.dataclass(frozen=True)
class _Leave:
    """The replica leaves now, between two quorums, for this reason."""

    why: str


_Call = Callable[[], p.Event | LoadDurable | _Leave | None]
_Item = tuple[int, RankReport] | p.Event | LoadDurable | PrepareOrder | _Leave  # what is handled


class Leader:
    """One per replica, on its first rank. `tell` sends a command to all ranks of the replica, in order."""

    def __init__(
        self,
        machine: StepMachine,
        membership: Membership,
        log: RunLog,
        holders: Holders,
        addresses: tuple[str, ...],
        tell: Callable[[RankCommand], None],
        record: FlightRecord,
        timeouts: Timeouts,
        hooks: LeaderHooks,
    ) -> None:
        self.machine, self.membership, self.log, self.addresses = machine, membership, log, addresses
        self.holders = holders
        self.tell, self.record, self.timeouts, self.hooks = tell, record, timeouts, hooks
        self.digests: dict[int, Digested] = {}
        self.initial = ""  # digest of the state that this replica began with; "" if it is not compared
        self._events: deque[_Item] = deque()  # not handled yet
        self._handling = threading.Lock()  # held by the thread that handles events
        self._blocking: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._own: deque[_Call] = deque()  # calls that the thread that handles events makes itself
        self._fetched: dict[str, set[int]] = {}
        self._loaded: dict[int, bool] = {}  # rank -> whether it found the durable state that all are to load
        self._preparing: PrepareOrder | None = None  # ranks do so between two steps
        self._prepared: dict[int, OrderPrepared] = {}  # rank -> its answer for the order that is made ready
        self._done: list[_Item] = []  # ranks that were done meanwhile
        self._loads, self._newer_than = 0, -1
        self._fence_read = False  # for the append that the quorum comes right after
        self._asks_at = 0.0  # when it is asked again whether this replica is to leave
        self.appends = Appends(log, holders.check_fence)
        if membership.alone and machine.group_world_size == 1:
            self.appends = GatheredAppends(log, holders.check_fence, hooks.decided, hooks.broken)
        self._closed = threading.Event()
        self._failed = False  # handling an event has raised; written by the thread that handles
        self._thread = threading.Thread(target=self._blocking_loop, name="helixrt-coordination", daemon=True)

    def start(self) -> None:
        """Begin the first step."""
        self._thread.start()
        self._take(p.Begin())

    def report(self, group_rank: int, report: RankReport) -> None:
        """An event of a rank of this replica; from any thread. May handle this and other events before it returns; never
        raises."""
        self._take((group_rank, report))

    def prepare(self, order: str, rehearsal: bool = False) -> None:
        """Have all ranks make this order of the schedule ready, and work by it then, unless this is a `rehearsal`. From any
        thread, one order at a time."""
        self._take(PrepareOrder(order, rehearsal))

    def stop(self) -> None:
        """Handle no event any more; from any thread."""
        self._closed.set()

    def close(self) -> None:
        """End the threads; a quorum call under way is left to end by its own deadline. Idempotent."""
        self.appends.close()
        self._closed.set()
        self._blocking.put(None)
        if self._handling.acquire(timeout=1.0):
            self._handling.release()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    # ---------------------------------------------------------------- events

    def _take(self, item: _Item) -> None:
        """Handle this after what came before, here or in the thread that is at it."""
        self._events.append(item)
        while self._events and not (self._closed.is_set() or self._failed):  # again: one may have come while the lock was held
            if not self._handling.acquire(blocking=False):
                return
            try:
                while self._events and not self._closed.is_set():
                    self._handle(self._events.popleft())
                    while self._own and not self._closed.is_set():
                        if (outcome := self._own.popleft()()) is not None:
                            self._events.append(outcome)
            except BaseException as error:
                self._failed = True
                self.hooks.broken(error)
            finally:
                self._handling.release()

    def _handle(self, item: _Item) -> None:
        if isinstance(item, _Leave):
            self.hooks.departed(self.machine, item.why)
            self._closed.set()
            return
        if isinstance(item, LoadDurable):
            self._loaded.clear()
            self._order(item)
            return
        if isinstance(item, PrepareOrder):
            self._preparing = item
            self._prepared.clear()
            self._order(item)
            return
        if self._preparing is not None and isinstance(item, tuple) and isinstance(item[1], p.RankDone):
            self._done.append(item)  # else the step that ranks prepare for would begin by the order of before
            return
        event = self._hear(*item) if isinstance(item, tuple) else item
        if event is not None:
            with self.hooks.doing(type(event).__name__.lower()):
                for action in self.machine.on(event):
                    self._perform(action)

    def _hear(self, group_rank: int, report: RankReport) -> p.Event | None:
        """The event that a rank's report completes, if any."""
        match report:
            case p.RankDone() | p.RankFailed() | p.Examined():
                return report
            case p.FetchFailed():
                self._fetched.pop(report.lineage, None)
                return report
            case p.Fetched():
                ranks = self._fetched.setdefault(report.lineage, set())
                ranks.add(group_rank)
                if len(ranks) < self.machine.group_world_size:
                    return None
                del self._fetched[report.lineage]
                return report
            case Digested():
                self.digests[group_rank] = report
                return None
            case LoadedDurable():
                self._loaded[group_rank] = report.found
                if len(self._loaded) < self.machine.group_world_size:
                    return None
                if all(self._loaded.values()):
                    return p.Reloaded(report.lineage)
                self._loads += 1
                if self._loads >= LOAD_ATTEMPTS:
                    raise Fatal(f"{self._loads} checkpoints in turn were deleted, or damaged, when this replica read them")
                self._blocking.put(lambda: self._reload(self._newer_than))
                return None
            case OrderPrepared():
                return self._order_prepared(group_rank, report)
            case StopAsked():
                self.machine.stop = self.machine.stop or report.reason  # in every account of this replica from now on
                return None
            case Measured():
                self.hooks.measured(report.times)
                return None
            case Broken():
                raise StartAgain(f"rank {group_rank} of replica {self.machine.replica}: {report.reason}")

    def _order_prepared(self, group_rank: int, report: OrderPrepared) -> p.Event | None:
        self._prepared[group_rank] = report
        if len(self._prepared) < self.machine.group_world_size:
            return None
        asked, self._preparing = self._preparing, None
        assert asked is not None, "no order is made ready"
        answers, self._prepared = self._prepared, {}
        self._events.extendleft(reversed(self._done))  # behind the event that this gives
        self._done = []
        failed = next((f"rank {rank}: {each.failed}" for rank, each in sorted(answers.items()) if each.failed), "")
        self.hooks.prepared(report.order, max(each.seconds for each in answers.values()), failed)
        return None if failed or asked.rehearsal else p.OrderReady(report.order)

    # ---------------------------------------------------------------- actions

    def _perform(self, action: p.Action) -> None:
        match action:
            case p.Join():
                self.record.step = self.machine.held_step + 1
                self.record.write(Kind.QUORUM_JOIN, lineage=action.me.lineage)
                known, me = len(self.machine.log), action.me
                if not self.membership.alone or known == 1:  # else no replica fetches from it or compares its initial state
                    me = dataclasses.replace(me, addresses=self.addresses, initial=self.initial)
                if self.membership.alone and self._fence_read and time.monotonic() < self._asks_at:
                    self._own.append(lambda: self._join(me, known, asks=False))
                else:
                    self._blocking.put(lambda: self._join(me, known))
            case p.Append():
                self.record.write(Kind.VOTE, generation=action.record.generation, step=action.record.step)
                self._own.append(lambda: self._append(action))
            case p.ReadLog():
                self._blocking.put(lambda: self._read(action.index))
            case p.Persist():
                self._decided(action)
            case p.Rest():
                self._blocking.put(self._rest)
            case p.FetchState() | p.FetchReduced():
                self._begin_fetch(action)
            case p.Wait():
                self.hooks.waiting(action)
                self._blocking.put(lambda: self._wait(action))
            case p.WaitOver():
                self._blocking.put(lambda: self._wait_over(action))
            case p.Hold():
                self._blocking.put(self._hold)
            case p.Restart():
                raise Fatal(f"replica {self.machine.replica} starts again: {action.reason}")
            case p.Refuse():
                raise MisuseError(action.reason)
            case p.Differ():
                self._blocking.put(lambda: self.hooks.differ(action))
            case p.Tell():
                self.hooks.say(action.text)
            case p.Reload():
                self._newer_than, self._loads = action.newer_than, 0
                self._blocking.put(lambda: self._reload(action.newer_than))
            case _:
                self._order(action)

    def _begin_fetch(self, action: p.FetchState | p.FetchReduced) -> None:
        """The holder entry comes first: replicas that wait for a holder of the head must find this replica."""
        try:
            self.holders.claim(action.lineage, self.machine.log)
        except Retryable as error:
            self._take(p.FetchFailed(action.lineage, str(error)))
            return
        self._order(action)

    def _order(self, command: RankCommand) -> None:
        if isinstance(command, p.Apply):
            record = command.record
            self.record.write(
                Kind.COMMIT,
                step=record.step,
                generation=record.generation,
                record=record.hash,
                contributors=list(record.replicas),
                excluded={str(r): e.rank for r, e in record.excluded.items()},
                applied=record.applied,
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
        before = self.machine.log.entry(action.index - 1) if action.index else None
        if before is not None and action.record.parent != before.hash:
            self.record.write(Kind.SUPERSEDE, step=action.record.step, old=before.hash, new=action.record.hash)
        if self.appends.stands_already(action.index):  # else `appends` calls `decided` later
            self.hooks.decided(action.index, action.record)

    # ---------------------------------------------------------------- what blocks

    def _blocking_loop(self) -> None:
        try:
            while (call := self._blocking.get()) is not None and not self._closed.is_set():
                outcome = call()
                if outcome is not None:
                    self._take(outcome)
        except BaseException as error:
            self.hooks.broken(error)

    def _join(self, me: Member, known: int, asks: bool = True) -> p.Event | _Leave | None:
        try:
            if not (self.membership.alone and self._fence_read):  # alone it forms right behind the append
                self.holders.check_fence()
            self._fence_read = False
            if asks:
                self._asks_at = time.monotonic() + ASK_S
                if why := self.hooks.leaving():
                    self.appends.flush()
                    return _Leave(why)
            formed = self.membership.join(me, self.timeouts.join_s)
            # Alone, a replica puts all entries behind one of its own: a predecessor, which is fenced, can put none there.
            read = not (self.membership.alone and self.appends.own_stands)
            entries = tuple(self.log.read_from(known)) if read else ()
            if known + len(entries) == 1 and (instead := self.hooks.agree(formed, me)) is not None:
                return instead
            return p.Formed(formed.generation, formed.members, entries, self.log.begin)
        except Retryable as error:
            return self._later(p.JoinFailed(str(error)))

    def _append(self, action: p.Append) -> p.Event | None:
        try:
            stands = self.appends.append(action.index, action.record)
            self._fence_read = True
            return p.Appended(action.index, stands)
        except Retryable:
            return self._later(p.StoreLost())

    def _read(self, index: int) -> p.Event | None:
        try:
            return p.LogRead(tuple(self.log.read_from(index)))
        except Retryable:
            return self._later(p.StoreLost())

    def _later(self, event: p.Event) -> p.Event | None:
        """None: it is handled after a pause, for which the thread that handles events, and may be the one that computes, does
        not wait."""
        self._blocking.put(lambda: None if self._closed.wait(STORE_PAUSE_S) else event)
        return None

    def _wait(self, action: p.Wait) -> p.Event | None:
        self._closed.wait(WAIT_PAUSE_S)
        try:
            self.holders.check_fence()
            evidence = self.holders.evidence(self.machine.log, action.head, action.missing, action.generation)
            return p.WaitEnded(evidence)
        except Retryable:
            self._blocking.put(lambda: self._wait(action))
            return None

    def _wait_over(self, action: p.WaitOver) -> None:
        try:
            self.holders.wait_over(action.head, action.generation)
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
            self._blocking.put(lambda: self._wait_over(action))

    def _hold(self) -> p.Event:
        self._closed.wait(HOLD_PAUSE_S)
        return p.HoldEnded()

    def _reload(self, newer_than: int) -> p.Event | LoadDurable | None:
        """Choose the durable state that all ranks load, and write the holder entry for it."""
        try:
            lineage = self.hooks.durable(newer_than)
            if lineage is None:
                return p.Reloaded(self.machine.held)
            self.holders.claim(lineage, self.machine.log)
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
            self._blocking.put(lambda: self._reload(newer_than))
            return None
        return LoadDurable(lineage, initial=lineage == self.machine.log.genesis)

    def _rest(self) -> p.Event:
        try:
            self.appends.flush()
            if self.hooks.resting(self.machine):
                self._closed.set()
        except Retryable:
            self._closed.wait(STORE_PAUSE_S)
        self._closed.wait(0.1)
        return p.Rested()
