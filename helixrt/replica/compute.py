"""The main thread of a rank: works on batches, updates the state, evaluates and saves, in the order of its commands.

The thread that computes asks for orders: `next_work` carries out commands until there is a batch to work on, `finish` reports
that the batch is worked on, `outcome` carries out commands until the fate of the batch is known. So the user's own loop
can be that thread; `RankWorker.run` is the loop for an engine that finds its batches itself.
"""

from __future__ import annotations

import queue
import time
from contextlib import AbstractContextManager

from helixrt.errors import Departed, HelixError, Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import Kind
from helixrt.replica.commands import (
    Digest,
    Evaluate,
    Exit,
    LoadDurable,
    LoadedDurable,
    OrderPrepared,
    PrepareOrder,
    RankCommand,
    Save,
)
from helixrt.replica.contracts import WorkResult
from helixrt.replica.fetching import Fetching
from helixrt.replica.own_sums import OwnSums
from helixrt.replica.progress import LOOP
from helixrt.replica.rank_parts import Buckets, Done, RankParts, WorkOrder
from helixrt.replica.reduced_sets import ReducedSets
from helixrt.replica.serving import Serving
from helixrt.replica.state_digest import StateWatch, digest


class Commands:
    """What the main thread is to do, in order; put by any thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[RankCommand | WorkOrder | BaseException] = queue.SimpleQueue()

    def put(self, command: RankCommand | WorkOrder) -> None:
        """Carry this out after what was put before."""
        self._queue.put(command)

    def fail(self, error: BaseException) -> None:
        """Raise this in the main thread at its next call."""
        self._queue.put(error)

    def get(self) -> RankCommand | WorkOrder:
        """The next one, as soon as there is one. Raises what `fail` was given."""
        command = self._queue.get()
        if isinstance(command, BaseException):
            raise command
        return command


class Compute:
    """Every method is called by the main thread. Each raises what makes this rank unable to go on."""

    def __init__(
        self,
        parts: RankParts,
        commands: Commands,
        reduced: ReducedSets,
        serving: Serving,
        fetching: Fetching,
        own_sums: OwnSums | None = None,
    ) -> None:
        self._parts, self._commands = parts, commands
        self._reduced, self._serving, self._fetching = reduced, serving, fetching
        self._own_sums = own_sums  # in a run of one replica
        self.lineage = ""
        """Hash of the record whose state the engine holds; "" while it is being changed, and before it is known."""
        self._watch = StateWatch(parts.engine, parts.check_every) if parts.check_every and not parts.alone else None
        self._held: WorkOrder | Exit | None = None  # what ended a wait for an outcome: the next call of `next_work` gets it
        self._order: WorkOrder | None = None  # the one that is being worked on
        self._working: AbstractContextManager[None] | None = None  # of that order: what is reported meanwhile
        self._between: AbstractContextManager[None] | None = None  # in the user's loop, between two steps: the same
        self._begin_s = 0.0  # when it began
        self._result: WorkResult | None = None  # of the finished order whose fate is not known
        self._schedule = ""  # hash of the schedule's order that the engine works by
        self._pristine = True  # the engine has the parameters that it began with
        self._idle_since = time.monotonic()

    # ---------------------------------------------------------------- work

    def next_work(self) -> WorkOrder | None:
        """Carry out commands until there is a batch to work on; None after `Exit`. Raises Departed if that is early.

        An order is worked on to its end also when another replaced it meanwhile: all ranks of the replica must run the same
        passes, and they learn of it at different moments.
        """
        if self._between is not None:
            self._between.__exit__(None, None, None)
            self._between = None
        while True:
            held, self._held = self._held, None
            command = held or self._commands.get()
            if isinstance(command, Exit):
                self._held = command  # there is nothing behind it
                if command.early:
                    raise Departed(command.early)
                return None
            if isinstance(command, WorkOrder):
                self._begin(command)
                return command
            self._carry_out(command)

    def _begin(self, order: WorkOrder) -> None:
        record = self._parts.record
        if order.schedule != self._schedule:
            with self._preparing():  # also where it is not ready: the ranks of a replica that starts again
                self._parts.hooks.use_order(order.schedule)
            self._schedule = order.schedule
        self._order = order
        if self._watch is not None:
            order.note.state, order.note.part = self._watch.part(order.step)
        record.step = order.step
        record.write(Kind.WORK_BEGIN, position=order.position)
        self._begin_s = record.clock()
        self._working = self._parts.progress.doing("work", position=order.position)
        self._working.__enter__()

    def finish(self, order: WorkOrder, result: WorkResult) -> None:
        """The batch of the order that `next_work` gave last is worked on; `result` is of the engine's `end`."""
        assert order is self._order, f"{order} is not what this rank works on"
        self._order, self._result = None, result
        self._idle_since = time.monotonic()
        # the leader may have gone on to the next step by now: it needs the buckets, not the end of the work
        self._parts.record.write(Kind.WORK_END, begin_s=self._begin_s, step=order.step, position=order.position)
        if self._working is not None:
            self._working.__exit__(None, None, None)
            self._working = None

    def outcome(self, order: WorkOrder) -> Done | None:
        """Carry out commands until the fate of the finished order is known: its update, or None if its gradient is in no
        committed record (another order or the end came first; `next_work` gives it)."""
        done = self._outcome()
        self._between = self._parts.progress.doing(LOOP)
        self._between.__enter__()
        return done

    def _outcome(self) -> Done | None:
        assert self._order is None and self._held is None, "an order is finished, and its outcome asked for, once"
        while self._result is not None:
            command = self._commands.get()
            if isinstance(command, WorkOrder | Exit):
                self._held = command
                return None
            done = self._carry_out(command)
            if done is not None and done.work is not None:
                return done
        return None

    # ---------------------------------------------------------------- commands

    def _carry_out(self, command: RankCommand) -> Done | None:
        """The update that it was, if it was one."""
        if isinstance(command, (p.Exchange, p.Examine)):
            self._exchange(command)
            return None
        with self._doing(command):
            match command:
                case p.Apply() | p.Replay():
                    return self._update(command.record)
                case p.Load():
                    state = self._fetching.take(command.lineage)
                    self._serving.settle()
                    self.lineage = ""
                    self._parts.engine.load(state)
                    self.lineage, self._pristine = command.lineage, False
                    self._serving.update_done()
                case LoadDurable():
                    self._load_durable(command)
                case PrepareOrder():
                    self._prepare(command)
                case Evaluate():
                    with self._serving.held():
                        self._parts.hooks.evaluate(command)
                    self._idle_since = time.monotonic()
                case Save():
                    self._parts.engine.check_copies()
                    self._parts.hooks.save(command)
                    self._idle_since = time.monotonic()
                case Digest():
                    self._parts.engine.check_copies()
                    self._parts.report(digest(self._parts.engine.state(), command.entries))
        return None

    def _preparing(self) -> AbstractContextManager[None]:
        """While graphs may be made."""
        return self._parts.progress.busy("prepareorder", self._parts.timeouts.evaluate_s)

    def _prepare(self, command: PrepareOrder) -> None:
        begin_s, failed = time.monotonic(), ""
        try:
            self._parts.hooks.prepare_order(command.order, command.rehearsal)
        except Retryable:
            raise
        except HelixError as error:
            failed = str(error)
        self._parts.report(OrderPrepared(command.order, time.monotonic() - begin_s, failed))
        self._idle_since = time.monotonic()

    def _exchange(self, command: p.Exchange | p.Examine) -> None:
        """In a run of one replica."""
        assert self._own_sums is not None and self._order is None, "the exchange thread has it, or the work is not done"
        with self._parts.progress.doing("exchange"):
            report = self._own_sums.carry_out(command)
        self._parts.report(report)  # the leader goes on in this thread: it appends, and joins for the next step

    def _doing(self, command: RankCommand) -> AbstractContextManager[None]:
        """What the main thread reports while it carries out the command."""
        limit_s = self._parts.timeouts.evaluate_s
        match command:
            case LoadDurable():
                return self._parts.progress.busy("loaddurable", max(limit_s, self._parts.load_s))
            case Evaluate() | Save() | Digest() | PrepareOrder():
                return self._parts.progress.busy(type(command).__name__.lower(), limit_s)
            case _:
                return self._parts.progress.doing(type(command).__name__.lower())

    def _load_durable(self, command: LoadDurable) -> None:
        if command.initial and not self._pristine:
            raise StartAgain("nothing but the initial parameters is durable, and this process has changed its own")
        self._serving.settle()
        before, self.lineage = self.lineage, ""
        found = self._parts.hooks.load(command.lineage, command.initial)
        self.lineage = command.lineage if found else before
        self._pristine = self._pristine and (command.initial or not found)
        self._serving.update_done()
        self._parts.report(LoadedDurable(command.lineage, found))

    def _update(self, record: CommitRecord) -> Done:
        """Also when the record was not applied: the engine may have to take note of that."""
        parts = self._parts
        reduced: Buckets | None = self._reduced.take(record.hash) if record.applied else None
        stall_s = time.monotonic() - self._idle_since
        self._serving.settle()
        begin_s = parts.record.clock()
        self.lineage = ""
        update = parts.engine.apply(record, reduced)
        self.lineage, self._pristine = record.hash, False
        if reduced is not None:
            parts.record.write(Kind.APPLY, begin_s=begin_s, step=record.step, record=record.hash)
            if not parts.alone:
                self._reduced.serve(record, reduced)
        self._serving.update_done()
        work = self._result if parts.replica in record.replicas else None
        self._result = None
        if work is not None:
            parts.progress.committed()
        done = Done(record, update, work, stall_s)
        parts.hooks.updated(done)
        self._idle_since = time.monotonic()
        return done
