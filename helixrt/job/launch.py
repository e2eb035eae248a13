"""Starting a run of a user's train function: `helixrt.run`.

In: the function and the settings. Out: the run's folder, when every replica has ended with the same state. This process drives
the run: it hosts the run's store and the membership service, starts the ranks as processes on this host, restarts lost
replicas, prints what they log, and writes the report. Each rank imports the function again by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helixrt.engines.update import Policy
from helixrt.errors import ConfigError, Fatal
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.driver import Driver, JobProgram, new_run, reopened_run
from helixrt.job.environment import SessionChoices, joined
from helixrt.job.logs import configure_logging
from helixrt.job.mesh import Mesh
from helixrt.job.resume import deals_of, run_to_resume
from helixrt.job.session import Session
from helixrt.job.session_config import SessionConfig
from helixrt.job.starters import STORE, place_of, starter
from helixrt.job.train_function import check_not_in_rank, name_of
from helixrt.protocol.step.lineage import Log
from helixrt.replica.runlog import RunLog
from helixrt.timeouts import derive

PROGRAM = "helixrt.job.session_rank"
EXIT_GRACE_S = 600.0  # for the user's code behind the loop
LAUNCHERS = ("auto", "local", "environment")


@dataclass(frozen=True)
class RunResult:
    """A run that ended as it should: all replicas with the same state, every batch counted once."""

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
    """Settings of the runtime that most runs leave alone; `base` has those without a name of their own here."""

    threads: int = 1  # compute threads per rank
    step_timeout_s: float = 60.0  # no step of a healthy rank takes longer; the other timeouts follow from it
    restarts: int = 3  # of a lost replica, within an hour
    checkpoint_every: int = 50  # steps, and the last one always; 0: no checkpoints
    loader_every: int = 100  # batches between two published states of the data loader
    buffers: str = "mean"  # running buffers of contributors: mean | first
    membership: str = "auto"  # what says who takes part: torchft | store | auto (torchft where it is installed, else store)
    base: JobConfig = field(default_factory=JobConfig)

    def job(self, name: str, seed: int, storage: str | Path, mesh: MeshConfig) -> JobConfig:
        """The settings of the job's runtime."""
        return replace(
            self.base,
            name=name,
            seed=seed,
            launcher="local",
            threads=self.threads,
            step_timeout_s=self.step_timeout_s,
            restarts=self.restarts,
            membership=self.membership,
            mesh=mesh,
            checkpoint=replace(self.base.checkpoint, every=self.checkpoint_every),
            output=replace(self.base.output, root=str(storage)),
        )


def run(
    train: Callable[[Session], Any],
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
    options: RunOptions = RunOptions(),  # noqa: B008 frozen
) -> RunResult:
    """Train on `replicas` replicas of `mesh` ranks each; returns when the run has ended well.

    `train(session)` is called on every rank. It must be at the top level of a module or script, since ranks import it by name;
    in a script the call of `run` stands under `if __name__ == "__main__":`. The run's folder is made under `storage`. `seed`:
    of the data order and of all random numbers. `device`: auto, cpu or cuda; `dtype`: float32 or bfloat16, the compute type;
    parameters, optimizer state and the exchange keep the parameters' type. `policy`: how learning rates follow the number of
    replicas that contribute.

    `resume`: the folder of an earlier run, or "latest" for the newest run of this `name` under `storage`: the script goes on
    from that run's newest checkpoint, in the same folder, with the data positions, optimizers and schedulers of that step. The
    ranks of a replica, the seed and the data must be the same; `until` may be another. With another number of replicas the
    items that were not read yet are dealt over the new streams, which needs `session.sampler`.
    `launcher`: "local" starts the ranks as processes of this host. With "environment" this process is itself one rank of the
    run that `helixrt serve` serves (`helixrt.job.starters`), and calls `train` here: the processes of one torchrun, or of one
    srun, are a replica. `storage`, `name` and options of the runtime are the server's then. "auto" is "environment" where
    HELIXRT_STORE is set or torchrun or Slurm started this process, else "local". A session does not run in Ray actors yet:
    inside a Ray job "auto" is refused.

    A lost replica is started again and catches up while the others train. Raises ConfigError or MisuseError before anything is
    started, for settings that cannot work; Fatal if the run failed (the reason is printed, with the log that shows it).
    """
    check_not_in_rank()
    configure_logging()
    mesh.check_supported()
    launcher = chosen_launcher(launcher)
    if launcher == "environment":
        if resume is not None:
            raise ConfigError("resume", resume, "a run that `helixrt serve` serves cannot be resumed yet")
        choices = SessionChoices(seed, device, dtype, policy.lr, options.buffers, options.loader_every, replicas, mesh)
        return _run_here(train, choices)
    shape = MeshConfig(replicas, mesh.pp, mesh.dp_shard, mesh.cp, mesh.tp)
    job = replace(options.job(name, seed, storage, shape), resume=resume is not None)
    config = SessionConfig(
        **{key: getattr(job, key) for key in JobConfig.__dataclass_fields__},
        train=name_of(train),
        device=device,
        dtype=dtype,
        lr_policy=policy.lr,
        buffers=options.buffers,
        loader_every=options.loader_every,
    )
    config.check()
    derive(config.step_timeout_s, config.heartbeat_s)
    if resume is None:
        begun = new_run(config)
    else:
        folder, checkpoint = run_to_resume(config, resume)
        config = replace(config, deal=deals_of(config, folder, checkpoint.record))
        begun = reopened_run(folder, checkpoint, dealt=config.deal != checkpoint.record.deal)
    driver = Driver(config, begun, JobProgram(PROGRAM, exit_grace_s=EXIT_GRACE_S))
    if driver.run() != 0:
        raise Fatal(f"the run failed; its folder is {begun.folder}")
    head = driver.seen.head
    return RunResult(begun.folder, head.step, head.hash, head.last)


def chosen_launcher(launcher: str) -> str:
    """The launcher that `auto` means here. Raises ConfigError."""
    who = starter()
    if launcher == "ray" or (launcher == "auto" and who == "Ray" and STORE not in os.environ):
        rule = "a session does not run in Ray actors yet; launcher='local' starts all replicas on this host"
        raise ConfigError("launcher", launcher, rule)
    if launcher not in LAUNCHERS:
        raise ConfigError("launcher", launcher, f"must be one of {', '.join(LAUNCHERS)}")
    if launcher != "auto":
        return launcher
    return "environment" if STORE in os.environ or who else "local"


def _run_here(train: Callable[[Session], Any], choices: SessionChoices) -> RunResult:
    """This process is one replica, or a rank of one."""
    name_of(train)
    with joined(place_of(mesh=choices.mesh), choices) as here:
        train(here.session)
        head = Log(RunLog(here.store).read_from(0)).head
    return RunResult(Path(here.spec.output), head.step, head.hash, head.last)
