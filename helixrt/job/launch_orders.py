"""How a driver has ranks started and killed by the keeper of its run (`keeper`), through the run's store.

In: the calls of a `Launcher` in the driver. Out: numbered orders in the store, which the keeper carries out in their order, and
numbered exits, which it puts there. Each key is put once, so a driver that comes later reads what was ordered before it, and
what became of it; the run's secret is not among it. The settings of ranks, which are much longer than all else, are there once.
Now and then the driver writes down which orders and exits still count, and deletes those up to there (`forget_launches`).
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from helixrt.errors import Fatal, Retryable
from helixrt.job.controller import Terminated
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RankSpec, RunStore

LEAVING_KEY = "launch/leaving"  # put by the driver, or the keeper, after a signal: the replicas leave, none is started any more
ENDING_KEY = "launch/ending"  # put by the keeper: it carries out no more orders
CLOSED_KEY = "launch/closed"  # put by the keeper: no rank is left, and none will be started
DONE_KEY = "launch/done"  # put by the driver: it needs nothing of the run any more
ALIVE_KEY = "launch/alive"  # set by the driver again and again: the Unix time
UNATTENDED_KEY = "launch/unattended"  # set by the keeper while no driver is there: `Unattended.to_json`
CARRIED_KEY = "launch/carried"  # set by the keeper: how many orders it has carried out, or is about to
BEGIN_KEY = "launch/begin"  # set by the driver: `Launches.to_json` of those that were deleted
BEAT_S = 1.0
FORGET_AFTER = 256  # orders and exits in the store that it is looked at which of them count
PATIENCE_S = 30.0  # how long an order is tried while the store does not answer
CLOSE_S = 45.0  # how long `close` waits until no rank is left
_ENDED = (
    "the keeper of the run has ended the run's processes: it had no sign of life of this driver for driver_away_s, or failed "
    "(see logs/keeper.*.log in the run's folder); resume the run from its newest checkpoint"
)


def order_key(number: int) -> str:
    return f"launch/order/{number}"


def config_key(digest: str) -> str:
    """Put by the driver before the first order that names it: settings of ranks, as JSON."""
    return f"launch/config/{digest}"


def exit_key(number: int) -> str:
    return f"launch/exit/{number}"


def waiting_key(replica: int) -> str:
    """Set by the keeper: whether a rank of the replica has no process yet."""
    return f"launch/waiting/{replica}"


@dataclass(frozen=True)
class Unattended:
    """The time without a driver, up to now: the step at its begin, and the longest time without a new record."""

    first: int
    still_s: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Unattended:
        return Unattended(**json.loads(text))


@dataclass(frozen=True)
class Start:
    spec: RankSpec  # without the secret; as it is read, without the settings
    config: str  # names the settings: the end of their `config_key`


@dataclass(frozen=True)
class Kill:
    replica: int


@dataclass(frozen=True)
class Close:
    """End all ranks, and start none any more."""


Order = Start | Kill | Close


def order_text(order: Order) -> str:
    if isinstance(order, Start):
        return json.dumps({"start": replace(order.spec, secret="", config={}).to_plain(), "config": order.config})
    return json.dumps({"kill": order.replica} if isinstance(order, Kill) else {"close": True})


def read_order(text: str) -> Order:
    raw = json.loads(text)
    if "start" in raw:
        return Start(RankSpec.from_plain(raw["start"]), raw["config"])
    return Kill(raw["kill"]) if "kill" in raw else Close()


def exit_text(ended: RankExit) -> str:
    return json.dumps(asdict(ended))


def read_exit(text: str) -> RankExit:
    raw = json.loads(text)
    return RankExit(**{**raw, "coordinate": Coordinate(**raw["coordinate"])})


def numbered(store: RunStore, key: Callable[[int], str], number: int = 0) -> Iterator[str]:
    """What stands under the keys of `number` and of those that follow. Raises Retryable."""
    while (text := store.get(key(number))) is not None:
        yield text
        number += 1


@dataclass(frozen=True)
class Launches:
    """The first so many `orders` and `exits` of a run: those of them that count, `listed` and `ended`. `deleted`: so many of
    each are not in the store any more for certain."""

    orders: int = 0
    exits: int = 0
    listed: tuple[Order, ...] = ()
    ended: tuple[RankExit, ...] = ()
    deleted: tuple[int, int] = (0, 0)

    def to_json(self) -> str:
        texts = [list(map(order_text, self.listed)), list(map(exit_text, self.ended))]
        return json.dumps([self.orders, self.exits, *texts, self.deleted])

    @staticmethod
    def from_json(text: str) -> Launches:
        orders, exits, listed, ended, (first, second) = json.loads(text)
        return Launches(orders, exits, tuple(map(read_order, listed)), tuple(map(read_exit, ended)), (first, second))

    def that_count(self) -> Launches:
        """A rank that was started and has ended counts no more once a later incarnation of its replica is started."""
        starts = [order for order in self.listed if isinstance(order, Start)]
        newest: dict[int, int] = {}
        for each in starts:
            replica = each.spec.coordinate.replica
            newest[replica] = max(newest.get(replica, 0), each.spec.incarnation)
        gone = {(ended.coordinate, ended.incarnation) for ended in self.ended}
        listed = [
            each
            for each in starts
            if each.spec.incarnation == newest[each.spec.coordinate.replica]
            or (each.spec.coordinate, each.spec.incarnation) not in gone
        ]
        ended = [each for each in self.ended if each.incarnation == newest.get(each.coordinate.replica)]
        return replace(self, listed=tuple(listed), ended=tuple(ended))


def launches_of(store: RunStore) -> Launches:
    """All that were ordered so far, and all exits; without those that count no more, as far as they were deleted. Raises
    Retryable."""
    while True:
        text = store.get(BEGIN_KEY)
        begin = Launches() if text is None else Launches.from_json(text)
        orders = list(numbered(store, order_key, begin.orders))
        exits = list(numbered(store, exit_key, begin.exits))
        if store.get(BEGIN_KEY) == text:
            return replace(
                begin,
                orders=begin.orders + len(orders),
                exits=begin.exits + len(exits),
                listed=(*begin.listed, *map(read_order, orders)),
                ended=(*begin.ended, *map(read_exit, exits)),
            )


def forget_launches(store: RunStore, orders: int, exits: int) -> bool:
    """Of the driver, which has given so many orders and acted on so many exits: delete them, if they are many. False if the
    keeper has not carried out all orders, or has told more exits: then it must be called again. Raises Retryable; what was not
    deleted then is, the next time."""
    if int(store.get(CARRIED_KEY) or 0) != orders:
        return False
    text = store.get(BEGIN_KEY)
    begin, now = Launches() if text is None else Launches.from_json(text), launches_of(store)
    if now.exits != exits:
        return False
    if orders + exits - begin.orders - begin.exits < max(FORGET_AFTER, len(begin.listed)):
        return True
    count = now.that_count()
    store.set(BEGIN_KEY, count.to_json())
    for key, first, end in ((order_key, begin.deleted[0], now.orders), (exit_key, begin.deleted[1], now.exits)):
        for number in range(first, end):
            store.delete(key(number))
    store.set(BEGIN_KEY, replace(count, deleted=(count.orders, count.exits)).to_json())
    return True


class KeptLauncher(Launcher):
    """Of a driver: `orders` and `exits` are how many there are already, when it attaches to a run that goes on. `poll` tells
    the keeper that the driver lives, and raises Fatal, or Terminated after a signal to it, once the keeper ends the run that
    `close` has not ended. Calls come from one thread."""

    outlives_driver = True
    told_to_end = False
    _leaves = False

    def __init__(self, store: RunStore, orders: int = 0, exits: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._orders, self._exits, self._clock = store, orders, exits, clock
        self._started: set[tuple[Coordinate, int]] = set()
        self._configs: set[str] = set()  # that the store has
        self._beat_s = -BEAT_S
        self._forget_at = 0  # orders and exits, at which it is looked at which of them count
        self._closed = False

    def start(self, spec: RankSpec) -> None:
        key = (spec.coordinate, spec.incarnation)
        if key in self._started or self._closed:
            return
        self._started.add(key)
        self._order(Start(spec, self._stored(spec.config)))

    def poll(self) -> list[RankExit]:
        exits: list[RankExit] = []
        with suppress(Retryable):  # the controller notices a store that stays away
            if self._clock() - self._beat_s >= BEAT_S:
                self._store.set(ALIVE_KEY, f"{time.time():.3f}")
                self._beat_s = self._clock()
                self.told_to_end = not self._leaves and self._store.get(LEAVING_KEY) is not None
                if not self._closed and self._store.get(ENDING_KEY) is not None:
                    raise Terminated(signal.SIGTERM) if self.told_to_end else Fatal(_ENDED)
            for text in numbered(self._store, exit_key, self._exits):
                exits.append(read_exit(text))
                self._exits += 1
            if not exits and not self._closed and self._orders + self._exits >= self._forget_at:
                if forget_launches(self._store, self._orders, self._exits):
                    self._forget_at = self._orders + self._exits + FORGET_AFTER // 4
        return exits

    def waiting(self, replica: int) -> bool:
        with suppress(Retryable):
            return self._store.get(waiting_key(replica)) == "yes"
        return False

    def leaving(self) -> None:
        self._leaves = True
        self._store.put_if_absent(LEAVING_KEY, "yes")

    def kill(self, replica: int) -> None:
        if not self._closed:
            self._order(Kill(replica))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(Retryable):  # the keeper has gone, and the ranks with it
            self._order(Close())
            self._store.wait(CLOSED_KEY, CLOSE_S)

    def _stored(self, config: dict[str, Any]) -> str:
        """Have these settings in the store; returns what an order calls them. Raises Retryable as `_order`."""
        text = json.dumps(config)
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in self._configs:
            self._put(config_key(digest), text)
            self._configs.add(digest)
        return digest

    def _order(self, order: Order) -> None:
        """Raises Retryable if the store does not take it for PATIENCE_S."""
        # one driver at a time has the lock of the run's folder, so no other process puts this number
        self._put(order_key(self._orders), order_text(order))
        self._orders += 1

    def _put(self, key: str, text: str) -> None:
        deadline = self._clock() + PATIENCE_S
        while True:
            try:
                self._store.put_if_absent(key, text)
                return
            except Retryable:
                if self._clock() >= deadline:
                    raise
                time.sleep(0.2)
