"""The rank that leads its replica: the step machine and its leader, orders to all ranks, the end of the run, the lineage.

In: the reports of the replica's ranks. Out: commands to them; lines for the driver; entries in the run's lineage files.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from helixrt.errors import Fatal, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint_orders import CheckpointOrders
from helixrt.job.checkpoint_writer import Checkpointer
from helixrt.job.connections import communication, membership
from helixrt.job.divergence import Naming
from helixrt.job.durable_state import DurableState
from helixrt.job.evaluation_orders import EvaluationOrders
from helixrt.job.failover import FailoverNews
from helixrt.job.finish import EndOfRun, ObservedMembership
from helixrt.job.genesis import GenesisDigest
from helixrt.job.leader_reports import MetricsSender
from helixrt.job.leaving import Departure
from helixrt.job.lineage_files import LineageWriter
from helixrt.job.loss_acceptance import WAITING_LINE_S, note_waiting
from helixrt.job.measuring import ReplicaCosts
from helixrt.job.order_adapter import OrderAdapter
from helixrt.job.rank_context import RankContext, RankJob
from helixrt.job.step_rules import (
    agreed_memory,
    exclusion_text,
    skipped_positions,
    step_rules,
    waiting_text,
)
from helixrt.observe.run_costs import cost_key
from helixrt.observe.stamps import RankTimes
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.record import Kind
from helixrt.replica.commands import Channel, RankCommand, RankReport, orders_channel, reports_channel
from helixrt.replica.contracts import Formed, RunStore
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.progress import COORDINATION, LEADER
from helixrt.replica.rank import RankWorker
from helixrt.replica.run_keys import OfRank, ended_key, ready_key, running_key
from helixrt.replica.runlog import RunLog


@dataclass(frozen=True)
class LeaderParts:
    """What the leading rank has that others have not (`metrics`, `lineage`), and what it shares with its worker."""

    worker: RankWorker
    checkpointer: Checkpointer
    durable: DurableState
    failovers: FailoverNews | None
    metrics: MetricsSender
    lineage: LineageWriter
    genesis: GenesisDigest


class Leading:
    """From its making, which reads the run's log and waits for the other ranks of the replica, to `close`."""

    def __init__(self, context: RankContext, job: RankJob, parts: LeaderParts) -> None:
        self._context, self._job, self._parts = context, job, parts
        store, patience_s = context.store, context.timeouts.step_s
        self.costs = ReplicaCosts(context.config.mesh.pp)
        """What the ranks of this replica have measured."""
        self._said_running, self._said_waiting_s = False, -math.inf  # of the thread that handles events
        self._said_silent, self._said_read = False, ""  # of the coordination thread
        self._telling = threading.RLock()  # commands reach all ranks in one order
        self._orders = Channel(store, orders_channel(context.life), patience_s)
        self._reports = [
            Channel(store, reports_channel(context.life, rank), patience_s) for rank in range(1, context.group_world_size)
        ]
        holders = Holders(store, context.replica, context.spec.incarnation)
        holders.end_predecessors()
        machine, addresses = self._machine(RunLog(context.store).read()), self._addresses()
        self._membership = ObservedMembership(membership(context))
        self._checkpoint_orders = CheckpointOrders(
            context.replica,
            context.checkpoints,
            context.config.checkpoint.every,
            context.config.checkpoint.retry_s,
            job.steps,
            store,
            parts.checkpointer,
            parts.failovers,
            self.tell,
        )
        among = (job.eval_at_start, context.config.mesh.replicas)
        self._evaluations = EvaluationOrders(context.replica, job.eval_every, job.eval_shared, job.steps, *among)
        self._departure = departure = Departure(
            context.replica,
            context.spec.incarnation,
            store,
            self._membership,
            context.config.checkpoint.every > 0,
            self.tell,
        )
        hooks = LeaderHooks(
            parts.lineage.append,
            self._ordered,
            lambda m: self._end_of_run.resting(m),
            self._broken,
            self._waiting,
            parts.metrics.say,
            departure.due,
            departure.carry_out,
            self._agree,
            self._newest_durable,
            partial(context.progress.doing, thread=LEADER),
            lambda times: self.measured(RankTimes.from_json(times)),
            lambda order, seconds, failed: self._adapter.prepared(order, seconds, failed) if self._adapter else None,
            lambda action: self._naming(action),
        )
        self._leader = Leader(
            machine, self._membership, RunLog(store), holders, addresses, self.tell, context.record, context.timeouts, hooks
        )
        self._naming = Naming(store, context.replica, self._leader.digests, self.tell, context.timeouts.evaluate_s)
        self._adapter = self._order_adapter()
        self._leader.initial = parts.genesis.mine if machine.held else ""
        self._end_of_run = EndOfRun(
            context.replica,
            context.group_world_size,
            store,
            self._membership,
            self._checkpoint_orders,
            self._leader.digests,
            self.tell,
            self._evaluations,
            range(context.config.mesh.replicas),
            context.timeouts.evaluate_s,
            context.progress,
        )

    def _order(self, entries: Sequence[CommitRecord]) -> str | None:
        """The schedule's order that this replica begins with: None for the one that the log names, if its engine can work by
        it."""
        order, orders = entries[-1].orders.get(self._context.replica, ""), self._job.orders
        if orders is None and not order:
            return ""
        why = "the schedule of this run is not adapted" if orders is None else orders.fits(order)
        if why:
            self._parts.metrics.say(f"the replica begins with the first order of its schedule, not with {order}: {why}")
        return "" if why else None

    def _order_adapter(self) -> OrderAdapter | None:
        orders, context = self._job.orders, self._context
        if orders is None or orders.engine.adaptation is None:
            return None
        return OrderAdapter(
            orders,
            orders.engine.adaptation,
            self._job.steps,
            context.group_world_size,
            lambda: self._leader.machine.order,
            self.costs.estimates,
            self._leader.prepare,
            context.record,
            self._parts.metrics.say,
            self._parts.worker.fail,
            communication(context.config.pipeline),
        )

    def _machine(self, log: Log) -> StepMachine:
        context, entries = self._context, log.entries
        for index, entry in enumerate(entries, log.behind.begin):
            self._parts.lineage.append(index, entry)
        memory = agreed_memory(context.store, context.life, context.group_world_size, context.timeouts.start_s)
        return StepMachine(
            context.replica,
            context.spec.incarnation,
            context.group_world_size,
            log,
            log.genesis if len(log) == 1 and self._parts.genesis.holds() else "",
            self._job.steps,
            step_rules(context.config, memory, self._job.advance, self._job.engine.expects_overflow),
            context.spec.life,
            skipped_positions(context.store, context.replica),
            self._order(entries),
        )

    def _addresses(self) -> tuple[str, ...]:
        """Where the ranks of this replica offer their state."""
        context = self._context
        ranks = range(context.group_world_size)
        return tuple(context.store.wait(address_key(context.life, rank), context.timeouts.start_s) for rank in ranks)

    def begin(self) -> None:
        """Begin the first step, with all replicas if they come in time."""
        for rank, reports in enumerate(self._reports, start=1):
            reports.follow(partial(self._leader.report, rank), lambda why: self._parts.worker.fail(Fatal(why)))
        self._membership.announce()  # before the others join: they wait for whom they know to live
        if self._context.spec.incarnation == 0:
            replicas, limit_s = self._context.config.mesh.replicas, 0.5 * self._context.timeouts.start_s
            await_the_others(self._context.store, self._context.replica, replicas, limit_s)
        else:  # its first start may have ended before it was ready
            self._context.store.put_if_absent(ready_key(self._context.replica), "yes")
        if self._adapter is not None:
            self._adapter.start()
        machine = self._leader.machine
        if machine.held == machine.log.genesis and (evaluate := self._evaluations.before(machine.held)) is not None:
            self.tell(evaluate)
        self._leader.start()

    # ---------------------------------------------------------------- commands and reports

    def tell(self, command: RankCommand) -> None:
        """Send a command to all ranks of the replica, in order; from any thread."""
        with self._telling:
            if self._context.group_world_size > 1:
                self._orders.put(command)
            self._parts.worker.dispatch(command)

    def report(self, report: RankReport) -> None:
        """The leading rank's own report; from any thread."""
        self._leader.report(self._context.group_rank, report)

    def measured(self, times: RankTimes) -> None:
        """What a rank of the replica measured; from any thread."""
        shifts = self.costs.add(times)
        for shift in shifts:
            change, what = shift.change, cost_key(shift.key)
            self._context.record.write(
                Kind.COSTS_CHANGED,
                step=times.step,
                what=what,
                since=change.step,
                before_ms=change.before_ms,
                after_ms=change.after_ms,
            )
        if self._adapter is not None:
            self._adapter.measured(times.rank, times.step, max((shift.change.step for shift in shifts), default=None))

    # ---------------------------------------------------------------- what the leader calls, one call at a time

    def _ordered(self, command: RankCommand) -> None:
        if isinstance(command, p.Exchange | p.FetchState | p.FetchReduced):  # the last step may be done: only a fetch follows
            self._say_running()
        if isinstance(command, p.Apply) and self._adapter is not None:
            self._adapter.step_done(command.record.step)
        if isinstance(command, p.Apply) and checkpoints.writer_of(command.record) == self._context.replica:
            self._after_update(command.record)
        if (evaluate := self._evaluations.behind(command, self._leader.machine.log)) is not None:
            self.tell(evaluate)

    def _agree(self, formed: Formed, me: Member) -> p.Event | None:
        """Which initial state the run begins with, before its first commit."""
        genesis = self._leader.machine.log.genesis
        instead = self._parts.genesis.agree(formed.members, me, genesis, self._parts.metrics.say)
        if isinstance(instead, p.Reloaded):
            self._leader.initial = ""  # what this replica holds from now on was fetched
        return instead

    def _newest_durable(self, newer_than: int) -> str | None:
        genesis = self._parts.genesis
        limit_s = self._context.config.checkpoint.write_s  # a storage may take long to answer
        try:
            with self._context.progress.doing("the check of a checkpoint", COORDINATION, limit_s):
                found = self._parts.durable.newest(newer_than, self._reads)
        except Retryable as error:
            if not self._said_silent:
                self._said_silent = True
                self._parts.metrics.say(f"the replica waits until it can read the run's checkpoints: {error}")
            raise
        if found == self._leader.machine.log.genesis and not genesis.holds():
            raise Fatal(
                "no replica that runs holds the initial values that this run began with, and this one's are others; seed what "
                "builds the model, so that every start gives the same values"
            )
        return found

    def _reads(self, found: checkpoints.Checkpoint) -> None:
        """Say so once of a checkpoint that takes long."""
        name = found.folder.name
        if found.nbytes >= _READS_LONG_BYTES and name != self._said_read:
            self._said_read = name
            self._parts.metrics.say(f"the replica reads the checkpoint {name}, {found.nbytes / 1e9:.3g} GB")

    def _after_update(self, record: CommitRecord) -> None:
        """What one replica of those that update does for all."""
        if (text := exclusion_text(record)) is not None:
            self._parts.metrics.say(text)
        if (save := self._checkpoint_orders.out_of_turn(record)) is not None:
            self.tell(save)

    def _say_running(self) -> None:
        if not self._said_running:
            with suppress(Retryable):  # the next quorum says it
                self._context.store.put_if_absent(running_key(self._context.replica, self._context.spec.incarnation), "yes")
                self._said_running = True

    def _waiting(self, action: p.Wait) -> None:
        """A replica that waits has joined: no start timeout and no restart budget apply."""
        self._say_running()
        text = waiting_text(action, self._context.config.supersede_after_s, self._context.output)
        if text is not None and time.monotonic() - self._said_waiting_s > WAITING_LINE_S:
            self._said_waiting_s = time.monotonic()
            self._parts.metrics.say(text)
            note_waiting(self._context.output, text)

    def is_settled(self, record: CommitRecord) -> bool:
        """Others were committed behind it and stand, so no other record takes its place. From any thread."""
        behind = self._leader.machine.log.after(record.hash)
        return behind is not None and not self._leader.appends.is_pending(behind)

    def flush(self) -> None:
        """Return once the run's log has every record of this replica, and the lineage's writer too. From any thread. Raises
        Retryable when it takes long."""
        self._leader.appends.flush()

    def _broken(self, error: BaseException) -> None:
        """This rank ends with this error, which its main thread may not see for a while: the other replicas are told now."""
        self._parts.worker.fail(error)
        with suppress(Retryable):
            self.abandon()

    def saves(self, lineage: str) -> CommitRecord | None:
        """After `abandon`: the record of this state, if this replica is to save it. Raises OSError, Retryable where checkpoints
        cannot be read."""
        record = self._leader.machine.log.get(lineage)
        if record is None or not self._departure.saves(record):
            return None
        return record if checkpoints.complete_of(self._context.checkpoints, record) is None else None

    def abandon(self) -> None:
        """This incarnation takes part no more, and no quorum waits for it. Raises Retryable without the store."""
        self._leader.stop()
        with suppress(Retryable):
            self._leader.appends.flush(FLUSH_S)  # none is put behind the fence
        self._context.store.put_if_absent(ended_key(self._context.replica, self._context.spec.incarnation), "yes")
        self._membership.close()

    def close(self) -> None:
        """End the leader's threads and the membership; idempotent."""
        for reports in self._reports:
            reports.close()
        if self._adapter is not None:
            self._adapter.close()
        self._leader.close()
        self._membership.close()


_ALL_READY, _LOOK_S = "ready/all", 5.0
FLUSH_S = 5.0  # of a replica that ends, for its last records
_READS_LONG_BYTES = 10**9


def await_the_others(store: RunStore, replica: int, replicas: int, limit_s: float) -> None:
    """The first quorum should have everyone: wait for the start of the other replicas, within limits. One may come much later,
    for want of resources or where others start it: this one must be in a quorum before its own start timeout. Raises Retryable
    without the store."""
    store.put_if_absent(ready_key(replica), "yes")
    deadline = time.monotonic() + limit_s
    others = [ready_key(other) for other in range(replicas)]
    # Replica 0 waits for all and says so. The others look themselves now and then, in case it is gone.
    patience_s = 0.0 if replica == 0 else _LOOK_S * (1.0 + replica / replicas)
    while (left_s := deadline - time.monotonic()) > 0.0:
        try:
            if patience_s:
                store.wait(_ALL_READY, min(patience_s, left_s))
                return
            for key in others:
                store.wait(key, max(0.1, deadline - time.monotonic()))
            store.put_if_absent(_ALL_READY, "yes")
            return
        except Retryable:
            if not patience_s:
                return
        with suppress(Retryable):
            if all(store.get(key) is not None for key in others):
                store.put_if_absent(_ALL_READY, "yes")
                return


def address_key(life: str, rank: int) -> str:
    """Where a rank of a replica's incarnation says how others fetch from it."""
    return OfRank.ADDRESS.key(life, rank)
