"""Orders to a run's keeper, and exits that it tells, do not fill the run's store, and a driver that attaches reads the same."""

from __future__ import annotations

import random

import pytest

from helixrt.errors import Fatal, Retryable
from helixrt.job import launch_orders
from helixrt.job.kept_run import standing_of
from helixrt.job.launch_orders import (
    CARRIED_KEY,
    CLOSED_KEY,
    ENDING_KEY,
    KeptLauncher,
    Start,
    exit_key,
    exit_text,
    launches_of,
    read_order,
)
from helixrt.replica.contracts import Coordinate, RankExit, RankSpec, RunStore
from helixrt.replica.store import MemoryRunStore

REPLICAS, STAGES = 3, 2


class Lost(BaseException):
    """The driver is lost here."""


class Forgets(MemoryRunStore):
    """The store of a run, beside one in which nothing is ever deleted. A driver is lost, or the store is away, now and then."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance, self.all, self.lost = chance, MemoryRunStore(), 0

    def put_if_absent(self, key: str, value: str) -> str:
        return self.all.put_if_absent(key, super().put_if_absent(key, value))

    def set(self, key: str, value: str) -> None:
        self._may_fail()
        super().set(key, value)
        if key != launch_orders.BEGIN_KEY:
            self.all.set(key, value)

    def delete(self, key: str) -> None:
        self._may_fail()
        super().delete(key)

    def _may_fail(self) -> None:
        if self.chance.random() < 0.002:
            self.lost += 1
            raise self.chance.choice([Lost, Retryable])("away")


class Keeper:
    """Carries out orders a while after they were given."""

    def __init__(self, store: RunStore, chance: random.Random) -> None:
        self.store, self.chance = store, chance
        self.orders = self.exits = 0
        self.alive: list[tuple[Coordinate, int]] = []

    def look(self) -> None:
        found = launches_of(self.store)
        for order in found.listed[len(found.listed) - (found.orders - self.orders) :]:
            if self.chance.random() < 0.2:
                return
            self.orders += 1
            while True:
                try:
                    self.store.set(CARRIED_KEY, str(self.orders))
                    break
                except (Lost, Retryable):
                    pass
            if isinstance(order, Start):
                self.alive.append((order.spec.coordinate, order.spec.incarnation))
        for _ in range(min(len(self.alive), self.chance.choice([0, 0, 1, 3]))):  # ends out of their order
            coordinate, incarnation = self.alive.pop(self.chance.randrange(len(self.alive)))
            self.store.put_if_absent(exit_key(self.exits), exit_text(RankExit(coordinate, incarnation, -9, "gone")))
            self.exits += 1


def spec(replica: int, incarnation: int, pp: int) -> RankSpec:
    return RankSpec("run-1", Coordinate(replica, pp), incarnation, "h:1", "", "/runs/1", "secret", 0.0, {})


def lived(seed: int, rounds: int) -> tuple[Forgets, int]:
    """Many incarnations and many drivers, of a run whose replica 0 is never started again."""
    chance = random.Random(seed)
    store = Forgets(chance)
    keeper, incarnations = Keeper(store, chance), [0] * REPLICAS
    driver, most, acted = KeptLauncher(store), 0, list[RankExit]()

    def start(replica: int) -> None:
        for pp in range(STAGES):
            driver.start(spec(replica, incarnations[replica], pp))

    for replica in range(REPLICAS):
        start(replica)
    for _ in range(rounds):
        try:
            keeper.look()
            acted = driver.poll()
            for ended in acted:
                replica = ended.coordinate.replica
                if replica and ended.incarnation == incarnations[replica]:
                    incarnations[replica] += 1
                    start(replica)
            if chance.random() < 0.02:
                raise Lost
        except Lost:  # another driver attaches
            mine, whole = standing_of(store, REPLICAS, 0.0), standing_of(store.all, REPLICAS, 0.0)
            assert mine == whole, f"seed {seed}"
            driver = KeptLauncher(store, mine.orders, mine.exits)
            incarnations = [replica.incarnation for replica in mine.state.replicas]
            for replica in range(1, REPLICAS):
                ended = mine.state.replicas[replica].ended
                if ended:
                    incarnations[replica] += 1
                    start(replica)
        most = max(most, len(store._values))
    assert standing_of(store, REPLICAS, 0.0) == standing_of(store.all, REPLICAS, 0.0), f"seed {seed}"
    return store, most


@pytest.mark.system
def test_a_driver_that_attaches_reads_the_same_whatever_was_deleted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_orders, "FORGET_AFTER", 12)
    lost = deleted = 0
    for number in range(seed, seed + 200):
        store, most = lived(number, 80)
        lost += store.lost
        deleted += len(store.all._values) - len(store._values)
    assert lost > 30 and deleted > 200, (lost, deleted)


@pytest.mark.system
def test_orders_and_exits_in_the_store_stay_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_orders, "FORGET_AFTER", 40)
    store, most = lived(3, 2_500)
    assert len(store.all._values) > 2_000 and most < 150, (len(store.all._values), most)


def test_a_keeper_that_takes_over_knows_which_ranks_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an order that was deleted, too."""
    monkeypatch.setattr(launch_orders, "FORGET_AFTER", 4)
    store = MemoryRunStore()
    driver = KeptLauncher(store)
    for incarnation in range(4):
        driver.start(spec(1, incarnation, 0))
        if incarnation:
            ended = RankExit(Coordinate(1), incarnation - 1, -9, "gone")
            store.put_if_absent(exit_key(incarnation - 1), exit_text(ended))
    driver.start(spec(0, 0, 0))
    store.set(CARRIED_KEY, "5")
    driver.poll()
    assert driver.poll() == [] and store.get("launch/order/0") is None and store.get("launch/exit/0") is None
    driver.start(spec(2, 0, 0))
    found = launches_of(store)
    starts = [order.spec.coordinate.replica for order in found.listed if isinstance(order, Start)]
    assert starts == [1, 0, 2] and (found.orders, found.exits, found.ended) == (6, 3, ())
    assert read_order(str(store.get("launch/order/5"))) == found.listed[-1]


def test_a_driver_whose_keeper_ends_the_run_ends_too() -> None:
    """It carries out no more orders, and waits as long as the driver says that it lives. Not so where the driver has closed."""
    store = MemoryRunStore()
    driver, closed = KeptLauncher(store), KeptLauncher(store)
    assert driver.poll() == []
    store.put_if_absent(ENDING_KEY, "yes")
    store.put_if_absent(CLOSED_KEY, "yes")
    closed.close()
    assert closed.poll() == []
    later = KeptLauncher(store, clock=lambda: 1e9)
    with pytest.raises(Fatal, match="has ended the run's processes"):
        later.poll()
