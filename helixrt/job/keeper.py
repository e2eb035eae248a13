"""The keeper of a run: the process that has the ranks and the process of the run's services, and outlives the driver.

In: a `KeeperOrder`; later the driver's orders in the run's store (`launch_orders`). Out: `keeper.json` in the run's folder,
where a driver finds the run; exits of ranks in the store. It decides nothing: which replica is started again is the driver's
matter, so while there is no driver the ranks that live train on, and a lost replica stays away.

Store and membership service are a process of their own (`served_apart`). When that is lost the keeper starts it again, the
store has its values from its journal, and the ranks train on. When the keeper itself is lost its ranks end with it; another
takes over (`keeper_start`), tells their ends, and goes on with the orders.

After SIGTERM, SIGINT or SIGHUP, to its driver or to itself, the replicas leave; it starts none any more, and ends when all have
left or `signal_grace_s` is over, also if the driver has gone meanwhile. A second signal to it ends the run at once.

It ends when the driver has ended the run, and when no driver has been there for `away_s`: then it ends the ranks, whose newest
checkpoint stands, and the run may be resumed. As `python -m helixrt.job.keeper` it reads its order as JSON from standard input;
on a Ray cluster it is a thread of a detached actor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from helixrt.errors import ConfigError, Fatal, Retryable, StartAgain
from helixrt.job.config import JobConfig
from helixrt.job.controller import Terminated, handlers
from helixrt.job.launch_orders import (
    ALIVE_KEY,
    BEAT_S,
    CARRIED_KEY,
    CLOSED_KEY,
    DONE_KEY,
    ENDING_KEY,
    LEAVING_KEY,
    UNATTENDED_KEY,
    Close,
    Kill,
    Start,
    Unattended,
    config_key,
    exit_key,
    exit_text,
    launches_of,
    numbered,
    order_key,
    read_order,
    waiting_key,
)
from helixrt.job.lineage_files import write_durably
from helixrt.job.ray_run import Reserved
from helixrt.job.run_lock import RunLock
from helixrt.job.served_apart import Addresses, ServedApart
from helixrt.job.store_process import FOLDER as STORE_FOLDER
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RunStore
from helixrt.replica.run_keys import leave_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.store_client import DurableRunStore
from helixrt.replica.store_file import FILE as JOURNAL
from helixrt.replica.telling import flush_all, tell

FILE = "keeper.json"  # in the run's folder while the run has a keeper
LOCK_FILE = "keeper.lock"  # there: locked by the keeper as long as it lives
SECRET_FILE = "keeper.secret"  # there, for its user alone: the run's secret, which a driver needs that attaches
LOOK_S = 0.05
_MOST_ROUND_S = 5.0  # a round that takes longer was suspended
_GONE_S = 3 * BEAT_S  # of a driver that gives no sign, once the replicas have left
STORE_S = 1.0  # how long the keeper tries a store that is away, before it looks at its process again
BEGIN_S = 60.0  # for a store to begin
LINGER_S = 60.0  # how long a driver that has ended the ranks may take for its report
T = TypeVar("T")


@dataclass(frozen=True)
class KeeperOrder:
    """`config`: the run's settings as plain data; `module`: what a rank runs; `reserved`: see `ray_run`; `away_s`: how long the
    ranks train on without a driver; `path`: if not "", the folder in which the driver found its launcher's module; `number`:
    how many keepers this life of the run had before; `before`: the `Addresses` of a keeper that was lost, which this one
    takes over from."""

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
    number: int = 0
    before: dict[str, str] | None = None

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> KeeperOrder:
        return KeeperOrder(**raw)


@dataclass(frozen=True)
class KeptRun:
    """What `keeper.json` says: where the run's store and membership service are (`served_apart.Addresses`), and what a driver
    needs to know of the run."""

    store: str
    durable: str
    lighthouse: str
    where: str  # the keeper's process
    run: str
    life: int
    config: dict[str, Any]
    module: str
    reserved: dict[str, float]
    away_s: float
    exit_grace_s: float
    path: str
    number: int


class Progress:
    """Of the ranks since the driver's newest sign of life, by this process's clock."""

    def __init__(self, now: float) -> None:
        self.alive_s = now  # when the driver last said so
        self._round_s = now  # when it was last looked
        self._step = self._first = 0
        self._mark_s, self._longest_s = now, 0.0

    def driver_lives(self, now: float) -> None:
        self.alive_s = self._mark_s = now
        self._first, self._longest_s = self._step, 0.0

    def record(self, step: int, now: float) -> None:
        """A new record of this step stands."""
        self._step, self._longest_s, self._mark_s = step, max(self._longest_s, now - self._mark_s), now

    def begin_round(self, now: float) -> None:
        """Look whether a driver is there. A long time since the last look means that this process was suspended, and possibly
        the driver too, so that time does not count as an absence of the driver."""
        if now - self._round_s > _MOST_ROUND_S:
            self.alive_s += now - self._round_s - _MOST_ROUND_S
        self._round_s = now

    def lost_round(self, now: float) -> None:
        """The store did not answer in this round: neither is this time anybody's absence."""
        self.alive_s += now - self._round_s
        self._round_s = now

    @property
    def alone_s(self) -> float:
        """For how long no driver has been there, up to the begin of this round."""
        return self._round_s - self.alive_s

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
        self._lock = _locked(self._folder, order)
        before = None if order.before is None else Addresses(**order.before)
        if before is None:
            (self._folder / STORE_FOLDER / JOURNAL).unlink(missing_ok=True)  # of an earlier life
        log = self._folder / "logs" / f"store.{order.life}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        own = (order.module, Reserved(**order.reserved), order.run, order.life, order.secret, log)
        self._services = ServedApart(self._config, self._folder, *own, before)
        self._store: RunStore = DurableRunStore(self._services.durable, order.secret, STORE_S)
        self._log = RunLog(self._store)
        self._orders = self._exits = 0
        self._untold: list[RankExit] = []  # exits that the store does not have yet
        self._configs: dict[str, dict[str, Any]] = {}  # settings of ranks, by what orders call them
        self._replicas: dict[int, bool] = {}  # that were started -> whether it was told that they wait
        self._alive, self._entries, self._told_s = "", 0, clock()
        self._progress = Progress(clock())
        self._living: set[tuple[Coordinate, int]] = set()  # ranks that were started and have not ended
        self._signal = 0  # that has told this process to end
        self._leaving_s: float | None = None  # since when the replicas leave
        if before is not None:
            self._take_over()

    def _take_over(self) -> None:
        """From a keeper that was lost, and its ranks with it. Raises Retryable, Fatal."""
        carried = int(self._surely(lambda: self._store.get(CARRIED_KEY)) or 0)
        launches = self._surely(lambda: launches_of(self._store))
        orders = launches.listed[: len(launches.listed) - max(0, launches.orders - carried)]
        ended = {(ended.coordinate, ended.incarnation) for ended in launches.ended}
        for order in orders:
            if isinstance(order, Start) and (who := (order.spec.coordinate, order.spec.incarnation)) not in ended:
                self._untold.append(RankExit(*who, -signal.SIGKILL, "the keeper of the run was lost, and its ranks with it"))
                ended.add(who)
        self._orders, self._exits = min(carried, launches.orders), launches.exits
        if any(isinstance(order, Close) for order in orders):
            self._orders -= 1  # the last: to be carried out again
        self._surely(self._tell_exits)

    def _surely(self, ask: Callable[[], T]) -> T:
        """What the store says, which may just be starting. Raises Retryable after a while, Fatal if it cannot start."""
        deadline = self._clock() + BEGIN_S
        while True:
            self._services.look()
            try:
                return ask()
            except Retryable:
                if self._clock() >= deadline:
                    raise

    def publish(self) -> None:
        """Write where the run is; from now on a driver may come."""
        order, where = self._order, f"process {os.getpid()} on {socket.gethostname()}"
        secret = self._folder / SECRET_FILE
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(order.secret)
        kept = KeptRun(
            self._services.address,
            self._services.durable,
            self._services.lighthouse,
            where,
            order.run,
            order.life,
            order.config,
            order.module,
            order.reserved,
            order.away_s,
            order.exit_grace_s,
            order.path,
            order.number,
        )
        write_durably(self._folder / FILE, json.dumps(asdict(kept), indent=1))

    def run(self) -> None:
        """Until the run has ended, or nobody drives it any more. Raises Fatal if the store is lost for good."""
        launcher = self._services.launcher()
        try:
            while self._round(launcher):
                time.sleep(LOOK_S)
        finally:
            with suppress(Retryable):
                if self._signal:
                    self._store.put_if_absent(LEAVING_KEY, "yes")
                self._store.put_if_absent(ENDING_KEY, "yes")
            launcher.close()
            self._untold.clear()
            try:
                self._linger()
            finally:
                mine = [self._folder / FILE, self._folder / SECRET_FILE] if self._has_folder() else []
                for file in mine:
                    file.unlink(missing_ok=True)
                self._services.close()
                if mine:
                    (self._folder / STORE_FOLDER / JOURNAL).unlink(missing_ok=True)
                self._lock.close()

    def _has_folder(self) -> bool:
        """Whether the run's files here are of this keeper. Where the file system has no locks, the run may have been resumed
        already."""
        try:
            kept = json.loads((self._folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return (kept.get("life"), kept.get("number")) == (self._order.life, self._order.number)

    def _round(self, launcher: Launcher) -> bool:
        """See what was ordered and what happened; False at the end. A store that is away is started again, and has everything
        then; the time without it is nobody's absence."""
        begun = self._clock()
        self._progress.begin_round(begun)
        self._services.look()
        ended = launcher.poll()
        self._untold += ended
        self._living -= {(each.coordinate, each.incarnation) for each in ended}
        try:
            self._look_for_leaving()
            if not self._obey(launcher) or self._store.get(DONE_KEY) is not None or self._is_alone(self._order.away_s):
                return False
            self._tell_exits()
            self._tell_waiting(launcher)
            self._tell_progress()
        except Retryable:
            self._progress.lost_round(self._clock())
        return True

    def signalled(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals that end this process. Raises Terminated for the second one."""
        if self._signal:
            raise Terminated(number)
        self._signal = number

    def _look_for_leaving(self) -> None:
        if self._signal:
            why = f"{signal.Signals(self._signal).name} to the keeper of the run"
            for coordinate, incarnation in self._living:
                self._store.put_if_absent(leave_key(coordinate.replica, incarnation), why)
            self._store.put_if_absent(LEAVING_KEY, "yes")
        if self._leaving_s is None and self._store.get(LEAVING_KEY) is not None:
            self._leaving_s = self._clock()

    def _linger(self) -> None:
        """A driver that has ended the ranks reads on, for its report."""
        until = self._clock() + LINGER_S
        closed = False
        while self._clock() < until:
            self._progress.begin_round(self._clock())
            try:
                self._services.look()
                if not closed:
                    self._store.put_if_absent(CLOSED_KEY, "yes")
                    closed = True
                if self._store.get(DONE_KEY) is not None or self._is_alone(LINGER_S):
                    return
                until = self._clock() + LINGER_S  # of a store that answers, and a driver that is there
            except Retryable:
                self._progress.lost_round(self._clock())
            except Fatal:
                return
            time.sleep(LOOK_S)

    def _obey(self, launcher: Launcher) -> bool:
        """Carry out what was ordered since the last time; False once all is to end."""
        for text in numbered(self._store, order_key, self._orders):
            order = read_order(text)
            config = self._config_of(order) if isinstance(order, Start) else {}
            # Before it is done: one that takes over says of a rank that was perhaps not started that it has ended.
            self._store.set(CARRIED_KEY, str(self._orders + 1))
            self._orders += 1
            if isinstance(order, Close):
                return False
            if isinstance(order, Kill):
                launcher.kill(order.replica)
            elif isinstance(order, Start) and self._leaving_s is None:
                self._living.add((order.spec.coordinate, order.spec.incarnation))
                self._replicas.setdefault(order.spec.coordinate.replica, False)
                launcher.start(replace(order.spec, secret=self._order.secret, config=config))
        return True

    def _config_of(self, order: Start) -> dict[str, Any]:
        if order.config not in self._configs:
            text = self._store.get(config_key(order.config))
            if text is None:
                raise Fatal(f"the run's store has an order to start {order.spec.coordinate}, and not the settings of the rank")
            self._configs[order.config] = json.loads(text)
        return self._configs[order.config]

    def _tell_exits(self) -> None:
        while self._untold:
            self._store.put_if_absent(exit_key(self._exits), exit_text(self._untold[0]))
            del self._untold[0]
            self._exits += 1

    def _tell_waiting(self, launcher: Launcher) -> None:
        for replica, told in self._replicas.items():
            if (waits := launcher.waiting(replica)) != told:
                self._store.set(waiting_key(replica), "yes" if waits else "no")
                self._replicas[replica] = waits

    def _tell_progress(self) -> None:
        now = self._clock()
        try:
            entries = self._log.read_from(self._entries)
        except StartAgain:  # the log was compacted
            self._entries = self._log.begin
            return
        for entry in entries:
            self._entries += 1
            self._progress.record(entry.step, now)
        if now - self._progress.alive_s > 2 * BEAT_S and now - self._told_s > BEAT_S:
            self._store.set(UNATTENDED_KEY, self._progress.unattended(now).to_json())
            self._told_s = now

    def _is_alone(self, limit_s: float) -> bool:
        """Whether no driver has been there for so long, by this process's clock; for less once all replicas have left, or the
        time for that is over."""
        if self._leaving_s is not None:
            over = not self._living or self._clock() - self._leaving_s >= self._config.signal_grace_s
            limit_s = min(limit_s, _GONE_S) if over else limit_s
        alive = self._store.get(ALIVE_KEY) or ""
        if alive != self._alive:
            self._alive = alive
            self._progress.driver_lives(self._clock())
            self._store.delete(UNATTENDED_KEY)
        alone = self._progress.alone_s >= limit_s
        if alone:
            tell(f"no driver has been there for {limit_s:g} s: the run's processes end", sys.stdout)
        return alone


def _locked(folder: Path, order: KeeperOrder) -> RunLock:
    """Raises ConfigError if another keeper lives."""
    for last in [False] * 50 + [True]:
        try:
            return RunLock(folder, order.run, order.life, LOCK_FILE)
        except ConfigError:  # or a driver looks whether one does
            if last:
                raise
            time.sleep(0.1)
    raise AssertionError


def keep(order: KeeperOrder) -> None:
    """The whole life of a keeper."""
    keeper = Keeper(order)
    keeper.publish()
    with handlers(keeper.signalled, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        keeper.run()


def keep_plain(raw: dict[str, Any]) -> None:
    """As `keep`, for a Ray actor."""
    keep(KeeperOrder.from_plain(raw))


if __name__ == "__main__":
    code = 0
    try:
        keep(KeeperOrder.from_plain(json.loads(sys.stdin.read())))
    except Terminated as ended:
        code = int(str(ended.code))
    flush_all()
    os._exit(code)  # threads of torch and of servers must not keep it
