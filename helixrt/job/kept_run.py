"""A run with a keeper, as its driver sees it, and how a later driver attaches to the run.

In: the keeper's addresses; or the folder of a run whose driver has gone. Out: `KeptServices` for the driver; for one that
attaches also the state that the controller goes on from (`Standing`), as the store has it, and what happened meanwhile
(`Absence`). A driver that attaches is no new life of the run: no rank is started again for it, and nothing is read from disk
that the store has. Restart budgets begin anew, since what was spent is not in the store.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError, Retryable
from helixrt.job.draining import DRAINED_WHY
from helixrt.job.keeper import LOCK_FILE, KeptRun
from helixrt.job.keeper_start import KeeperWatch, is_lost, keeper_lives, kept_run, secret_of
from helixrt.job.launch_orders import (
    ALIVE_KEY,
    CLOSE_S,
    DONE_KEY,
    ENDING_KEY,
    LEAVING_KEY,
    UNATTENDED_KEY,
    Close,
    KeptLauncher,
    Start,
    Unattended,
    launches_of,
)
from helixrt.job.policies import Phase, ReplicaState, RunState
from helixrt.job.run_lock import FILE as RUN_LOCK
from helixrt.job.run_lock import is_locked, lock_on
from helixrt.job.services import Services
from helixrt.replica.contracts import Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.run_keys import done_key, leave_key, running_key
from helixrt.replica.store_client import run_store

ANSWER_S = 20.0  # of a keeper that lives, on a busy machine


class KeptServices(Services):
    """Of a run with a keeper, whose secret the driver knows. `orders`, `exits`: see `KeptLauncher`. A keeper that is lost is
    started again."""

    def __init__(self, kept: KeptRun, secret: str, folder: Path, orders: int = 0, exits: int = 0) -> None:
        self.address, self.durable, self.lighthouse = kept.store, kept.durable, kept.lighthouse
        self.store: RunStore = run_store(kept.store, kept.durable, secret)
        self._folder, self._watch = folder, KeeperWatch(folder)
        self._orders, self._exits = orders, exits

    def launcher(self) -> Launcher:
        return KeptLauncher(self.store, self._orders, self._exits)

    def leave(self) -> None:
        self._watch.close()

    def close(self) -> None:
        self.leave()
        with suppress(Retryable):
            self.store.put_if_absent(DONE_KEY, "yes")

    def end_store(self) -> None:
        _await_end(self._folder)


def living(folder: Path) -> KeptRun | None:
    """The run in this folder, if its keeper answers, or was lost and can be started again (`keeper_start.start_again`). The end
    of one that is ending without a driver is waited for. Raises ConfigError (run) for a keeper that has not ended and cannot be
    reached from here."""
    kept = kept_run(folder)
    if kept is None or is_lost(folder, kept):
        return kept
    store = run_store(kept.store, kept.durable, secret_of(folder), ANSWER_S)
    try:
        ordered = launches_of(store).listed
        leaving = store.get(LEAVING_KEY) is not None  # the keeper ends when its replicas have saved their state
        if not (leaving or store.get(ENDING_KEY) is not None or any(isinstance(order, Close) for order in ordered)):
            return kept
        if not is_locked(folder / RUN_LOCK):  # else its driver writes the report
            if not leaving:
                store.put_if_absent(DONE_KEY, "yes")
            _await_end(folder)
    except Retryable as lost:
        if lock_on(folder / LOCK_FILE):
            rule = f"its keeper ({kept.where}) has not ended, and does not answer from here: {lost}"
            raise ConfigError("run", folder, f"{rule}; attach to it where it answers, or end it first") from lost
    return None


def way_on(folder: Path) -> tuple[bool, str]:
    """Whether the run in this folder, whose store has not answered its driver any more, may go on without it; what to do."""
    kept = kept_run(folder)
    if kept is not None and (keeper_lives(folder) or is_lost(folder, kept)):
        return True, f"the ranks may go on without this driver; `helixrt attach {folder}` attaches another one"
    return False, "its keeper has ended; helixrt.run(resume=...) goes on from its newest checkpoint"


def _await_end(folder: Path) -> None:
    until_s = time.monotonic() + CLOSE_S
    while kept_run(folder) is not None and time.monotonic() < until_s:
        time.sleep(0.1)


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
    """What happened while no driver was there, in seconds and steps; `still_s`: the longest time without a new record.

    `noticed`: the keeper has noticed it. Else it was too short, and `first` and `still_s` are not known.
    """

    away_s: float
    first: int
    last: int
    still_s: float
    noticed: bool = True

    def told(self, ranks_live: bool) -> str:
        """For the console. `ranks_live`: some are there that hold the run's state."""
        outcome = "no step is lost" if ranks_live else "and have ended, so steps after the newest checkpoint may be done again"
        if not self.noticed:
            return f"{self.away_s:.1f} s without a driver; the ranks are at step {self.last}, {outcome}"
        return (
            f"{self.away_s:.1f} s without a driver; the ranks went from step {self.first} to step {self.last}, "
            f"{outcome}; longest time without progress {self.still_s:.1f} s"
        )


def standing_of(store: RunStore, replicas: int, now: float) -> Standing:
    """As the store has it; `now` by the controller's clock. Raises Retryable."""
    launches = launches_of(store)
    specs, exits = [order.spec for order in launches.listed if isinstance(order, Start)], launches.ended
    newest = {r: max((s.incarnation for s in specs if s.coordinate.replica == r), default=0) for r in range(replicas)}
    states = tuple(_replica(store, replica, newest[replica], exits, now) for replica in range(replicas))
    has_run = any(
        store.get(running_key(replica, incarnation)) is not None
        for replica in range(replicas)
        for incarnation in range(newest[replica] + 1)
    )
    return Standing(RunState(states, has_run), _alive(specs, exits), launches.orders, launches.exits)


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
        return Absence(away_s, head, head, away_s, noticed=False)
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
