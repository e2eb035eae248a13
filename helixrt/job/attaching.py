"""The driver of a run: with a keeper or without, and attached to a run whose driver has gone.

In: the settings of a life of a run, or the folder of one whose ranks live. Out: the `Driver`, to be run.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import replace
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig
from helixrt.job.driver import Driver, JobProgram, Run
from helixrt.job.keeper_start import is_lost, secret_of, start_again, start_keeper
from helixrt.job.kept_run import KeptServices, living, standing_of
from helixrt.job.lineage_files import read_log
from helixrt.job.ray_run import Reserved
from helixrt.job.run_lock import RunLock
from helixrt.job.session_config import SessionConfig
from helixrt.protocol.step.lineage import Log
from helixrt.replica.contracts import RunStore
from helixrt.replica.runlog import RunLog
from helixrt.replica.store_client import run_store

AWAY_S = 600.0  # by default, where ranks are Ray actors


def away_s(config: JobConfig) -> float:
    """How long the ranks of a run train on without a driver; 0: the run has no keeper, and they end with their driver."""
    if config.driver_away_s >= 0:
        return config.driver_away_s
    return AWAY_S if config.launcher == "ray" else 0.0


def started_driver(config: SessionConfig, run: Run, program: JobProgram) -> Driver:
    """Of a new life of a run. Raises ConfigError for an address that its services cannot use, Fatal without a keeper."""
    try:
        if (patience_s := away_s(config)) == 0:
            return Driver(config, run, program)
        secret = secrets.token_hex(32)
        services = KeptServices(start_keeper(config, run, program, secret, patience_s), secret, run.folder)
        try:
            return Driver(config, run, program, secret, services)
        except BaseException:
            services.launcher().close()
            services.close()
            raise
    except BaseException:
        if run.lock is not None:
            run.lock.close()
        raise


def attached_driver(folder: Path, program: JobProgram | None = None) -> Driver:
    """Of the run in this folder, whose ranks live and whose driver has gone. `program`: how console and report describe it,
    and which loggers it has. Raises ConfigError (run) for another run, also for one that has a driver."""
    kept = living(folder)
    if kept is None:
        rule = "no ranks of this run live that could go on (it has ended, or had no keeper: driver_away_s)"
        raise ConfigError("run", folder, f"{rule}; helixrt.run(resume=...) goes on from its newest checkpoint")
    lock = RunLock(folder, kept.run, kept.life)
    if is_lost(folder, kept):
        kept = start_again(folder, kept)
    secret = secret_of(folder)
    store = run_store(kept.store, kept.durable, secret)
    config = SessionConfig.from_plain(kept.config)
    identity = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    standing = standing_of(store, config.mesh.replicas, time.monotonic())
    log = _log_of(folder, store)
    services = KeptServices(kept, secret, folder, standing.orders, standing.exits)
    run = Run(folder, kept.run, identity["epoch_s"], log, kept.life, lock=lock)
    own = JobProgram(kept.module) if program is None else program
    own = replace(own, module=kept.module, exit_grace_s=kept.exit_grace_s, reserved=Reserved(**kept.reserved))
    return Driver(config, run, own, secret, services, standing)


def _log_of(folder: Path, store: RunStore) -> Log:
    """As the disk has it, which knows more of what was deleted; the store has the newest entries."""
    log, stored = read_log(folder / "lineage"), RunLog(store).read()
    if len(log) < stored.behind.begin:
        return stored
    for entry in stored.entries[len(log) - stored.behind.begin :]:
        log.append(entry)
    return log
