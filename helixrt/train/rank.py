"""One rank of the main job: builds the parts, gives them to `replica/`, and runs until the end.

In: a `RankSpec`. Out: an exit code; everything else goes through the run's store and folder.
`python -m helixrt.train.rank` reads the spec as JSON from standard input; a Ray actor calls
`run_rank` itself. The first rank of a replica (stage 0) is its leader.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from helixrt.collectives.endpoints import interface_towards, open_endpoint
from helixrt.collectives.exchange import Exchange
from helixrt.collectives.ftar import FtarExchange
from helixrt.collectives.gloo import GlooExchange
from helixrt.errors import ConfigError, Fatal, Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.machine import StepMachine
from helixrt.ray_cluster.policies import CONFIG_EXIT, FATAL_EXIT, RELOAD_EXIT
from helixrt.record import BoundedSink, FlightRecord, Kind
from helixrt.replica.commands import Broken, Channel, Evaluate, RankCommand, RankReport, Save
from helixrt.replica.contracts import Membership, RankSpec, RunStore, StateTransport
from helixrt.replica.evidence import Holders
from helixrt.replica.leader import Leader, LeaderHooks
from helixrt.replica.membership import SoloMembership, TorchftMembership
from helixrt.replica.progress import LEADER, Progress
from helixrt.replica.rank import Done, Hooks, RankWorker
from helixrt.replica.rank_monitor import PublishedMonitor, monitors
from helixrt.replica.run_keys import ended_key, running_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import TcpRunStore, split_address
from helixrt.timeouts import Timeouts, derive
from helixrt.train import checkpoint as checkpoints
from helixrt.train.chaos import ChaosSink
from helixrt.train.chaos_actions import ReplicaKiller
from helixrt.train.checkpoint_orders import CheckpointOrders
from helixrt.train.checkpoint_writer import Checkpointer
from helixrt.train.config import TrainConfig
from helixrt.train.data import ReplicaStream, load_corpus
from helixrt.train.durable_state import DurableState
from helixrt.train.engine import PipelineEngine
from helixrt.train.failover import FailoverNews
from helixrt.train.finish import EndOfRun, ObservedMembership
from helixrt.train.heap import keep_freed_memory
from helixrt.train.leader_reports import MetricsSender
from helixrt.train.lineage_files import LineageWriter
from helixrt.train.metrics import StepMetrics, ValidationMetrics
from helixrt.train.reach import reach
from helixrt.train.step_rules import (
    WAITING_LINE_S,
    agreed_memory,
    exclusion_text,
    note_waiting,
    publish_memory,
    skipped_positions,
    step_rules,
    waiting_text,
)
from helixrt.train.storage_trouble import StorageTrouble

RETRY_CODE = 75  # EX_TEMPFAIL: something else broke (a stage of this replica, the store); start the replica again
WAITS_FOR_STAGES = ("helixrt.pipeline.channels", "torch.distributed.distributed_c10d")  # modules


class Rank:
    """One rank, from its parts to its end. Built and run in the process's main thread."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec, self.config = spec, TrainConfig.from_plain(spec.config)
        self.replica, self.ring, self.rings = spec.coordinate.replica, spec.coordinate.pp, self.config.mesh.pp
        self.life = f"{self.replica}/{spec.incarnation}"
        self.label = f"r{self.replica}.pp{self.ring}"
        self.output = Path(spec.output)
        self.timeouts: Timeouts = derive(self.config.step_timeout_s, self.config.heartbeat_s)
        self.store: RunStore = TcpRunStore(spec.store)
        self.record = FlightRecord(self.label)
        flight = self.output / "flight" / f"{self.label}.inc{spec.incarnation}.jsonl"
        self.record.attach(BoundedSink(flight, self.config.output.detail_mb << 20))
        me, period_s = str(spec.coordinate), self.timeouts.progress_period_s
        self.progress = Progress(self.store, me, spec.incarnation, period_s, WAITS_FOR_STAGES)
        self.record.attach(self.progress)
        killed = any(kill.replica == self.replica for kill in self.config.chaos.kill)
        self.killer = ReplicaKiller(self.store, self.life, self.ring, self.rings, obeys=killed and self.rings > 1)
        self.record.attach(
            ChaosSink(self.config.chaos, self.replica, spec.incarnation, self.killer.kill, self.record, self._claims, self.ring)
        )
        self.record.write(Kind.RANK_START, pid=os.getpid(), incarnation=spec.incarnation)
        self.failovers: FailoverNews | None = None
        if self.config.checkpoint.after_failover and self.config.checkpoint.every:
            self.failovers = FailoverNews(self.store, f"{self.label}.inc{spec.incarnation}")
            self.record.attach(self.failovers)
        self.leads = self.ring == 0
        self.said_running, self.said_waiting_s = False, -math.inf
        self.metrics = MetricsSender(self.store, self.replica, spec.incarnation, self.label) if self.leads else None
        self.lineage = self._lineage_writer() if self.leads else None
        self.closing: list[Channel | PublishedMonitor] = []
        self.last_update_s = time.monotonic()

    # ---------------------------------------------------------------- parts

    def run(self) -> None:
        """Train to the end. Raises ConfigError, or what makes this rank unable to go on."""
        torch.set_num_threads(self.config.threads)
        keep_freed_memory()
        engine = self._engine()
        publish_memory(self.config, engine, self.store, self.life, self.ring)
        transport = self._transport()
        worker = RankWorker(
            self.replica,
            self.ring,
            engine,
            self._exchange(),
            transport,
            self.record,
            self.timeouts,
            f"{self.spec.store}/exchange/{self.ring}",
            self._reporter,
            Hooks(self._updated, self._evaluated, self._saved, self._stuck, self._load),
            self.config.catchup.max_wait_s,
            self.progress,
        )
        self.worker, self.engine = worker, engine
        self.durable = DurableState(
            self.output / "checkpoints", self.ring, self.rings, engine, lambda: Log(RunLog(self.store).read_from(0))
        )
        self.checkpointer = Checkpointer(
            self.output / "checkpoints",
            self.ring,
            self.rings,
            self.store,
            self.record,
            self.config.checkpoint.every,
            self.config.checkpoint.keep,
            self.config.steps,
            self.config.checkpoint.write_s,
            self.life,
            self._say,
        )
        self.store.put_if_absent(f"address/{self.life}/{self.ring}", transport.address)
        try:
            if self.leads:
                self._lead()
            else:
                self._follow()
            self.last_update_s = time.monotonic()
            worker.run()
            self.checkpointer.close()
        finally:
            self._close()

    def _engine(self) -> PipelineEngine:
        config = self.config
        corpus = load_corpus(config.data)
        data, mesh = config.data, config.mesh
        stream = ReplicaStream(corpus, self.replica, mesh.replicas, data.batch, data.seq_len, config.seed)
        batch_at = self._batches(stream)
        if self.rings > 1:
            self._connect_stages()
        return PipelineEngine(
            config.model,
            config.optim,
            config.schedule,
            batch=data.batch,
            seq_len=data.seq_len,
            steps=config.steps,
            seed=config.seed,
            stage=self.ring,
            stages=self.rings,
            group=dist.group.WORLD if self.rings > 1 else None,
            batch_at=batch_at,
            validation=stream.validation_batch,
            record=self.record,
        )

    def _connect_stages(self) -> None:
        """The process group of this replica's stages, over the interface that leads to the run's store."""
        host, port = split_address(self.spec.store)
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self.timeouts.start_s)
        )
        if ipaddress.ip_address(interface_towards(self.spec.store)).is_loopback:  # else Gloo goes by the machine's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"pipeline/{self.life}", store),
            rank=self.ring,
            world_size=self.rings,
            timeout=timedelta(seconds=self.timeouts.step_s),
        )

    def _lineage_writer(self) -> LineageWriter:
        trouble = StorageTrouble("lineage", self.record, self._say)
        return LineageWriter(self.output / "lineage", 0.5 * self.replica, trouble, RunLog(self.store).read_from)

    def _say(self, text: str) -> None:
        """Have the driver print a line, if this rank has a way to tell it."""
        print(f"{self.label}: {text}", flush=True)
        if self.metrics is not None:
            self.metrics.say(text)

    def _batches(self, stream: ReplicaStream) -> Callable[[int], torch.Tensor]:
        """Where the engine's batches come from; a benchmark may stand in between."""
        return stream.batch_at

    def _transport(self) -> StateTransport:
        catchup = self.config.catchup
        if self.spec.transport == "ray":
            from helixrt.ray_cluster.state_transport import RayTransport

            return RayTransport(serve_cpu=catchup.serve_cpu, serve_mb_s=catchup.serve_mb_s)
        from helixrt.replica.http_transport import HttpTransport

        here = interface_towards(self.spec.store)
        return HttpTransport(self.spec.secret, here, catchup.serve_cpu, catchup.serve_mb_s)

    def _exchange(self) -> Exchange:
        if self.config.exchange == "gloo":
            return GlooExchange(self.timeouts.exchange_s)
        here, secret = interface_towards(self.spec.store), self.spec.secret.encode()
        endpoint = open_endpoint(secret, here, reach(self.config.transport, self.replica, self.timeouts), self.record)
        return FtarExchange(endpoint, self.timeouts.exchange_s, name=f"exchange-{self.ring}")

    def _membership(self) -> Membership:
        if self.config.mesh.replicas == 1:
            return SoloMembership(self.spec.run_epoch_s)
        membership = TorchftMembership(
            self.replica,
            self.spec.incarnation,
            self.spec.lighthouse,
            self.timeouts,
            self.spec.run_epoch_s,
            lambda replica, incarnation: self.store.get(ended_key(replica, incarnation)) is not None,
            interface_towards(self.spec.store),
        )
        others = monitors(self.store, self.life, self.rings, self.timeouts.start_s)
        membership.depend_on(others, self.spec.secret.encode())
        return membership

    # ---------------------------------------------------------------- leading and following

    def _lead(self) -> None:
        holders = Holders(self.store, self.replica, self.spec.incarnation)
        holders.end_predecessors()
        entries = RunLog(self.store).read_from(0)
        assert self.lineage is not None
        for index, entry in enumerate(entries):
            self.lineage.append(index, entry)
        machine = StepMachine(
            self.replica,
            self.spec.incarnation,
            self.rings,
            Log(entries),
            entries[0].hash if len(entries) == 1 else "",
            self.config.steps,
            step_rules(self.config, agreed_memory(self.store, self.life, self.rings, self.timeouts.start_s)),
            self.spec.life,
            skipped_positions(self.store, self.replica, entries[-1]),
        )
        addresses = tuple(self.store.wait(f"address/{self.life}/{r}", self.timeouts.start_s) for r in range(self.rings))
        membership = ObservedMembership(self._membership())
        self.checkpoint_orders = CheckpointOrders(
            self.replica,
            self.output / "checkpoints",
            self.config.checkpoint.every,
            self.config.checkpoint.retry_s,
            self.config.steps,
            self.store,
            self.checkpointer,
            self.failovers,
            self._tell,
        )
        self.orders = Channel(self.store, f"orders/{self.life}", self.timeouts.step_s)
        hooks = LeaderHooks(
            self.lineage.append,
            self._ordered,
            lambda m: self.end_of_run.resting(m),
            self.worker.fail,
            self._waiting,
            self.durable.newest,
            partial(self.progress.doing, thread=LEADER),
        )
        self.leader = Leader(
            machine, membership, RunLog(self.store), holders, addresses, self._tell, self.record, self.timeouts, hooks
        )
        self.membership = membership
        self.end_of_run = EndOfRun(
            self.replica,
            self.rings,
            self.store,
            membership,
            self.checkpoint_orders,
            self.leader.digests,
            self._tell,
            self.config.eval.batches,
            self.timeouts.evaluate_s,
        )
        for ring in range(1, self.rings):
            reports = Channel(self.store, f"reports/{self.life}/{ring}", self.timeouts.step_s)
            reports.follow(partial(self.leader.report, ring), self._store_gone)
            self.closing.append(reports)
        if self.spec.incarnation == 0:
            membership.announce()  # before the others join: they wait for whom they know to live
            self._await_the_others()
        self.leader.start()

    def _await_the_others(self) -> None:
        """The first quorum should have everyone: wait for the other replicas' first start, within limits."""
        self.store.put_if_absent(f"ready/{self.replica}", "yes")
        deadline = time.monotonic() + self.timeouts.start_s
        for replica in range(self.config.mesh.replicas):
            try:
                self.store.wait(f"ready/{replica}", max(0.1, deadline - time.monotonic()))
            except Retryable:
                return

    def _follow(self) -> None:
        here, secret = interface_towards(self.spec.store), self.spec.secret.encode()
        self.closing.append(PublishedMonitor(self.store, self.life, self.ring, here, secret))
        self.reports = Channel(self.store, f"reports/{self.life}/{self.ring}", self.timeouts.step_s)
        self.report_lock = threading.Lock()
        orders = Channel(self.store, f"orders/{self.life}", self.timeouts.step_s)
        orders.follow(self.worker.dispatch, self._store_gone)
        self.closing.append(orders)

    def _store_gone(self, why: str) -> None:
        self.worker.fail(Fatal(why))

    def _tell(self, command: RankCommand) -> None:
        if self.rings > 1:
            self.orders.put(command)
        self.worker.dispatch(command)

    def _reporter(self, report: RankReport) -> None:
        if self.leads:
            self.leader.report(self.ring, report)
        else:
            with self.report_lock:  # exchange, fetch and main threads all report
                self.reports.put(report)

    # ---------------------------------------------------------------- what the job adds

    def _ordered(self, command: RankCommand) -> None:
        if isinstance(command, p.Exchange):
            self._say_running()
        if isinstance(command, p.Apply) and self._writes(command.record):
            if (text := exclusion_text(command.record)) is not None and self.metrics is not None:
                self.metrics.say(text)
            if (save := self.checkpoint_orders.out_of_turn(command.record)) is not None:
                self._tell(save)
            every, step = self.config.eval.every, command.record.step
            if every and step % every == 0 and step < self.config.steps:  # the last one is evaluated when all rest
                self._tell(Evaluate(step, self.config.eval.batches))

    def _say_running(self) -> None:
        if not self.said_running:
            with suppress(Retryable):  # the next quorum says it
                self.store.put_if_absent(running_key(self.replica, self.spec.incarnation), "yes")
                self.said_running = True

    def _waiting(self, action: p.Wait) -> None:
        """A replica that waits has joined: no start timeout and no restart budget apply."""
        self._say_running()
        text = waiting_text(action, self.config.supersede_after_s, self.output)
        if text is not None and self.metrics is not None and time.monotonic() - self.said_waiting_s > WAITING_LINE_S:
            self.said_waiting_s = time.monotonic()
            self.metrics.say(text)
            note_waiting(self.output, text)

    def _load(self, lineage: str, initial: bool) -> bool:
        return self.durable.load(lineage, initial)

    def _writes(self, record: CommitRecord) -> bool:
        return self.replica == checkpoints.writer_of(record)

    def _flush(self) -> None:
        """Make the lineage durable, before a checkpoint that refers to it."""
        if self.lineage is not None:
            self.lineage.flush()

    def _saved(self, command: Save) -> None:
        self.checkpointer.save(command.record, self.engine.state(), self._flush, command.after_failover)

    def _updated(self, done: Done) -> None:
        self.checkpointer.maybe_save(done.record, self.engine.state(), self._writes(done.record), self._flush)
        now = time.monotonic()
        seconds, self.last_update_s = now - self.last_update_s, now
        if self.metrics is not None and done.work is not None and done.update is not None:
            self.metrics.send(
                StepMetrics(
                    replica=self.replica,
                    rank=self.label,
                    step=done.record.step,
                    loss_nats=done.work.loss,
                    tokens=done.work.tokens,
                    seconds=seconds,
                    participants=len(done.record.summed),
                    stall_s=done.stall_s,
                    grad_norm=done.update.grad_norm,
                    learning_rate=done.update.learning_rate,
                    generation=done.record.generation,
                ).to_json()
            )

    def _evaluated(self, step: int, loss: float, tokens: int) -> None:
        if self.metrics is not None:
            self.metrics.send(ValidationMetrics(self.replica, step, loss, tokens).to_json())

    # ---------------------------------------------------------------- ends

    def _stuck(self, why: str) -> None:
        """The main thread hangs, and so would every orderly way out."""
        print(f"{self.spec.coordinate}: {why}; compute hangs, so this process ends", file=sys.stderr, flush=True)
        os._exit(RETRY_CODE)

    def _claims(self, name: str) -> bool:
        """Chaos: whether this is the rank's to carry out; the first to come to its moment gets it."""
        return self.store.put_if_absent(f"chaos/{name}", f"{self.life}/{self.ring}") == f"{self.life}/{self.ring}"

    def _close(self) -> None:
        for channel in self.closing:
            channel.close()
        if self.leads:
            self.leader.close() if hasattr(self, "leader") else None
            self.membership.close() if hasattr(self, "membership") else None
        # what the lineage cannot write, the metrics tell
        for part in (self.failovers, self.lineage, self.metrics, self.killer, self.progress):
            if part is not None:
                part.close()
        self.record.write(Kind.RANK_END, code=0)


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code and prints the error, if any."""
    rank: Rank | None = None
    try:
        rank = Rank(spec)
        rank.run()
        return 0
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return CONFIG_EXIT
    except BaseException as error:
        import traceback

        traceback.print_exc()
        print(f"{spec.coordinate}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if rank is not None and not rank.leads and hasattr(rank, "reports"):
            try:
                rank._reporter(Broken(f"{type(error).__name__}: {error}"))
            except Retryable:
                pass  # the store is gone too; the exit code tells
        if isinstance(error, StartAgain):
            return RELOAD_EXIT
        return RETRY_CODE if isinstance(error, Retryable) else FATAL_EXIT


def main() -> None:
    code = run_rank(RankSpec.from_plain(json.loads(sys.stdin.read())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch and of servers must not keep a finished rank


if __name__ == "__main__":
    main()
