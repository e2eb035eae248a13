"""Joins a run that `helixrt serve` serves: the launcher of processes that torchrun, Slurm or a user starts.

In: variables of the environment. Out: a `Session` on this process's runtime, and what became of the process in the run's store.
Each process is one replica. It claims the next incarnation of its replica, and waits until the server gives it the spec; so a
process that is started again is a new incarnation, whoever starts it, and the one before takes part no more.

    HELIXRT_STORE         host:port of the run's store, as `helixrt serve` prints it
    HELIXRT_REPLICA       which replica this process is, from 0
    HELIXRT_SECRET        the run's secret, or
    HELIXRT_SECRET_FILE   the file that holds it
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from helixrt.errors import ConfigError, Fatal, MisuseError, Retryable, StartAgain
from helixrt.job.config import JobConfig
from helixrt.job.launchers import STORE, starter
from helixrt.job.policies import FATAL_EXIT, MISUSE_EXIT, RELOAD_EXIT
from helixrt.job.rank import RETRY_CODE, RankRuntime
from helixrt.job.served import fingerprint
from helixrt.job.session import Session
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_rank import check_loop_ended, opened_session, place_in
from helixrt.replica.contracts import RankSpec, RunStore
from helixrt.replica.run_keys import CLOSED_KEY, SERVED_KEY, claim_key, exit_key, spec_key
from helixrt.replica.store import TcpRunStore

REPLICA, SECRET, SECRET_FILE = "HELIXRT_REPLICA", "HELIXRT_SECRET", "HELIXRT_SECRET_FILE"
SETTINGS_KEY = "served/settings"  # of the sessions, which all replicas must have alike
ADMISSION_S = 120.0  # a restart waits for half a minute at most
_LOOK_S = 0.05
_WORLDS = {"torchrun": "WORLD_SIZE"}  # who says how many processes one invocation has


@dataclass(frozen=True)
class Place:
    """What a process is told about the run that it joins."""

    store: str
    replica: int
    secret: str


@dataclass(frozen=True)
class SessionChoices:
    """Settings of `helixrt.init` and `helixrt.run` that are a session's own; those of the run are the server's. `replicas`: 0
    if the program does not say how many."""

    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    lr_policy: str = "none"
    buffers: str = "mean"
    loader_every: int = 100
    replicas: int = 0

    def config(self, served: JobConfig) -> SessionConfig:
        """The settings of a rank: the server's, and these. Compute threads stay as they are in this process."""
        config = SessionConfig.of(
            served,
            seed=self.seed,
            threads=torch.get_num_threads(),
            device=self.device,
            dtype=self.dtype,
            lr_policy=self.lr_policy,
            buffers=self.buffers,
            loader_every=self.loader_every,
        )
        config.check()
        return config


def place_of(environ: Mapping[str, str] = os.environ) -> Place:
    """Raises ConfigError, with the variable that is missing or wrong."""
    who = starter(environ)
    if (variable := _WORLDS.get(who)) and environ.get(variable, "1") != "1":
        rule = f"a replica has one process so far: start {who} once for each replica, with one process"
        raise ConfigError(variable, environ[variable], rule)
    if not environ.get(STORE):
        rule = "is not set; start `helixrt serve --replicas N`, and set the variables that it prints"
        raise ConfigError(STORE, "", rule)
    replica = environ.get(REPLICA, "")
    if not replica.isdigit():
        hint = " (in a Slurm array: HELIXRT_REPLICA=$SLURM_ARRAY_TASK_ID; for the tasks of one srun: $SLURM_PROCID)"
        rule = f"must be the number of the replica that this process is, from 0{hint if who == 'Slurm' else ''}"
        raise ConfigError(REPLICA, replica, rule)
    return Place(environ[STORE], int(replica), _secret(environ))


def _secret(environ: Mapping[str, str]) -> str:
    if secret := environ.get(SECRET):
        return secret
    file = environ.get(SECRET_FILE)
    if not file:
        raise ConfigError(SECRET, "", f"is not set; set it, or {SECRET_FILE} to the file that `helixrt serve` names")
    try:
        secret = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(SECRET_FILE, file, f"cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigError(SECRET_FILE, file, "is empty")
    return secret


@dataclass(frozen=True)
class Joined:
    """A replica of a served run, in this process."""

    session: Session
    spec: RankSpec
    store: RunStore


@contextmanager
def joined(place: Place, choices: SessionChoices) -> Iterator[Joined]:
    """A session of this process's replica. On the way out the server is told how the replica ended.

    Raises ConfigError for a place or settings that do not fit the run, Retryable without the store, MisuseError at the end of
    a loop that was left early; what is raised inside gets a note that says in which step.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells every connection otherwise
    store = TcpRunStore(place.store)
    _check_run(store, place, choices)
    incarnation = _claim(store, place)
    session: Session | None = None
    code, why = FATAL_EXIT, ""
    where = f"r{place.replica} (incarnation {incarnation})"
    try:
        spec = _admitted(store, place, incarnation)
        config = choices.config(JobConfig.from_plain(spec.config))
        _agree_on_settings(store, choices)
        with RankRuntime(spec, config) as runtime, opened_session(runtime, config) as session:
            yield Joined(session, spec, store)
            check_loop_ended(session)
        code = 0
    except BaseException as error:
        code = _code_of(error)
        why = traceback.format_exception_only(error)[-1].strip()
        error.add_note(f"in {where if session is None else place_in(spec, session)}")
        raise
    finally:
        with suppress(Retryable):  # the server is gone, too
            told = json.dumps({"code": code, "why": why})
            store.put_if_absent(exit_key(place.replica, incarnation), told)


def _code_of(error: BaseException) -> int:
    """The exit code that the server counts by; a setting that is wrong here is wrong at every start."""
    if isinstance(error, MisuseError | ConfigError):
        return MISUSE_EXIT
    if isinstance(error, StartAgain):
        return RELOAD_EXIT
    return RETRY_CODE if isinstance(error, Retryable) else FATAL_EXIT


def _check_run(store: RunStore, place: Place, choices: SessionChoices) -> None:
    served = store.get(SERVED_KEY)
    if served is None:
        raise ConfigError(STORE, place.store, "is not the store of a run that `helixrt serve` serves")
    known = json.loads(served)
    if fingerprint(known["run"], place.secret) != known["secret"]:
        raise ConfigError(SECRET, "...", f"is not the secret of the run at {place.store}")
    if place.replica >= known["replicas"]:
        raise ConfigError(REPLICA, place.replica, f"the run has replicas 0 to {known['replicas'] - 1}")
    if choices.replicas not in (0, known["replicas"]):
        raise ConfigError("replicas", choices.replicas, f"`helixrt serve` serves a run of {known['replicas']}")


def _claim(store: RunStore, place: Place) -> int:
    """Become the next incarnation of the replica; its number."""
    _check_open(store, place)
    me = f"{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"
    incarnation = 0
    while store.put_if_absent(claim_key(place.replica, incarnation), me) != me:
        incarnation += 1
    return incarnation


def _check_open(store: RunStore, place: Place) -> None:
    if store.get(CLOSED_KEY) is not None:
        raise Fatal(f"the run at {place.store} is over")


def _admitted(store: RunStore, place: Place, incarnation: int) -> RankSpec:
    """What the server tells a claimed incarnation, as soon as it may begin."""
    deadline = time.monotonic() + ADMISSION_S
    while (text := store.get(spec_key(place.replica, incarnation))) is None:
        _check_open(store, place)
        if time.monotonic() > deadline:
            what = f"`helixrt serve` did not let replica {place.replica} begin within {ADMISSION_S:g} s"
            raise Retryable(f"{what}; its output says whether the replica was given up")
        time.sleep(_LOOK_S)
    spec = replace(RankSpec.from_plain(json.loads(text)), secret=place.secret)
    if not Path(spec.output).is_dir():
        rule = "the run's folder is not on this machine; give `helixrt serve` a --storage that all machines share"
        raise ConfigError("storage", spec.output, rule)
    return spec


def _agree_on_settings(store: RunStore, choices: SessionChoices) -> None:
    mine = {"seed": choices.seed, "dtype": choices.dtype, "policy": choices.lr_policy, "buffers": choices.buffers}
    first = json.loads(store.put_if_absent(SETTINGS_KEY, json.dumps(mine)))
    for name, value in mine.items():
        if first[name] != value:
            raise ConfigError(name, value, f"the replica that began first has {first[name]}; must be equal on all replicas")
