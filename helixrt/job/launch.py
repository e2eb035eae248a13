"""Starting a run of a user's train function: `helixrt.run`.

In: the function and the settings. Out: the run's folder, when every replica has ended with the same state. This process drives
the run: it hosts the run's store and the membership service, starts the ranks as processes on this host or as Ray actors,
restarts lost replicas, prints what they log, and writes the report. Each rank imports the function again by its name.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, Fatal
from helixrt.job.attaching import attached_driver, away_s, started_driver
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.description import Description
from helixrt.job.driver import JobProgram, new_run, reopened_run
from helixrt.job.environment import SessionChoices, joined
from helixrt.job.kept_run import check_same, living
from helixrt.job.launchers import chosen_launcher
from helixrt.job.loggers import MetricsLogger
from helixrt.job.logs import configure_logging
from helixrt.job.mesh import Mesh
from helixrt.job.ray_run import in_cluster
from helixrt.job.resume import deals_of, folder_to_resume, run_to_resume
from helixrt.job.session_config import SessionConfig
from helixrt.job.setting_types import check_types
from helixrt.job.starters import place_of
from helixrt.job.train_function import check_not_in_rank, name_of
from helixrt.job.warm_up import PROGRAM, warm_up
from helixrt.job.way_back import way_back
from helixrt.replica.runlog import RunLog

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """A run that ended as it should: all replicas that have finished with the same state, every batch counted once. Those that
    were given up or drained have not finished."""

    folder: Path
    """What the run left: metrics.jsonl, report.html, report.json, logs, lineage, checkpoints."""
    step: int
    """Number of its last update."""
    lineage: str
    """Hash of its last commit record, which names the whole history."""
    stopped: str = ""
    """Why it ended before `until`: the reason that `session.stop` was given."""


@dataclass(frozen=True)
class RunOptions:
    """Settings of the runtime that most runs leave alone; `base` has those without a name of their own here (transport, rails,
    catch-up, chaos, the address of the servers: `helixrt.job.config.JobConfig`)."""

    threads: int = 1
    """Compute threads per rank."""
    step_timeout_s: float = 60.0
    """No step of a healthy rank takes longer; the other timeouts follow from it."""
    restarts: int = 3
    """How often a lost replica is started again before it contributes to a commit."""
    fatal_restarts: int = 2
    """How many of these may follow an exception of its code."""
    checkpoint_every: int = 50
    """Steps between two checkpoints; the last step always has one. 0: no checkpoints."""
    checkpoint_path: str = ""
    """Where checkpoints are: s3://BUCKET/FOLDER or another address of fsspec, or a folder; empty: in the run's folder."""
    loader_every: int = 100
    """Batches between two published states of the data loader."""
    buffers: str = "mean"
    """How running statistics (of batch normalization) of contributors are united: `mean` | `first`."""
    membership: str = "auto"
    """What decides which replicas take part: `torchft` | `store` | `auto` (torchft where it is installed)."""
    start: str = "auto"
    """How local ranks start: `warm` (forks of a process that has done the imports) | `cold` | `auto` (warm on Linux)."""
    exit_grace_s: float = 600.0
    """Time for the code behind the loop: a rank that has not ended so long after the run is killed."""
    base: JobConfig = field(default_factory=JobConfig)
    """The other settings of the runtime."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a setting of `base` that would be overwritten by an option of its own here."""
        runtime = ("threads", "step_timeout_s", "restarts", "fatal_restarts", "membership", "start")
        for name in (*runtime, "checkpoint.every", "checkpoint.path"):
            ours = getattr(self, name.replace(".", "_"))
            given, usual = (attrgetter(name)(each) for each in (self.base, JobConfig()))
            if given not in (usual, ours):
                option = name.replace(".", "_")
                raise ConfigError(f"base.{name}", given, f"would be overwritten: give {option}={given!r} in RunOptions instead")

    @staticmethod
    def of(
        settings: JobConfig, *, loader_every: int = loader_every, buffers: str = buffers, exit_grace_s: float = exit_grace_s
    ) -> RunOptions:
        """The options that `settings` describes, for a program that keeps all settings of the runtime in one configuration. The
        keyword arguments are the options that a `JobConfig` does not have."""
        return RunOptions(
            threads=settings.threads,
            step_timeout_s=settings.step_timeout_s,
            restarts=settings.restarts,
            fatal_restarts=settings.fatal_restarts,
            checkpoint_every=settings.checkpoint.every,
            checkpoint_path=settings.checkpoint.path,
            loader_every=loader_every,
            buffers=buffers,
            membership=settings.membership,
            start=settings.start,
            exit_grace_s=exit_grace_s,
            base=settings,
        )

    def job(self, name: str, seed: int, storage: str | Path, mesh: MeshConfig, launcher: str = "local") -> JobConfig:
        """The settings of the job's runtime. Raises ConfigError for one of `base` that these arguments would overwrite."""
        passed = {"name": name, "seed": seed, "launcher": launcher, "output.root": str(storage)}
        for key, value in passed.items():
            given, usual = (attrgetter(key)(each) for each in (self.base, JobConfig()))
            if given not in (usual, value):
                argument = "storage" if key == "output.root" else key
                rule = f"would be overwritten by the argument {argument}={value!r}: give {argument}={given!r} instead"
                raise ConfigError(f"base.{key}", given, rule)
        return replace(
            self.base,
            name=name,
            seed=seed,
            launcher=launcher,
            threads=self.threads,
            step_timeout_s=self.step_timeout_s,
            restarts=self.restarts,
            fatal_restarts=self.fatal_restarts,
            membership=self.membership,
            start=self.start,
            mesh=mesh,
            checkpoint=replace(self.base.checkpoint, every=self.checkpoint_every, path=self.checkpoint_path),
            output=replace(self.base.output, root=str(storage)),
        )


def run(
    train: Callable[..., Any],
    *,
    replicas: int = 1,
    mesh: Mesh = Mesh(),  # noqa: B008 frozen
    storage: str | Path = "outputs",
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    policy: Policy = Policy(),  # noqa: B008 frozen
    launcher: str = "auto",
    name: str = "run",
    resume: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    description: Description = Description(),  # noqa: B008 frozen
    loggers: Sequence[MetricsLogger] = (),
    options: RunOptions = RunOptions(),  # noqa: B008 frozen
) -> RunResult:
    """Train on `replicas` replicas of `mesh` ranks each; returns when the run has succeeded.

    `train(session, **arguments)` is called on every rank; `arguments` are JSON values. It must be at the top level of a module
    or script, since ranks import it by name; in a script, call `run` under `if __name__ == "__main__":`. The run's
    folder is made under `storage`. `seed`: of the data order and of all random numbers. `device`: auto, cpu or cuda; `dtype`:
    float32 or bfloat16, the compute type; parameters, optimizer state and the exchange keep the parameters' type. `policy`: how
    learning rates follow the number of replicas that contribute. `description`: what console and report say of the program.
    `loggers`: where figures go besides console, `metrics.jsonl` and TensorBoard (`helixrt.MetricsLogger`), in this process.

    `resume`: the folder of an earlier run, or "latest" for the newest run of this `name` under `storage`: the script continues
    from that run's newest checkpoint, in the same folder, with the data positions, optimizers and schedulers of that step. The
    seed and the data must be the same; `until` and `mesh` may be others: checkpoints have the names of the whole model (for
    `Stages` see its `names`). With another number of replicas, or of dp_shard ranks, the items that were not read yet are dealt
    over the new streams, which needs `session.sampler`.
    `launcher`: "local" starts the ranks as processes of this host. "ray" starts them as actors of the Ray cluster that this
    process belongs to or that RAY_ADDRESS names. The program's folder travels to the nodes (in a Ray job its working
    directory), and `storage` must be a folder that all nodes share, which is checked at the start. Each rank reserves a CPU
    per thread, and a GPU with device="cuda", or "auto" where the cluster has GPUs (`ray` in `options.base`); a replica stays on
    one node that has room for it, and replicas are spread. The run waits for replicas that the cluster has no resources for.
    With "environment" this process is itself one rank of the run that `helixrt serve` serves (`helixrt.job.starters`), and
    calls `train` here: the processes of one torchrun, or of one srun, are a replica. `storage` and `name` are the server's, and
    an option of the runtime that the server does not have alike is refused. "auto" is "environment" where HELIXRT_STORE is
    set or torchrun or Slurm started this process, "ray" inside a Ray job or with RAY_ADDRESS, else "local"; without a
    server it is refused where the environment says that this process is one of several. "MODULE:NAME" names a function of
    yours that gets a `helixrt.job.launchers.RankProgram` and gives a `helixrt.replica.contracts.Launcher`, for ranks that are
    started in another way; the driver calls it, or the keeper if the run has one.

    A lost replica is started again and catches up while the others train. Raises ConfigError or MisuseError before anything is
    started, for settings that cannot work; Fatal if the run failed (the reason is printed, with the log that shows it).
    """
    check_types(run, locals())
    check_not_in_rank()
    configure_logging()
    mesh.check_supported()
    launcher = chosen_launcher(launcher)
    if launcher == "environment":
        if loggers:
            rule = "are used by the process that serves the run; `helixrt serve` has those that are built in"
            raise ConfigError("loggers", [type(each).__name__ for each in loggers], rule)
        if description != Description():
            log.warning("description= is not used here: console and report are those of the process that serves the run")
        if options.exit_grace_s != RunOptions.exit_grace_s:
            log.warning("exit_grace_s= is not used here: the process that serves the run waits %g s", RunOptions.exit_grace_s)
        if resume is not None:
            rule = "is the server's here: start it with `helixrt serve --resume RUN_FOLDER`, and leave it out in the program"
            raise ConfigError("resume", resume, rule)
        asked = options.job(name, seed, storage, MeshConfig(replicas), launcher)
        choices = SessionChoices(seed, device, dtype, policy.lr, options.buffers, options.loader_every, replicas, mesh, asked)
        return _run_here(train, checked(train, arguments), choices)
    if replicas < 1:
        raise ConfigError("replicas", replicas, "must be at least 1")
    if options.base.resume and resume is None:
        raise ConfigError("base.resume", True, "would be overwritten: give resume='latest' or a run's folder instead")
    shape = MeshConfig(replicas, mesh.pp, mesh.dp_shard, mesh.cp, mesh.tp)
    job = replace(options.job(name, seed, storage, shape, launcher), resume=resume is not None)
    config = SessionConfig.of(
        job,
        train=name_of(train),
        arguments=checked(train, arguments),
        device=device,
        dtype=dtype,
        lr_policy=policy.lr,
        buffers=options.buffers,
        loader_every=options.loader_every,
    )
    config.check()
    config.check_runtime()
    if away_s(config) == 0:
        warm_up(config)  # else the keeper does
    with in_cluster(config) as (config, reserved):
        program = JobProgram(PROGRAM, description, options.exit_grace_s, reserved, tuple(loggers))
        kept = _living(config, resume)
        if kept is not None:
            driver = attached_driver(kept, program)
        elif resume is None:
            driver = started_driver(config, new_run(config), program)
        else:
            folder, checkpoint = run_to_resume(config, resume)
            config = replace(config, deal=deals_of(config.mesh, folder, checkpoint.record))
            dealt = config.deal != checkpoint.record.deal
            begun = reopened_run(folder, checkpoint, config.mesh.replicas, dealt=dealt)
            driver = started_driver(config, begun, program)
        while driver.run() != 0:
            if (back := way_back(driver)) is None:
                raise Fatal(f"{driver.failure}; the run's folder is {driver.run_.folder}")
            driver = started_driver(replace(config, resume=True, deal=back.deal), back.run, program)
            driver.output.say(back.text)
    head = driver.reached
    return RunResult(driver.run_.folder, head.step, head.hash, head.last)


def _living(config: SessionConfig, resume: str | Path | None) -> Path | None:
    """The folder of the run that is to be resumed, if its ranks live. Raises ConfigError if they train something else."""
    folder = None if resume is None else folder_to_resume(config, resume)
    kept = None if folder is None else living(folder)
    if kept is None:
        return None
    check_same(kept, config.to_plain())
    return folder


def checked(train: Callable[..., Any], arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments as ranks get them. Raises ConfigError (arguments) for what is no JSON, or what `train` does not take."""
    given = dict(arguments or {})
    try:
        plain: dict[str, Any] = json.loads(json.dumps(given))
    except (TypeError, ValueError) as error:
        raise ConfigError("arguments", given, f"must be JSON values, which travel to the ranks: {error}") from error
    if callable(train):
        try:
            taken = inspect.signature(train)
            if not taken.parameters:
                raise ConfigError("train", train, "takes no argument; the first one is the session")
            taken.bind(None, **plain)
        except TypeError as error:
            rule = f"do not fit train(session, ...): {error}"
            raise ConfigError("arguments", sorted(plain), rule) from error
        except ValueError:
            pass  # a callable without a signature
    return plain


def _run_here(train: Callable[..., Any], arguments: Mapping[str, Any], choices: SessionChoices) -> RunResult:
    """This process is one replica, or a rank of one."""
    name_of(train)
    with joined(place_of(mesh=choices.mesh), choices) as here:
        train(here.session, **arguments)
        head = RunLog(here.store).read().head
    return RunResult(Path(here.spec.output), head.step, head.hash, head.last)
