"""A run with a keeper, as its driver sees it: how the keeper is started, and how a later driver attaches to the run.

In: the settings of a new run; or the folder of a run whose driver has gone. Out: `KeptServices` for the driver; for one that
attaches also the state that the controller goes on from (`Standing`), as the store has it, and what happened meanwhile
(`Absence`). A driver that attaches is no new life of the run: no rank is started again for it, and nothing is read from disk
that the store has. Restart budgets begin anew, since what was spent is not in the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helixrt.errors import Cause, ConfigError, Fatal, Retryable
from helixrt.job.draining import DRAINED_WHY
from helixrt.job.keeper import FILE, KeeperOrder, KeptRun
from helixrt.job.launch_orders import (
    ALIVE_KEY,
    DONE_KEY,
    UNATTENDED_KEY,
    KeptLauncher,
    Start,
    Unattended,
    exit_key,
    numbered,
    order_key,
    read_exit,
    read_order,
)
from helixrt.job.launchers import is_named, module_of
from helixrt.job.policies import Phase, ReplicaState, RunState
from helixrt.job.services import Services
from helixrt.job.train_function import root_of
from helixrt.job.warm_up import rank_environment
from helixrt.replica.contracts import Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.rank_log import last_error
from helixrt.replica.run_keys import done_key, leave_key, running_key
from helixrt.replica.store import TcpRunStore

if TYPE_CHECKING:
    from helixrt.job.config import JobConfig
    from helixrt.job.driver import JobProgram, Run

STARTED_S = 120.0  # a keeper imports torch, on a busy machine
ANSWER_S = 5.0  # of a keeper that lives


class KeptServices(Services):
    """Of a run with a keeper. `orders`, `exits`: see `KeptLauncher`."""

    def __init__(self, kept: KeptRun, orders: int = 0, exits: int = 0) -> None:
        self.address, self.lighthouse = kept.store, kept.lighthouse
        self.store: RunStore = TcpRunStore(kept.store)
        self._orders, self._exits = orders, exits

    def launcher(self) -> Launcher:
        return KeptLauncher(self.store, self._orders, self._exits)

    def close(self) -> None:
        with suppress(Retryable):
            self.store.put_if_absent(DONE_KEY, "yes")


def start_keeper(config: JobConfig, run: Run, program: JobProgram, secret: str, away_s: float) -> KeptServices:
    """Start the keeper of a new life of the run, on this machine or, with launcher=ray, on this node of the cluster. Raises
    ConfigError for an address that it cannot use, Fatal if it does not start."""
    order = KeeperOrder(
        config.to_plain(),
        str(run.folder),
        run.name,
        run.life,
        program.module,
        asdict(program.reserved),
        secret,
        away_s,
        program.exit_grace_s,
        root_of(module_of(config.launcher)) if is_named(config.launcher) else "",
    )
    log = run.folder / "logs" / f"keeper.{run.life}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (run.folder / FILE).unlink(missing_ok=True)
    process: subprocess.Popen[bytes] | None = None
    if config.launcher == "ray":
        from helixrt.ray_cluster.detached import start_detached

        name = f"{run.name}/keeper.{run.life}"
        start_detached(name, "helixrt.job.keeper:keep_plain", asdict(order), log, rank_environment(config.threads))
    else:
        process = _as_process(order, log)
    deadline = time.monotonic() + STARTED_S
    while (kept := kept_run(run.folder)) is None:
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            how = "ended at its start" if ended else f"did not start in {STARTED_S:g} s"
            raise Fatal(Cause(f"the keeper of the run {how}: {last_error(log)}", log=str(log)))
        time.sleep(0.05)
    return KeptServices(kept)


def _as_process(order: KeeperOrder, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "helixrt.job.keeper"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # neither Ctrl-C in a terminal nor the end of this process ends it
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; its log says why
        process.stdin.write(json.dumps(asdict(order)).encode())
        process.stdin.close()
    return process


def kept_run(folder: Path) -> KeptRun | None:
    """Of the run in this folder, if it has a keeper; whether that answers is another matter."""
    try:
        return KeptRun(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError("run", folder, f"its {FILE} is of another version: {error}") from error


def living(folder: Path) -> KeptRun | None:
    """The run in this folder, if its keeper answers."""
    kept = kept_run(folder)
    if kept is None:
        return None
    try:
        TcpRunStore(kept.store, ANSWER_S).get(ALIVE_KEY)
    except Retryable:
        return None
    return kept


# ---------------------------------------------------------------- attaching


@dataclass(frozen=True)
class Standing:
    """Where a run stands that goes on without a driver: the state of the controller, and the ranks (incarnation, coordinate)
    that were started and have not ended."""

    state: RunState
    alive: frozenset[tuple[int, str]]
    orders: int
    exits: int


@dataclass(frozen=True)
class Absence:
    """What happened while no driver was there, in seconds and steps; `still_s`: the longest time without a new record."""

    away_s: float
    first: int
    last: int
    still_s: float

    def __str__(self) -> str:
        return (
            f"{self.away_s:.1f} s without a driver; the ranks went from step {self.first} to step {self.last}, "
            f"no step is lost; longest time without progress {self.still_s:.1f} s"
        )


def standing_of(store: RunStore, replicas: int, now: float) -> Standing:
    """As the store has it; `now` by the controller's clock. Raises Retryable."""
    orders = [read_order(text) for text in numbered(store, order_key)]
    specs = [order.spec for order in orders if isinstance(order, Start)]
    exits = [read_exit(text) for text in numbered(store, exit_key)]
    newest = {r: max((s.incarnation for s in specs if s.coordinate.replica == r), default=0) for r in range(replicas)}
    states = tuple(_replica(store, replica, newest[replica], exits, now) for replica in range(replicas))
    has_run = any(
        store.get(running_key(replica, incarnation)) is not None
        for replica in range(replicas)
        for incarnation in range(newest[replica] + 1)
    )
    return Standing(RunState(states, has_run), _alive(specs, exits), len(orders), len(exits))


def _replica(store: RunStore, replica: int, newest: int, exits: Iterable[RankExit], now: float) -> ReplicaState:
    ended = [e for e in exits if (e.coordinate.replica, e.incarnation) == (replica, newest)]
    drained = store.get(leave_key(replica, newest)) == DRAINED_WHY
    names, why = frozenset(str(e.coordinate) for e in ended), ended[0].reason if ended else ""
    if store.get(done_key(replica)) is not None:
        phase = Phase.FINISHED
    elif ended:
        phase = Phase.LOST
    elif store.get(running_key(replica, newest)) is not None:
        phase = Phase.RUNNING
    else:
        phase = Phase.RESTARTING if newest else Phase.STARTING
    return ReplicaState(phase, now, why, newest, names, drained=drained, left=drained and bool(ended))


def _alive(specs: Iterable[RankSpec], exits: Iterable[RankExit]) -> frozenset[tuple[int, str]]:
    gone = {(e.incarnation, str(e.coordinate)) for e in exits}
    return frozenset((s.incarnation, str(s.coordinate)) for s in specs) - gone


def absence_of(store: RunStore, head: int, now_s: float) -> Absence:
    """Up to `now_s`, a Unix time, when the newest record is of step `head`. Raises Retryable."""
    away_s = max(0.0, now_s - float(store.get(ALIVE_KEY) or now_s))
    told = store.get(UNATTENDED_KEY)
    if told is None:  # a driver was there a moment ago
        return Absence(away_s, head, head, away_s)
    alone = Unattended.from_json(told)
    return Absence(away_s, min(alone.first, head), head, min(alone.still_s, away_s))


def check_same(kept: KeptRun, config: Mapping[str, Any]) -> None:
    """Raises ConfigError (resume) if a script that attaches to a run that goes on trains something else."""
    was, now = _trained(kept.config), _trained(config)
    for key, value in was.items():
        if value != now[key]:
            rule = f"its ranks live ({kept.where}) and train with {key}={value}; attach with the same, or end the run first"
            raise ConfigError("resume", f"{key}={now[key]}", rule)


def _trained(config: Mapping[str, Any]) -> dict[str, Any]:
    """The script may stand in another folder (a Ray job's copy), and be given other arguments of the command line."""
    train = config["train"]
    function = f"{Path(train['script']).name or train['module']}:{train['qualname']}"
    plain = {key: json.loads(json.dumps(config[key])) for key in ("mesh", "seed", "arguments")}
    return {"train": function, **plain}
