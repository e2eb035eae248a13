"""A rank's runtime: gives an engine the parts of `replica/`, the run's store, checkpoints, metrics and faults.

In: a `RankSpec`, the settings, and what the job adds (`RankJob`). Out: a `RankWorker` whose orders the caller's thread
carries out: by `worker.run()` for an engine that finds its batches itself, else by the user's loop. Which models and
which data is the job's own matter. The first rank of a replica leads it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from helixrt.errors import Cause, Departed, Diverged, MisuseError, Retryable, StartAgain, comes_again
from helixrt.job import checkpoint as checkpoints
from helixrt.job.chaos import ChaosSink
from helixrt.job.chaos_actions import ReplicaKiller
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.checkpoint_writer import Checkpointer
from helixrt.job.config import JobConfig
from helixrt.job.connections import gradient_exchange, state_transport
from helixrt.job.durable_state import DurableState
from helixrt.job.failover import FailoverNews
from helixrt.job.following import Following
from helixrt.job.genesis import GenesisDigest
from helixrt.job.heap import keep_freed_memory
from helixrt.job.leader_reports import MetricsSender
from helixrt.job.leading import LeaderParts, Leading, address_key
from helixrt.job.leaving import LEAVE_S, TermSignal
from helixrt.job.lineage_files import LineageWriter
from helixrt.job.machine import boot_identity
from helixrt.job.measuring import Measuring
from helixrt.job.place_owner import DeletionGuard, token_in
from helixrt.job.places import axes_of
from helixrt.job.policies import CONFIG_EXIT, DIVERGED_EXIT, FATAL_EXIT, LEFT_EXIT, MISUSE_EXIT, RELOAD_EXIT, RETRY_EXIT
from helixrt.job.rank_context import RankContext, RankJob, open_context
from helixrt.job.step_rules import publish_memory
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.observe.stamps import RankTimes
from helixrt.protocol.catchup_memory import GB
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.record import Kind
from helixrt.replica.commands import Broken, RankReport, Save
from helixrt.replica.contracts import Engine, RankSpec
from helixrt.replica.layout_book import LayoutBook
from helixrt.replica.native_stacks_private import tell_native_stacks
from helixrt.replica.rank import Done, Hooks, RankParts, RankWorker
from helixrt.replica.rank_log import RankEnd, describe_code, log_name
from helixrt.replica.run_keys import OfRank, cause_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.telling import flush_all, tell, tell_native_ends

_NONE = "none"
_COME_S = 2.0  # for the other ranks of a replica to meet the error that one has met
_CLOSE_S = 60.0  # for a checkpoint that was begun, when the rank ends


class RankRuntime:
    """Of one rank, in its process's main thread. A context manager: `open` is called inside, once.

    On the way out without an error the checkpoints that were begun are completed. SIGTERM of the process has the replica leave
    at a step boundary.
    """

    def __init__(self, spec: RankSpec, config: JobConfig) -> None:
        self.context: RankContext = open_context(spec, config)
        context, chaos = self.context, config.chaos
        killed = any(kill.replica == context.replica for kill in chaos.kill)
        ranks = context.group_world_size
        self._killer = ReplicaKiller(context.store, context.life, context.group_rank, ranks, obeys=killed and ranks > 1)
        if chaos.kill or chaos.fault or chaos.run:
            place = (context.replica, spec.incarnation)
            context.record.attach(ChaosSink(chaos, *place, self._killer.kill, context.record, self._claims, context.group_rank))
        self._failovers: FailoverNews | None = None
        if config.checkpoint.after_failover and config.checkpoint.every:
            self._failovers = FailoverNews(context.store, f"{context.label}.inc{spec.incarnation}")
            context.record.attach(self._failovers)
        self._measuring: Measuring | None = None
        if config.mesh.pp > 1:
            self._measuring = Measuring(context.label, boot_identity(), self._measured)
            context.record.attach(self._measuring.collector)
        self.metrics: MetricsSender | None = None  # to the driver; of the leading rank
        self._lineage: LineageWriter | None = None
        if context.leads:
            self.metrics = MetricsSender(context.store, context.replica, spec.incarnation, context.label)
            trouble = StorageTrouble("lineage", context.record, self.say)
            read = RunLog(context.store).read_from
            self._lineage = LineageWriter(context.output / "lineage", 0.5 * context.replica, trouble, read)
        self._term = TermSignal(context.store, context.replica, spec.incarnation, context.label)
        self._side: Leading | Following | None = None
        self._checkpointer: Checkpointer | None = None
        self.saves_to_leave = False  # the replica leaves, and no other one holds its state
        self._worker: RankWorker | None = None

    def __enter__(self) -> RankRuntime:
        torch.set_num_threads(self.context.config.threads)
        keep_freed_memory()
        tell_native_stacks()
        tell_native_ends()
        self._term.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if (kind is None or issubclass(kind, Departed)) and self._checkpointer is not None:
                self._checkpointer.close(self.leave_s if self.saves_to_leave else _CLOSE_S)
        finally:
            self._term.__exit__()
            self._close()

    @property
    def leave_s(self) -> float:
        """How long the ranks of a replica that leaves wait for each other, and for their checkpoint, if they write one."""
        return max(LEAVE_S, self.context.config.checkpoint.write_s) if self.saves_to_leave else LEAVE_S

    # ---------------------------------------------------------------- parts

    def open(self, job: RankJob) -> RankWorker:
        """Connect to the others and begin; the worker's orders come from now on. Raises ConfigError, or what makes this rank
        unable to go on."""
        context = self.context
        publish_memory(context.config, job.engine, context.store, context.life, context.group_rank)
        transport = state_transport(context)

        def read_log() -> Log:
            return RunLog(context.store).read()

        mesh = axes_of(context.config.mesh)
        place = (context.checkpoints, context.group_rank, mesh, job.engine)
        durable = DurableState(*place, read_log, context.store, context.life, context.spec.life, self.say)
        checkpointer = self._make_checkpointer(job.steps)
        genesis = GenesisDigest(
            context.store,
            context.life,
            context.group_rank,
            context.group_world_size,
            job.initial,
            context.timeouts.start_s,
        )
        hooks = Hooks(
            updated=lambda done: self._updated(job, checkpointer, done),
            evaluate=job.evaluate,
            save=lambda command: self._save(job, checkpointer, command),
            stuck=self._stuck,
            load=lambda lineage, initial: durable.load(lineage, initial) and (not initial or genesis.holds()),
        )
        if job.orders is not None:
            hooks = replace(hooks, prepare_order=job.orders.prepare, use_order=job.orders.use)
        worker = RankWorker(
            RankParts(
                context.replica,
                context.group_rank,
                job.engine,
                gradient_exchange(context),
                transport,
                context.record,
                context.timeouts,
                f"{context.spec.store}/exchange/{context.group_rank}",
                self.report,
                hooks,
                context.config.catchup.max_wait_s,
                context.progress,
                LayoutBook(context.store, context.group_rank, int(context.config.catchup.memory_gb * GB)),
                alone=context.config.mesh.replicas == 1,
                load_s=context.config.checkpoint.write_s,
                replicas=context.config.mesh.replicas,
                check_every=context.config.checks.every,
            )
        )
        self._worker = worker
        context.store.put_if_absent(address_key(context.life, context.group_rank), transport.address)
        if context.leads:
            assert self.metrics is not None and self._lineage is not None
            parts = LeaderParts(worker, checkpointer, durable, self._failovers, self.metrics, self._lineage, genesis)
            leading = Leading(context, job, parts)
            self._side = leading
            leading.begin()
        else:
            following = Following(context)
            self._side = following
            following.begin(worker)
        self._term.at_once = False
        return worker

    def _make_checkpointer(self, steps: int) -> Checkpointer:
        context, settings = self.context, self.context.config.checkpoint
        self._checkpointer = Checkpointer(
            context.checkpoints,
            context.group_rank,
            axes_of(context.config.mesh),
            context.store,
            context.record,
            settings.every,
            settings.keep,
            steps,
            settings.write_s,
            context.life,
            self.say,
            context.spec.life,
            DeletionGuard(context.checkpoints, token_in(context.output), self.say),
            self._is_settled,
        )
        return self._checkpointer

    def _is_settled(self, record: CommitRecord) -> bool:
        """Of the leading rank: as `Leading.is_settled`."""
        return isinstance(self._side, Leading) and self._side.is_settled(record)

    def say(self, text: str) -> None:
        """Have the driver print a line, if this rank has a way to tell it."""
        tell(f"{self.context.label}: {text}", sys.stdout)
        if self.metrics is not None:
            self.metrics.say(text)

    def report(self, report: RankReport) -> None:
        """Tell the leader of this replica; from any thread."""
        assert self._side is not None
        self._side.report(report)

    def _measured(self, times: RankTimes) -> None:
        """To the leader of this replica, in the thread of `Measuring`, which has something to say only after an update."""
        assert self._side is not None
        self._side.measured(times)

    # ---------------------------------------------------------------- what the job adds to a step, in the main thread

    def _updated(self, job: RankJob, checkpointer: Checkpointer, done: Done) -> None:
        writes = self._writes(done.record)
        checkpointer.maybe_save(done.record, lambda: self._part_of(job.engine), writes, self._flush)
        job.updated(done)
        if self._measuring is not None:
            self._measuring.step_done(done.record.step)

    def _save(self, job: RankJob, checkpointer: Checkpointer, command: Save) -> None:
        self.saves_to_leave = command.departs
        checkpointer.save(
            command.record, lambda: self._part_of(job.engine), self._flush, command.after_failover, command.departs
        )

    def _part_of(self, engine: Engine) -> RankPart:
        assert self._worker is not None
        with self._worker.streams.copying() as copied:
            return RankPart.of(engine.state(), engine.portions(), copied.wait)

    def _writes(self, record: CommitRecord) -> bool:
        return self.context.replica == checkpoints.writer_of(record)

    def _flush(self) -> None:
        """Make the lineage durable, before a checkpoint that refers to it."""
        if isinstance(self._side, Leading):
            self._side.flush()
        if self._lineage is not None:
            self._lineage.flush()

    # ---------------------------------------------------------------- ends

    def _stuck(self, why: str) -> None:
        """The main thread hangs, and so would every orderly way out."""
        tell(f"{self.context.spec.coordinate}: {why}; compute hangs, so this process ends")
        os._exit(RETRY_EXIT)

    def _claims(self, name: str) -> bool:
        """Chaos: whether this is the rank's to carry out; the first to come to its moment gets it."""
        me = f"{self.context.life}/{self.context.group_rank}"
        return self.context.store.put_if_absent(f"chaos/{name}", me) == me

    @property
    def departed(self) -> Departed | None:
        """With what SIGTERM has ended this rank before its loop began, if it has."""
        return self._term.departed

    def fail(self, error: BaseException) -> None:
        """Have the loop's thread raise this when it next waits for an order; from any thread."""
        if self._worker is not None:
            self._worker.fail(error)

    def broken(self, error: BaseException) -> None:
        """This rank ends: before its exchange is broken, the leader is told, and by the leader the other replicas. Else they
        would form the next quorum with this one, and wait for it."""
        with suppress(Retryable):  # the store is gone too; the exit code tells
            if self.context.group_world_size > 1 and exit_code(error) in (CONFIG_EXIT, MISUSE_EXIT, FATAL_EXIT):
                self._put_cause(exit_code(error), RankEnd.of(error))
            if isinstance(self._side, Following):
                self._side.report(Broken(f"{type(error).__name__}: {error}"))
            elif self._side is not None:
                self._side.abandon()

    def _put_cause(self, code: int, end: RankEnd) -> None:
        spec = self.context.spec
        log = self.context.output / "logs" / log_name(spec.coordinate, spec.incarnation)
        cause = Cause(f"{end.why} ({describe_code(code)})", f"{spec.coordinate} incarnation {spec.incarnation}", str(log))
        key = cause_key(self.context.replica, spec.incarnation)
        self.context.store.put_if_absent(key, json.dumps({"code": code, "reason": str(cause), "error": end.error}))

    def keep_state(self) -> None:
        """After `broken`, for an error of the program: save the state of the newest step, if no other replica stays that holds
        it and all ranks of this one come to this with it. Whatever prevents it costs a line in the log."""
        if self._worker is None or self._side is None or not self.context.config.checkpoint.every:
            return
        try:
            with self.context.progress.busy("save", self.context.config.checkpoint.write_s):
                self._keep_state(self._worker.compute.lineage)
        except Exception as error:
            tell(f"{self.context.label}: the state of the newest step is not saved: {error}")

    def _keep_state(self, lineage: str) -> None:
        assert self._worker is not None and self._checkpointer is not None
        engine = self._worker.parts.engine
        engine.leave_batch()
        if set(self._meet(OfRank.STATE, lineage or _NONE, _COME_S)) != {lineage}:
            return
        record = self._side.saves(lineage) if isinstance(self._side, Leading) else None
        text, *_ = self._meet(OfRank.LAST, _NONE if record is None else record.to_json(), _CLOSE_S)
        if text == _NONE:
            return
        self._checkpointer.save(CommitRecord.from_json(text), lambda: self._part_of(engine), self._flush, False, departs=True)
        self._checkpointer.close(LEAVE_S)
        self._meet(OfRank.SAVED, "yes", LEAVE_S)  # the first that ends ends the others

    def _meet(self, what: OfRank, value: str, limit_s: float) -> list[str]:
        """What all ranks of the replica put there. Raises Retryable if one does not."""
        context, deadline = self.context, time.monotonic() + limit_s
        context.store.put_if_absent(what.key(context.life, context.group_rank), value)
        keys = [what.key(context.life, rank) for rank in range(context.group_world_size)]
        return [context.store.wait(key, max(0.01, deadline - time.monotonic())) for key in keys]

    def _close(self) -> None:
        if self._measuring is not None:
            self._measuring.close()
        if self._side is not None:
            self._side.close()
        # what the lineage cannot write, the metrics tell
        for part in (self._failovers, self._lineage, self.metrics, self._killer, self.context.progress):
            if part is not None:
                part.close()
        self.context.record.write(Kind.RANK_END, code=0)


def exit_code(error: BaseException) -> int:
    """What the controller has to know of the end of a rank: of its root cause (`errors.root_of`)."""
    if isinstance(error, Departed):
        return LEFT_EXIT
    if isinstance(error, Diverged):
        return DIVERGED_EXIT
    if isinstance(error, MisuseError):
        return MISUSE_EXIT
    if isinstance(error, StartAgain):
        return RELOAD_EXIT
    if comes_again(error):
        return CONFIG_EXIT
    return RETRY_EXIT if isinstance(error, Retryable) else FATAL_EXIT


def run_as_process(run_rank: Callable[[RankSpec], int]) -> None:
    """The whole life of a rank's process: reads its spec as JSON from standard input, runs, exits."""
    code = run_rank(RankSpec.from_plain(json.loads(sys.stdin.read())))
    flush_all()
    os._exit(code)  # threads of torch and of servers must not keep a finished rank
