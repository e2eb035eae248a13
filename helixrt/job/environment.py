"""Joins a run that `helixrt serve` serves: a rank in a process that torchrun, Slurm or a user starts.

In: where the process stands (`starters.Place`), the settings of its session. Out: a `Session` on this process's runtime, and
what became of the process in the run's store. The processes of a replica claim its next incarnation together (`claims`), and
wait until the server gives each its spec; so processes that are started again are a new incarnation, whoever starts them, and
the one before takes part no more.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from helixrt.errors import ConfigError, Departed, Retryable, causes_of, comes_again
from helixrt.job.claims import LOOK_S, Claim, check_open, claim
from helixrt.job.config import JobConfig
from helixrt.job.group_watch import AWAY_S, GroupWatch
from helixrt.job.hosts import is_loopback
from helixrt.job.mesh import Mesh
from helixrt.job.policies import FATAL_EXIT
from helixrt.job.rank import RankRuntime, exit_code
from helixrt.job.served import SETTINGS_KEY, fingerprint
from helixrt.job.served_options import check_as_served
from helixrt.job.session import Session
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_rank import check_loop_ended, is_return, opened_session, place_in, root_in
from helixrt.job.starters import REPLICA, SECRET, STORE, Place, check_before, note_again
from helixrt.replica.contracts import RankSpec, RunStore
from helixrt.replica.rank_log import RankEnd
from helixrt.replica.run_keys import SERVED_KEY, exit_key, spec_key
from helixrt.replica.store import TcpRunStore, split_address
from helixrt.replica.versions import check_versions

ADMISSION_S = 120.0  # a restart waits for half a minute at most
STORE_S = 60.0  # for the run's store to answer: this host, or the server's, may be cut off for a while
_CONNECT_S, _AGAIN_S = 5.0, 0.5  # of a try to reach the store, and between two

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionChoices:
    """Settings of `helixrt.init` and `helixrt.run` that are a session's own; those of the run are the server's. `replicas`: 0
    if the program does not say how many. `mesh`: the ranks of a replica. `runtime`: what the program's options ask for."""

    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    lr_policy: str = "none"
    buffers: str = "mean"
    loader_every: int = 100
    replicas: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    runtime: JobConfig | None = None

    def config(self, served: JobConfig) -> SessionConfig:
        """The settings of a rank: the server's, and these. Compute threads stay as they are in this process."""
        config = SessionConfig.of(
            replace(served, seed=self.seed, threads=torch.get_num_threads()),
            device=self.device,
            dtype=self.dtype,
            lr_policy=self.lr_policy,
            buffers=self.buffers,
            loader_every=self.loader_every,
        )
        config.check()
        return config


@dataclass(frozen=True)
class Joined:
    """A rank of a served run, in this process."""

    session: Session
    spec: RankSpec
    store: RunStore
    runtime: RankRuntime

    @property
    def departed(self) -> Departed | None:
        """With what the replica left at a step boundary, if it did. The interpreter forgets it: it is a SystemExit."""
        return self.runtime.departed or self.session.departed


@contextmanager
def joined(place: Place, choices: SessionChoices) -> Iterator[Joined]:
    """A session of this process's rank. On the way out the server is told how the rank ended.

    Raises ConfigError for a place or settings that do not fit the run, Retryable without the store or when another rank of the
    replica is lost, Fatal where torchrun tries again what would come again, MisuseError at the end of a loop that was left
    early; what is raised inside gets a note that says in which step.
    """
    os.environ.setdefault("RUST_LOG", "error")  # torchft tells every connection otherwise
    check_before()
    _wait_for(place.store, STORE_S)
    store = TcpRunStore(place.store)
    _check_run(store, place, choices)
    claimed = Claim(store, place)
    session: Session | None = None
    runtime: RankRuntime | None = None
    code, end, where = FATAL_EXIT, RankEnd(""), f"r{place.replica}"
    left: SystemExit | None = None
    try:
        incarnation = claim(claimed, place, ADMISSION_S)
        where = f"r{place.replica} (incarnation {incarnation})"
        spec = admitted(store, place, incarnation)
        config = choices.config(JobConfig.from_plain(spec.config))
        agree_on_settings(store, choices)
        life = (place.replica, incarnation)
        with RankRuntime(spec, config) as runtime, _watch(store, life, place, runtime):
            with opened_session(runtime, config, place.local_rank) as session:
                try:
                    yield Joined(session, spec, store, runtime)
                except SystemExit as asked:
                    if not is_return(asked):
                        raise
                    left = asked
                check_loop_ended(session)
        code = 0
    except BaseException as raised:
        error = root_in(raised, place.ranks)
        code, end = exit_code(error), RankEnd.of(error)
        if comes_again(error):
            note_again(end.why)
        error.add_note(f"in {where if session is None else place_in(spec, session)}")
        if error not in causes_of(raised):
            raise error from raised
        raise
    finally:
        if claimed.incarnation is not None:
            with suppress(Retryable):  # the server is gone, too
                told = json.dumps({"code": code, "why": end.why, "error": end.error})
                store.put_if_absent(exit_key(place.replica, claimed.incarnation, place.rank), told)
                if session is not None and session.departed is not None and runtime is not None:
                    _leave_together(store, place, claimed.incarnation, runtime.leave_s)
    if left is not None:
        raise left


def _watch(store: RunStore, life: tuple[int, int], place: Place, runtime: RankRuntime) -> GroupWatch:
    step_s = runtime.context.timeouts.step_s  # of the batch that a rank may be in when its replica leaves
    leave_s = lambda: step_s + runtime.leave_s  # noqa: E731
    away_s = max(AWAY_S, 2.0 * step_s)
    return GroupWatch(store, life, place.rank, place.ranks, runtime.fail, away_s=away_s, leave_s=leave_s)


def _leave_together(
    store: RunStore, place: Place, incarnation: int, limit_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until all ranks of a replica that leaves have said that they are done, but no longer than `limit_s`: torchrun and
    `srun --kill-on-bad-exit` end the others with the first, and they may still save their parts of the state. Raises Retryable
    without the store."""
    others = {rank for rank in range(place.ranks) if rank != place.rank}
    deadline = time.monotonic() + limit_s
    while others and time.monotonic() < deadline:
        others = {rank for rank in others if store.get(exit_key(place.replica, incarnation, rank)) is None}
        if others:
            sleep(LOOK_S)


def _wait_for(address: str, limit_s: float) -> None:
    """Until the run's store answers. Raises ConfigError for what is no address, Retryable if it does not within `limit_s`."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ConfigError(STORE, address, "must be host:port, as `helixrt serve` prints it") from error
    deadline, said = time.monotonic() + limit_s, False
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            why = f"the run's store at {address} cannot be reached: {error}"
            if is_loopback(host):
                why += "; that address is this host itself: a server on another one is started with --host ADDRESS"
            if time.monotonic() >= deadline:
                raise Retryable(f"{why}; given up after {limit_s:g} s") from error
            if not said:
                said = True
                log.warning("%s; trying for %g s", why, limit_s)
        time.sleep(_AGAIN_S)


def _check_run(store: RunStore, place: Place, choices: SessionChoices, limit_s: float = STORE_S) -> None:
    known = json.loads(_served(store, place, limit_s))
    if fingerprint(known["run"], place.secret) != known["secret"]:
        raise ConfigError(SECRET, "...", f"is not the secret of the run at {place.store}")
    check_versions(known.get("versions", {}), f"the server at {place.store}")
    if place.replica >= known["replicas"]:
        raise ConfigError(REPLICA, place.replica, f"the run has replicas 0 to {known['replicas'] - 1}")
    if choices.replicas not in (0, known["replicas"]):
        raise ConfigError("replicas", choices.replicas, f"`helixrt serve` serves a run of {known['replicas']}")
    served_mesh = Mesh(**known["mesh"])
    if choices.mesh != served_mesh:
        sizes = " ".join(f"--{axis.replace('_', '-')} {size}" for axis, size in asdict(choices.mesh).items() if size > 1)
        how = f"start it with {sizes}" if sizes else "start it without --pp, --dp-shard, --cp and --tp"
        raise ConfigError("mesh", choices.mesh, f"`helixrt serve` serves replicas of {served_mesh}; {how}")
    if choices.runtime is not None and "config" in known:
        check_as_served(choices.runtime, known["config"])


def _served(store: RunStore, place: Place, limit_s: float, sleep: Callable[[float], None] = time.sleep) -> str:
    """What the server says of its run. A server that was started together with this process answers connections a while before.
    Raises ConfigError if nothing is said within `limit_s`, Retryable without the store."""
    deadline, said = time.monotonic() + limit_s, False
    while (served := store.get(SERVED_KEY)) is None:
        if time.monotonic() >= deadline:
            raise ConfigError(STORE, place.store, "is not the store of a run that `helixrt serve` serves")
        if not said:
            said = True
            log.warning("the store at %s serves no run yet; trying for %g s", place.store, limit_s)
        sleep(_AGAIN_S)
    return served


def admitted(store: RunStore, place: Place, incarnation: int) -> RankSpec:
    """What the server tells this rank of a formed incarnation, as soon as it may begin."""
    deadline = time.monotonic() + ADMISSION_S
    while (text := store.get(spec_key(place.replica, incarnation, place.rank))) is None:
        check_open(store, place)
        if time.monotonic() > deadline:
            what = f"`helixrt serve` did not let replica {place.replica} begin within {ADMISSION_S:g} s"
            raise Retryable(f"{what}; its output says whether the replica was given up")
        time.sleep(LOOK_S)
    spec = replace(RankSpec.from_plain(json.loads(text)), secret=place.secret)
    if not Path(spec.output).is_dir():
        rule = "the run's folder is not on this machine; give `helixrt serve` a --storage that all machines share"
        raise ConfigError("storage", spec.output, rule)
    return spec


def agree_on_settings(store: RunStore, choices: SessionChoices) -> None:
    """Raises ConfigError for a setting of this session that is another one on the replica that began first."""
    mine = {"seed": choices.seed, "dtype": choices.dtype, "policy": choices.lr_policy, "buffers": choices.buffers}
    first = json.loads(store.put_if_absent(SETTINGS_KEY, json.dumps(mine)))
    for name, value in mine.items():
        if first[name] != value:
            raise ConfigError(name, value, f"the replica that began first has {first[name]}; must be equal on all replicas")
