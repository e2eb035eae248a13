"""The settings of a job's runtime: frozen dataclasses, one small one per component.

Nothing here knows a model, data or an optimizer. `helixrt.RunOptions.of` takes a `JobConfig`, and a program may add settings of
its own in a subclass, as `helixrt.train.config.TrainConfig` does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from helixrt.protocol.step.deal import Deal

MEMBERSHIPS = ("auto", "torchft", "store")


@dataclass(frozen=True)
class MeshConfig:
    replicas: int = 2
    pp: int = 2
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50
    """Steps between two checkpoints; the last step always has one. 0: no checkpoints."""
    keep: int = 3
    """How many of the newest complete checkpoints are kept; one more as long as the newest step may be superseded."""
    path: str = ""
    """Where checkpoints are: s3://BUCKET/FOLDER or another address of fsspec, or a folder; empty: in the run's folder."""
    after_failover: bool = True
    """Write an additional checkpoint when a link has lost one of its rails; needs `every` > 0."""
    write_s: float = 3600.0
    """A checkpoint that is not written after so long has failed. Reading one may take as long."""
    retry_s: float = 300.0
    """How long the last checkpoint is tried again if it fails; then the run ends with exit code 1."""


@dataclass(frozen=True)
class CatchupConfig:
    max_wait_s: float = 0.0
    """How long an exchange waits for a replica that is fetching state."""
    replay: int = 16
    """The most reduced steps that a replica which is behind keeps while it fetches; fewer if `memory_gb` allows fewer."""
    memory_gb: float = 4.0
    """The most GiB of host memory per rank for reduced gradients, snapshots and fetched state."""
    hold_s: float = 600.0
    """The longest wait, once, for a replica whose fetched state was out of date twice."""
    serve_cpu: float = 0.0
    """The most cores that a rank uses to serve state; 0: idle processor time only."""
    serve_mb_s: float = 0.0
    """The most MB/s that a rank serves; 0: no limit."""


@dataclass(frozen=True)
class TransportConfig:
    """How ranks of different replicas reach each other, with exchange=ftar. The same for all, but for the names of NICs."""

    kind: str = "auto"
    """`auto` | `tcp` | `shared_memory` | `verbs`."""
    rails: tuple[str, ...] = ()
    """NICs, the default first: eth0, 10.0.1.7, mlx5_0, mlx5_0/1 (a port); a|b: a for replica 0, b for replica 1, in turn.
    Empty: the interface towards the run's store, and every active RDMA port."""
    paths: int = 1
    """Paths through the network on each rail; more than one need `hopping`."""
    hopping: str = "none"
    """The rule that chooses the path of new messages: `none` | `hopper` | `flowbender` | `ecmp`."""
    rate_mbit: float = 0.0
    """The rated speed of a path, for hopping: round-trip times are measured against it."""
    latency_ms: float = 1.0
    """The latency of an idle path, for the same purpose."""
    heartbeat_s: float = 0.0
    """A peer that does not run or cannot be reached is lost within 1.5 heartbeats; 0: half of that of the membership."""

    def rails_of(self, replica: int) -> tuple[str, ...]:
        return tuple(names[replica % len(names)] for names in (rail.split("|") for rail in self.rails))


@dataclass(frozen=True)
class PipelineConfig:
    """How the stages of a replica reach each other, with mesh.pp above 1."""

    channels: str = "endpoint"
    """`endpoint` (as `transport` says, where exchange=ftar) | `gloo`."""
    queues: int = 2
    """Connections to each stage, each with a thread; micro-batches take turns."""
    direct: int = 0
    """How many sends and receives of a stage may be unfinished before it waits, in order; 0: sends never delay the stage."""
    host_mb: int = 1024
    """Host memory per rank for messages that wait to be sent."""


@dataclass(frozen=True)
class RayConfig:
    """Where ranks are Ray actors: what the cluster keeps for each rank, and which code travels to its nodes."""

    cpus: float = 0.0
    """CPUs that the cluster reserves for each rank; 0: one per compute thread."""
    gpus: float = -1.0
    """GPUs that the cluster reserves for each rank; -1: one with device=cuda, or with device=auto if the cluster has GPUs."""
    code: str = ""
    """The folder that is sent to the nodes and is the working directory of ranks; empty: that of the program; none: the nodes
    have it. Not in a Ray job, which has its own."""


@dataclass(frozen=True)
class KillConfig:
    """Kill a replica (or the driver, replica = -1) with SIGKILL once, at a moment of a step."""

    replica: int = 1
    step: int = 20
    moment: str = "forward"
    """One of `helixrt.job.chaos.MOMENTS`."""


@dataclass(frozen=True)
class FaultConfig:
    """Have one rank of a replica fail once in its own process, at a moment of a step, in another way than by a kill.

    Kinds: `stop` (SIGSTOP), `hang` (the thread at that moment waits for ever), `hang_lock` (and keeps the interpreter lock),
    `slow` (the moment takes `seconds` longer), `exception` (is raised), `oom` (torch's allocator raises as it does when it
    gets no memory; a rank that the kernel kills for memory is a `chaos.kill`).
    """

    kind: str = "stop"
    """`stop` | `hang` | `hang_lock` | `slow` | `exception` | `oom`."""
    replica: int = 1
    rank: int = 0
    """The rank of the replica; the moments before_quorum, before_commit and after_record are those of rank 0."""
    step: int = 20
    moment: str = "forward"
    """As for a kill."""
    seconds: float = 5.0
    """With `slow`: how much longer the moment takes."""


@dataclass(frozen=True)
class SlowConfig:
    """Have the operations of a pipeline stage take `factor` times as long, and each F, B and W at least `least_ms`, in steps
    `steps[0]` to `steps[1]` - 1: the stage sleeps behind each, and its results leave when it wakes."""

    stage: int = 0
    factor: float = 1.5
    steps: tuple[int, ...] = ()
    """The first step, and the one after the last; empty: all steps."""
    replica: int = -1
    """-1: all replicas."""
    least_ms: float = 0.0


@dataclass(frozen=True)
class CommandConfig:
    """Run a command once, at a moment of a step of a replica, on that rank's machine: to cut a cable, or to mend it."""

    command: str = ""
    """A program and its arguments; no shell."""
    replica: int = 0
    step: int = 20
    moment: str = "forward"
    """As for a kill."""


@dataclass(frozen=True)
class ChaosConfig:
    slow: tuple[SlowConfig, ...] = field(default=(), kw_only=True)
    kill: tuple[KillConfig, ...] = ()
    run: tuple[CommandConfig, ...] = ()
    fault: tuple[FaultConfig, ...] = ()
    link: tuple[dict[str, Any], ...] = ()
    """{from: 1, to: 2, delay_ms: 60, steps: [20, 60]}: see `helixrt.job.link_delays`."""


RESUME, FETCH, STOP = "resume", "fetch", "stop"  # checks.on_divergence


@dataclass(frozen=True)
class ChecksConfig:
    """What is compared while the run goes."""

    every: int = 50
    """In so many steps replicas compare all of their state, a part in each. 0: they do not."""
    on_divergence: str = RESUME
    """What a difference does: `resume`: the run goes on, in a new life, from its newest checkpoint whose state was found equal;
    `fetch`: the replicas that differ fetch the state of the others, which makes them equal, and no more; `stop`."""
    same_streams: bool = False
    """Several streams may give the same batches; else the run is refused after a few steps."""
    strict_data: bool = False
    """A stream that gives other batches when it is read again after a restart ends the run; else one line says so."""


@dataclass(frozen=True)
class OutputConfig:
    root: str = "outputs"
    """Runs go to root/DATE/TIME."""
    peak_tflops: float = 0.0
    """Of one rank's device in the compute type, for model FLOPs utilisation; 0: utilisation is not shown."""
    detail_mb: int = 64
    """MB of events of operations and messages that each rank keeps, the newest ones, and as many of its steps. Rare events are
    all kept."""


@dataclass(frozen=True)
class JobConfig:
    """What the runtime of a job needs. `step_timeout_s` is the one timeout to set."""

    name: str = "run"
    seed: int = 0
    resume: bool = False
    launcher: str = "auto"
    """`local` | `ray` | `environment` (others start the ranks) | MODULE:NAME | `auto` (ray in a Ray job)."""
    start: str = "auto"
    """How local ranks start: `warm` (forks of a process that has done the imports) | `cold` | `auto` (warm on Linux)."""
    threads: int = 1
    """Compute threads per rank."""
    membership: str = "auto"
    """What decides which replicas take part: `torchft` | `store` | `auto` (torchft where it is installed)."""
    exchange: str = "ftar"
    """What sums gradients across replicas: `ftar` | `gloo`."""
    step_timeout_s: float = 60.0
    """No step of a healthy rank takes longer; the other timeouts are derived from it."""
    heartbeat_s: float = 0.0
    """Of the membership: a replica that does not run takes no part after 1.5 heartbeats; 0: derived."""
    restarts: int = 3
    """How often a lost replica is started again before it contributes to a commit."""
    fatal_restarts: int = 2
    """How many of these may follow an exception in one of its ranks."""
    signal_grace_s: float = 25.0
    """After SIGTERM, SIGINT or SIGHUP to the driver: the time for the last checkpoint. Launchers kill after 30 s by default."""
    on_poison: str = "stop"
    """What is done about a batch that ends the same replica twice: `stop` the run | `skip` the batch."""
    supersede_after_s: float = 600.0
    """How long replicas wait for one that holds newer state and has not ended."""
    nonfinite_limit: int = 10
    """A replica whose gradient was not finite in more than so many of the last 100 steps is started again."""
    host: str = "127.0.0.1"
    """The address that the run's servers bind to; with ranks on other machines, an address that they can reach."""
    port: int = 0
    """Port of the run's store; 0: any free port."""
    driver_away_s: float = -1.0
    """How long ranks continue without a driver, so that another one can attach; 0: they end with it; -1: 600 if ranks are Ray
    actors, else 0."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    catchup: CatchupConfig = field(default_factory=CatchupConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    deal: tuple[Deal, ...] = ()
    """Of a run that was resumed: changes of the number of streams so far."""

    def to_plain(self) -> dict[str, Any]:
        """As plain containers, for `RankSpec.config`."""
        return asdict(self)

    def check_runtime(self, steps: int = 0) -> None:
        """Raise ConfigError, or MissingExtra, for a setting of the runtime that cannot work here; `steps` of the run, 0 if they
        are not known yet. Looks for packages and network interfaces, and tries the port; starts nothing, writes nothing.
        Settings that a subclass adds are not looked at."""
        from helixrt.job.rules import check

        check(self, steps)

    def check_settings(self, steps: int = 0) -> None:
        """Raise ConfigError for a setting of the runtime that works on no machine: the part of `check_runtime` for a process
        that does not run where the job will."""
        from helixrt.job.rules import check_settings

        check_settings(self, steps)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> JobConfig:
        """Inverse of `to_plain`; lists (from JSON) become tuples again."""
        plain = {key: value for key, value in raw.items() if key != "restart_window_s"}  # which runs of before had
        return JobConfig(**{**plain, **job_parts(raw)})


def job_parts(raw: dict[str, Any]) -> dict[str, Any]:
    """The components of a `JobConfig` from those of its `to_plain`, by field."""
    chaos = ChaosConfig(
        tuple(KillConfig(**kill) for kill in raw["chaos"]["kill"]),
        tuple(CommandConfig(**command) for command in raw["chaos"].get("run", ())),  # runs of before had none
        tuple(FaultConfig(**fault) for fault in raw["chaos"].get("fault", ())),
        tuple(dict(link) for link in raw["chaos"].get("link", ())),
    )
    transport = dict(raw.get("transport", {}))
    if "rails" in transport:
        transport["rails"] = tuple(transport["rails"])
    slow = tuple(SlowConfig(**{**each, "steps": tuple(each["steps"])}) for each in raw["chaos"].get("slow", ()))
    chaos = replace(chaos, slow=slow)
    return {
        "mesh": MeshConfig(**raw["mesh"]),
        "checkpoint": CheckpointConfig(**raw["checkpoint"]),
        "catchup": CatchupConfig(**raw["catchup"]),
        "transport": TransportConfig(**transport),
        "pipeline": PipelineConfig(**raw.get("pipeline", {})),
        "ray": RayConfig(**raw.get("ray", {})),
        "chaos": chaos,
        "output": OutputConfig(**raw["output"]),
        "checks": ChecksConfig(**raw.get("checks", {})),
        "deal": tuple(Deal.from_plain(deal) for deal in raw.get("deal", ())),
    }
