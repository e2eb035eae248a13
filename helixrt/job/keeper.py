"""The keeper of a run: the process that has the run's store, the membership service and the ranks, and outlives the driver.

In: a `KeeperOrder`; later the driver's orders in the run's store (`launch_orders`). Out: `keeper.json` in the run's folder,
where a driver finds the run; exits of ranks in the store. It decides nothing: which replica is started again is the driver's
matter, so while there is no driver the ranks that live train on, and a lost replica stays away.

It ends when the driver has ended the run, and when no driver has been there for `away_s`: then it ends the ranks, whose newest
checkpoint stands, and the run may be resumed. As `python -m helixrt.job.keeper` it reads its order as JSON from standard input;
on a Ray cluster it is a thread of a detached actor.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from helixrt.errors import Retryable
from helixrt.job.config import JobConfig
from helixrt.job.launch_orders import (
    ALIVE_KEY,
    BEAT_S,
    CLOSED_KEY,
    DONE_KEY,
    UNATTENDED_KEY,
    Close,
    Kill,
    Start,
    Unattended,
    exit_key,
    exit_text,
    numbered,
    order_key,
    read_order,
    waiting_key,
)
from helixrt.job.lineage_files import write_durably
from helixrt.job.ray_run import Reserved
from helixrt.job.services import ServedHere
from helixrt.replica.contracts import Launcher, RankExit, RunStore
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import TcpRunStore

FILE = "keeper.json"  # in the run's folder while the run has a keeper
LOOK_S = 0.05
LINGER_S = 60.0  # how long a driver that has ended the ranks may take for its report


@dataclass(frozen=True)
class KeeperOrder:
    """`config`: the run's settings as plain data; `module`: what a rank runs; `reserved`: see `ray_run`; `away_s`: how long the
    ranks train on without a driver; `path`: if not "", the folder in which the driver found its launcher's module."""

    config: dict[str, Any]
    folder: str
    run: str
    life: int
    module: str
    reserved: dict[str, float]
    secret: str
    away_s: float
    exit_grace_s: float
    path: str = ""

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> KeeperOrder:
        return KeeperOrder(**raw)


@dataclass(frozen=True)
class KeptRun:
    """What `keeper.json` says: where the run's store and membership service are, and what a driver needs to know of the run."""

    store: str
    lighthouse: str
    where: str  # the keeper's process
    run: str
    life: int
    config: dict[str, Any]
    module: str
    reserved: dict[str, float]
    away_s: float
    exit_grace_s: float


class Progress:
    """Of the ranks since the driver's newest sign of life, by this process's clock."""

    def __init__(self, now: float) -> None:
        self.alive_s = now  # when the driver last said so
        self._step = self._first = 0
        self._mark_s, self._longest_s = now, 0.0

    def driver_lives(self, now: float) -> None:
        self.alive_s = self._mark_s = now
        self._first, self._longest_s = self._step, 0.0

    def record(self, step: int, now: float) -> None:
        """A new record of this step stands."""
        self._step, self._longest_s, self._mark_s = step, max(self._longest_s, now - self._mark_s), now

    def unattended(self, now: float) -> Unattended:
        return Unattended(self._first, round(max(self._longest_s, now - self._mark_s), 3))


class Keeper:
    """Serves the run from its construction on; `run` does the rest. Ranks end with the thread of `run`."""

    def __init__(self, order: KeeperOrder, clock: Callable[[], float] = time.monotonic) -> None:
        self._order, self._clock = order, clock
        self._config = JobConfig.from_plain({k: order.config[k] for k in JobConfig.__dataclass_fields__})
        self._folder = Path(order.folder)
        if order.path and order.path not in sys.path:
            sys.path.insert(0, order.path)
        self._services = ServedHere(self._config, self._folder, order.module, Reserved(**order.reserved))
        self._store: RunStore = TcpRunStore(self._services.address)
        self._log = RunLog(self._store)
        self._orders = self._exits = 0
        self._replicas: dict[int, bool] = {}  # that were started -> whether it was told that they wait
        self._alive, self._entries, self._told_s = "", 0, clock()
        self._progress = Progress(clock())

    def publish(self) -> None:
        """Write where the run is; from now on a driver may come."""
        order, where = self._order, f"process {os.getpid()} on {socket.gethostname()}"
        here = (self._services.address, self._services.lighthouse, where, order.run, order.life)
        kept = KeptRun(*here, order.config, order.module, order.reserved, order.away_s, order.exit_grace_s)
        write_durably(self._folder / FILE, json.dumps(asdict(kept), indent=1))

    def run(self) -> None:
        """Until the run has ended, or nobody drives it any more."""
        launcher = self._services.launcher()
        try:
            while self._obey(launcher) and self._store.get(DONE_KEY) is None and not self._is_alone(self._order.away_s):
                for ended in launcher.poll():
                    self._tell_exit(ended)
                self._tell_waiting(launcher)
                self._tell_progress()
                time.sleep(LOOK_S)
        finally:
            launcher.close()
            self._store.put_if_absent(CLOSED_KEY, "yes")
            while self._store.get(DONE_KEY) is None and not self._is_alone(LINGER_S):
                time.sleep(LOOK_S)
            (self._folder / FILE).unlink(missing_ok=True)
            self._services.close()

    def _obey(self, launcher: Launcher) -> bool:
        """Carry out what was ordered since the last time; False once all is to end."""
        for text in numbered(self._store, order_key, self._orders):
            self._orders += 1
            order = read_order(text)
            if isinstance(order, Close):
                return False
            if isinstance(order, Kill):
                launcher.kill(order.replica)
            elif isinstance(order, Start):
                self._replicas.setdefault(order.spec.coordinate.replica, False)
                launcher.start(replace(order.spec, secret=self._order.secret))
        return True

    def _tell_exit(self, ended: RankExit) -> None:
        self._store.put_if_absent(exit_key(self._exits), exit_text(ended))
        self._exits += 1

    def _tell_waiting(self, launcher: Launcher) -> None:
        for replica, told in self._replicas.items():
            if (waits := launcher.waiting(replica)) != told:
                self._store.set(waiting_key(replica), "yes" if waits else "no")
                self._replicas[replica] = waits

    def _tell_progress(self) -> None:
        now = self._clock()
        for entry in self._log.read_from(self._entries):
            self._entries += 1
            self._progress.record(entry.step, now)
        if now - self._progress.alive_s > 2 * BEAT_S and now - self._told_s > BEAT_S:
            self._store.set(UNATTENDED_KEY, self._progress.unattended(now).to_json())
            self._told_s = now

    def _is_alone(self, limit_s: float) -> bool:
        """Whether no driver has been there for so long, by this process's clock."""
        alive = self._store.get(ALIVE_KEY) or ""
        if alive != self._alive:
            self._alive = alive
            self._store.delete(UNATTENDED_KEY)
            self._progress.driver_lives(self._clock())
        alone = self._clock() - self._progress.alive_s >= limit_s
        if alone:
            print(f"no driver has been there for {limit_s:g} s: the run's processes end", flush=True)
        return alone


def keep(order: KeeperOrder) -> None:
    """The whole life of a keeper."""
    keeper = Keeper(order)
    keeper.publish()
    with suppress(Retryable):  # its own store is gone: so is the run
        keeper.run()


def keep_plain(raw: dict[str, Any]) -> None:
    """As `keep`, for a Ray actor."""
    keep(KeeperOrder.from_plain(raw))


if __name__ == "__main__":
    keep(KeeperOrder.from_plain(json.loads(sys.stdin.read())))
    sys.stdout.flush()
    os._exit(0)  # threads of torch and of servers must not keep it
