"""What every part of a rank's runtime needs: its place, the settings, the run's store, its flight record and its report of
progress; and what the job adds to a rank."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from helixrt.collectives.endpoints import interface_towards
from helixrt.errors import ConfigError
from helixrt.job.checkpoint import checkpoints_of
from helixrt.job.config import JobConfig
from helixrt.job.machine import boot_identity
from helixrt.job.orders import RankOrders
from helixrt.job.places import group_rank, group_world_size
from helixrt.job.stored_path import Place
from helixrt.record import BoundedSink, FlightRecord, Kind, shrink_life
from helixrt.replica.commands import Evaluate
from helixrt.replica.contracts import Engine, RankSpec, RunStore
from helixrt.replica.progress import Progress
from helixrt.replica.rank import Done
from helixrt.replica.rank_log import rank_label
from helixrt.replica.store_client import run_store
from helixrt.replica.versions import VARIABLE, check_versions
from helixrt.replica.work_page import word_if_possible
from helixrt.timeouts import Timeouts, derive

PROGRESS_S = 0.5  # how long a progress report tries a store that is away
_SHRUNK = 8  # lives before the newest two that a start looks at: some ranks of a life may never have begun
WAITS_FOR_PEERS = (  # modules that wait for other ranks of the replica
    "helixrt.pipeline.channels",
    "helixrt.pipeline.endpoint_channels",
    "helixrt.pipeline.reductions",
    "helixrt.replica.exchanging",  # for the thread that waits for them, when this rank has given up
    "helixrt.parallel.collective_functions",
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard",
    "deepspeed.comm",
    "deepspeed.runtime.zero.partition_parameters",  # waits for its gathers
)


@dataclass(frozen=True)
class RankJob:
    """What a job adds to a rank: the engine, how many updates, and what to do at them.

    `steps`: number of the run's last update. `evaluate(command)` evaluates the engine's state, in the main thread, every
    `eval_every` steps (0: never) and after the last one, with `eval_at_start` before the first one, too; `eval_shared`: on all
    replicas, each its part. `updated(done)` is called in the main thread after each update. A step takes `advance` batches of
    the replica's stream. `initial` is the digest of this rank's state at the start, which replicas compare ("": they begin
    alike by construction). `orders`: the engine's schedule, where the job may change its order.
    """

    engine: Engine
    steps: int
    evaluate: Callable[[Evaluate], None] = lambda command: None
    eval_every: int = 0
    eval_at_start: bool = False
    eval_shared: bool = False
    updated: Callable[[Done], None] = lambda done: None
    advance: int = 1
    initial: str = ""
    orders: RankOrders | None = None


@dataclass(frozen=True)
class RankContext:
    """Of one rank, from its start to its end."""

    spec: RankSpec
    config: JobConfig
    timeouts: Timeouts
    store: RunStore
    record: FlightRecord
    progress: Progress

    @cached_property
    def replica(self) -> int:
        return self.spec.coordinate.replica

    @cached_property
    def group_rank(self) -> int:
        """This rank's index inside its replica."""
        return group_rank(self.config.mesh, self.spec.coordinate)

    @cached_property
    def group_world_size(self) -> int:
        """How many ranks a replica has."""
        return group_world_size(self.config.mesh)

    @property
    def leads(self) -> bool:
        """Whether this is the rank that leads its replica."""
        return self.group_rank == 0

    @cached_property
    def life(self) -> str:
        """Names this incarnation of the replica in keys of the run's store."""
        return f"{self.replica}/{self.spec.incarnation}"

    @cached_property
    def label(self) -> str:
        """Names the rank in logs and records."""
        return rank_label(self.spec.coordinate)

    @cached_property
    def output(self) -> Path:
        """The run's folder."""
        return Path(self.spec.output)

    @cached_property
    def checkpoints(self) -> Place:
        """Where the run's checkpoints are."""
        return checkpoints_of(self.output)

    @cached_property
    def interface(self) -> str:
        """The address of this machine that leads to the run's store."""
        return interface_towards(self.spec.store)


def check_folder(spec: RankSpec) -> None:
    """Raises ConfigError if a Ray actor has other versions on its node (helixrt, torch), or does not find the run's folder
    (storage): the driver has looked at the nodes that were there at the start."""
    if spec.transport != "ray":
        return
    check_versions(json.loads(os.environ.get(VARIABLE, "{}")), "what starts the ranks")
    try:
        found = json.loads((Path(spec.output) / "run.json").read_text(encoding="utf-8"))["run"] == spec.run
        wrong = "" if found else "there is another run's folder at this path"
    except (OSError, ValueError, KeyError) as error:
        wrong = getattr(error, "strerror", None) or str(error)
    if wrong:
        rule = f"must be a folder that all nodes of the cluster share; on node {socket.gethostname()}: {wrong}"
        raise ConfigError("storage", spec.output, rule)


def flight_sink(folder: Path, label: str, incarnation: int, most_bytes: int) -> BoundedSink:
    """The files of this life of a rank. Those of the life before stay whole; earlier ones are shrunk (`shrink_life`)."""
    for life in range(max(0, incarnation - 1 - _SHRUNK), incarnation - 1):
        with suppress(OSError):  # tried again at the next start
            shrink_life(folder / f"{label}.inc{life}.jsonl")
    return BoundedSink(folder / f"{label}.inc{incarnation}.jsonl", most_bytes)


def open_context(spec: RankSpec, config: JobConfig) -> RankContext:
    """Connect to the run's store, and begin the flight record and the progress report."""
    timeouts = derive(config.step_timeout_s, config.heartbeat_s)
    store = run_store(spec.store, spec.durable, spec.secret)
    # What is set again soon must not hold up the thread that sets it while the store is away.
    soon = run_store(spec.store, spec.durable, spec.secret, PROGRESS_S) if spec.durable else store
    work = word_if_possible(spec.work_page)
    progress = Progress(soon, str(spec.coordinate), spec.incarnation, timeouts.progress_period_s, WAITS_FOR_PEERS, work)
    record = FlightRecord(rank_label(spec.coordinate))
    context = RankContext(spec, config, timeouts, store, record, progress)
    record.attach(flight_sink(context.output / "flight", context.label, spec.incarnation, config.output.detail_mb << 20))
    record.attach(progress)
    record.write(Kind.RANK_START, pid=os.getpid(), incarnation=spec.incarnation, clock=boot_identity())
    return context
