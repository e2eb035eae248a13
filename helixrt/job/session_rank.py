"""One rank of a run that `helixrt.run` started: calls the user's train function with a session on this rank's runtime.

In: a `RankSpec` whose config is a `SessionConfig`. Out: an exit code. `python -m helixrt.job.session_rank` reads the spec as
JSON from standard input. What the user's code raises is printed first, with its own traceback, then the rank, step and batch.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import numpy
import torch

from helixrt.engines.inner_group import lost_rank
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.staged import StagePlace
from helixrt.errors import ConfigError, Departed, Diverged, MisuseError, Retryable, root_of
from helixrt.job.agreements import LayoutAgreement, agree_on_plan
from helixrt.job.connections import replica_mesh, stage_channels
from helixrt.job.evaluation import Measured
from helixrt.job.logs import configure_logging
from helixrt.job.metrics import Logged, ValidationPart
from helixrt.job.orders import OrderBook, RankOrders
from helixrt.job.policies import FATAL_EXIT, MISUSE_EXIT
from helixrt.job.rank import RankRuntime, exit_code, run_as_process
from helixrt.job.rank_context import RankJob, check_folder
from helixrt.job.rules import check_settings
from helixrt.job.session import Session
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_host import Plan
from helixrt.job.slow_stages import slowdown_of
from helixrt.job.step import SessionEngine, Worker
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.commands import Evaluate, StopAsked
from helixrt.replica.contracts import RankSpec, RunStore
from helixrt.replica.rank import Done
from helixrt.replica.rank_log import RankEnd
from helixrt.replica.run_keys import OfRank
from helixrt.replica.state_digest import digest
from helixrt.replica.telling import tell, tell_traceback
from helixrt.schedule.exchange.as_json import order_key


class RankHost:
    """What stands behind a session: this rank's runtime. A context manager, around the user's code."""

    def __init__(self, runtime: RankRuntime) -> None:
        self._runtime, self._context = runtime, runtime.context
        self._open = ExitStack()
        self._updated_s = time.monotonic()
        self._seconds = 0.0  # between the newest two updates
        self._layouts: LayoutAgreement | None = None
        self._mesh: ReplicaMesh | None = None
        self._models = 0  # in stages

    def __enter__(self) -> RankHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Departed):
            root = root_in(error, self._context.group_world_size)
            self._runtime.broken(root)
            if exit_code(root) in (FATAL_EXIT, MISUSE_EXIT):
                self._runtime.keep_state()
        self._open.close()

    @property
    def store(self) -> RunStore:
        return self._context.store

    @property
    def folder(self) -> Path | None:
        return self._context.output

    def connect(self, device: torch.device) -> ReplicaMesh:
        """Raises MisuseError if torch.distributed is initialized, Retryable if a rank of the replica does not come."""
        if self._mesh is None:
            self._mesh = replica_mesh(self._context, device)
        return self._mesh

    def connect_stages(self, device: torch.device) -> StagePlace:
        mesh, record = self.connect(device), self._context.record
        channels = stage_channels(self._context, mesh, self._models, device)
        self._models += 1
        return StagePlace(mesh.rank("pp"), mesh.size("pp"), mesh.group("pp"), record, mesh, channels, device)

    def open(self, engine: SessionEngine, plan: Plan) -> Worker:
        """Raises MisuseError if the ranks' scripts differ in what they train, how far, or in which order; ConfigError for a
        setting that names a step behind the last one."""
        check_settings(self._context.config, plan.until)
        order = order_key(engine.schedule) if isinstance(engine, PipelineEngine) else ""
        agree_on_plan(self.store, plan.until, plan.accumulate, order)
        self._layouts = LayoutAgreement(self.store, self._context.group_rank, engine)
        self._layouts.initial()
        engine.check_copies()
        job = RankJob(
            engine,
            plan.until,
            evaluate=plan.evaluate,
            eval_every=plan.evaluate_every,
            eval_shared=plan.evaluate_shared,
            eval_at_start=plan.evaluate_at_start,
            updated=self._updated,
            advance=plan.accumulate,
            initial=self._digest_of_replica(digest(engine.state()).state),
            orders=self._orders_of(engine),
        )
        at, chaos = self._context.spec.coordinate, self._context.config.chaos
        slowdown = slowdown_of(chaos.slow, at.replica, at.pp)
        if slowdown is not None and isinstance(engine, PipelineEngine):
            engine.slow_down(slowdown)
        worker = self._runtime.open(job)
        self._open.enter_context(worker)
        return worker

    def _orders_of(self, engine: SessionEngine) -> RankOrders | None:
        if not isinstance(engine, PipelineEngine) or engine.adaptation is None or engine.stages == 1:
            return None
        return RankOrders(engine, OrderBook(self.store, self._context.output))

    def say(self, text: str) -> None:
        self._runtime.say(text)

    def log(self, step: int, values: Mapping[str, float], done: Done) -> None:
        self._send(Logged.STEP, step, values, len(done.record.summed), done.stall_s, done.record.generation)

    def validation(self, order: Evaluate, found: Measured) -> None:
        if self._runtime.metrics is not None:
            of, among = order.of, list(order.among)
            label, replica = self._context.label, self._context.replica
            line = ValidationPart(replica, label, order.step, order.lineage, of, among, found.values, found.weight)
            self._runtime.metrics.send(line.to_json())

    def busy(self, doing: str, limit_s: float) -> AbstractContextManager[None]:
        return self._context.progress.busy(doing, limit_s)

    def stop(self, reason: str) -> None:
        self._runtime.report(StopAsked(reason))

    def _send(
        self, what: str, step: int, values: Mapping[str, float], participants: int, stall_s: float, generation: int = 0
    ) -> None:
        if self._runtime.metrics is not None:
            label, replica = self._context.label, self._context.replica
            line = Logged(what, replica, label, step, dict(values), self._seconds, participants, stall_s, generation)
            self._runtime.metrics.send(line.to_json())

    def _updated(self, done: Done) -> None:
        assert self._layouts is not None
        self._layouts.updated(done.record)
        now = time.monotonic()
        self._seconds, self._updated_s = now - self._updated_s, now

    def _digest_of_replica(self, mine: str) -> str:
        """Of the initial state of all its ranks. Raises Retryable if a rank does not come."""
        context = self._context
        if context.group_world_size == 1:
            return mine
        self.store.put_if_absent(OfRank.SESSION.key(context.life, context.group_rank), mine)
        keys = [OfRank.SESSION.key(context.life, rank) for rank in range(context.group_world_size)]
        parts = [self.store.wait(key, context.timeouts.start_s) for key in keys]
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@contextmanager
def opened_session(runtime: RankRuntime, config: SessionConfig, local_rank: int = -1) -> Iterator[Session]:
    """A session on this rank's runtime, which has been entered; random numbers begin alike on all ranks. `local_rank`: see
    `Place`."""
    at = runtime.context.spec.coordinate
    with RankHost(runtime) as host:
        session = Session(config.session(at.replica, at.dp_shard, local_rank, at.tp, at.pp, at.cp), host)
        seed_all(config.seed)
        yield session


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code and prints the error, if any."""
    configure_logging(_label(spec))
    runtime: RankRuntime | None = None
    session: Session | None = None
    try:
        check_folder(spec)
        config = SessionConfig.from_plain(spec.config)
        os.environ[RANK_VARIABLE] = _label(spec)
        with RankRuntime(spec, config) as runtime, opened_session(runtime, config) as session:
            try:
                config.train.load()(session, **config.arguments)
            except SystemExit as left:
                if not is_return(left):
                    raise
            check_loop_ended(session)
        return 0
    except BaseException as error:
        ranks = 1 if runtime is None else runtime.context.group_world_size
        root = root_in(error, ranks)
        _tell_end(place_in(spec, session), error, root)
        return exit_code(root)


def is_return(left: SystemExit) -> bool:
    """`sys.exit()` of a train function that has nothing to complain of: as its return."""
    return not isinstance(left, Departed) and left.code in (None, 0)


def root_in(error: BaseException, ranks: int) -> BaseException:
    """The root cause of an error in a replica of so many ranks: Retryable for what a collective raises when another rank has
    gone, which is no fault of the user's code: a replica leaves whole."""
    if ranks > 1 and (why := lost_rank(error)):
        lost = Retryable(f"a rank of this replica is lost: {why}")
        lost.__cause__ = error
        return lost
    return root_of(error)


def _label(spec: RankSpec) -> str:
    """r0, or r0.1 for dp_shard rank 1; r0.pp1.tp1 for others than the first on these axes."""
    at = spec.coordinate
    others = [f".{axis}{place}" for axis, place in (("pp", at.pp), ("cp", at.cp), ("tp", at.tp)) if place]
    return f"r{at.replica}" + (f".{at.dp_shard}" if at.dp_shard else "") + "".join(others)


def _tell_end(where: str, error: BaseException, root: BaseException) -> None:
    """The user's own traceback first, without the frame of this module; then where it happened, and the root cause."""
    if not isinstance(root, ConfigError | Departed | Diverged):
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        tell_traceback(error, below)
        tell(f"{type(error).__name__} in {where}: {error}")
    tell(RankEnd.of(root).line)


def place_in(spec: RankSpec, session: Session | None) -> str:
    """Which rank, and which step and batch it is in."""
    where = f"{_label(spec)} (incarnation {spec.incarnation})"
    step = session.step if session is not None else None
    return where if step is None else f"{where}, step {step.number}, batch {step.batch} of its stream"


def check_loop_ended(session: Session) -> None:
    """Raises MisuseError unless the program has gone through its loop."""
    if session.left_early:
        rule = "session.stop(reason) ends a run early"
        raise MisuseError(f"the loop over session.steps (or the prepared loader) was left before its end; {rule}")
    if not session.began:
        raise MisuseError("the program did not iterate over session.steps (or the prepared loader)")


def seed_all(seed: int) -> None:
    """Models that are built alike begin alike on all replicas."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def main(run: Callable[[RankSpec], int] = run_rank) -> None:
    run_as_process(run)


if __name__ == "__main__":
    main()
