"""What the driver keeps of lives that are over, and what these leave in the run's store: next to nothing."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest

from helixrt.job.config import MeshConfig
from helixrt.job.genesis import GenesisDigest
from helixrt.job.leader_reports import metrics_key
from helixrt.job.lives import Lives
from helixrt.job.metrics import Notice
from helixrt.job.places import coordinates
from helixrt.protocol.store_quorum import Operation, QuorumRules, Reply, StoreQuorum
from helixrt.replica.commands import Channel, Exit, orders_channel, reports_channel
from helixrt.replica.evidence import Holders
from helixrt.replica.run_keys import (
    OfRank,
    ended_key,
    exit_key,
    formed_key,
    leave_key,
    progress_key,
    running_key,
    saves_key,
    seat_key,
    spec_key,
    tidied_key,
    working_key,
)
from helixrt.replica.store import MemoryRunStore
from helixrt.replica.store_membership import StoreMembership
from helixrt.timeouts import derive

MESH = MeshConfig(2, 1, dp_shard=2)


STAYS = ("ended/", "quorum/known/", "served/claim/")  # one for each life: others may read them


def quorum_of(life: str) -> StoreQuorum:
    replica, _, incarnation = life.partition("/")
    return StoreQuorum((int(replica), int(incarnation)), QuorumRules(1.0, 1.0), ended_key)


def counted(store: MemoryRunStore) -> int:
    return len([key for key in store._values if not key.startswith(STAYS)])


def live(store: MemoryRunStore, replica: int, incarnation: int, messages: int) -> None:
    """What the ranks of a life and those that watch them put into the store."""
    life = f"{replica}/{incarnation}"
    for channel in (orders_channel(life), reports_channel(life, 1)):
        writer = Channel(store, channel, 1.0)
        for _ in range(messages):
            writer.put(Exit())
    for rank, at in enumerate(coordinates(MESH, replica)):
        store.put_if_absent(spec_key(replica, incarnation, rank), "spec")
        store.set(progress_key(str(at), incarnation), "progress")
        store.set(working_key(str(at), incarnation), "5")
        for family in OfRank:
            store.put_if_absent(family.key(life, rank), "it")
        if rank:
            store.put_if_absent(seat_key(replica, incarnation, rank), "process")
        store.put_if_absent(exit_key(replica, incarnation, rank), "code")
    GenesisDigest(store, life, 1, 2, "digest", 1.0)
    StoreMembership(replica, incarnation, store, derive(60.0, 5.0), 0.0)._carry_out(StoreQuorum.announce(quorum_of(life)))
    store.set(f"quorum/ask/{replica}:{incarnation}", "{}")
    for key in (formed_key, leave_key, running_key, saves_key):
        store.put_if_absent(key(replica, incarnation), "yes")
    Holders(store, replica, incarnation).end_predecessors()


@pytest.mark.parametrize("messages", [0, 3, 255, 256, 257, 700])
def test_the_store_does_not_grow_with_the_number_of_lives(messages: int) -> None:
    store = MemoryRunStore()
    lives, sizes = Lives(store, MESH), []
    for incarnation in range(12):
        for replica in range(2):
            lives.begin(replica, incarnation, before=False)
            live(store, replica, incarnation, messages)
            lives.runs(replica, incarnation)
        for _ in range(100):
            lives.tidy()
        sizes.append(counted(store))
    assert len(set(sizes[2:])) == 1, sizes
    assert sorted(lives.shown) == [(replica, incarnation) for replica in range(2) for incarnation in (10, 11)]
    assert all(store.get(ended_key(replica, life)) == "yes" for replica in range(2) for life in range(11)), "that stays"


def test_lines_of_a_life_are_shown_once_and_by_a_second_driver_from_where_the_first_has_stopped() -> None:
    store, notice = MemoryRunStore(), Notice("r0", "it rains")
    lives = Lives(store, MESH, kept=True)
    lives.begin(0, 0, before=False)
    for number in range(3):
        store.put_if_absent(metrics_key(0, 0, number), notice.to_json())
        assert list(lives.news()) == [notice] and list(lives.news()) == []
    store.put_if_absent(metrics_key(0, 0, 3), notice.to_json())
    second = Lives(store, MESH, kept=True)
    second.begin(0, 0, before=True)
    assert list(second.news()) == [notice] and second.shown == {(0, 0): 4}


def test_what_a_driver_did_not_delete_the_next_one_does() -> None:
    """A run with a keeper outlives many drivers, each of which sees few lives and is lost at any moment."""
    store, chance, sizes = MemoryRunStore(), random.Random(7), list[int]()
    for incarnation in range(40):
        if incarnation % 2 == 0:
            lives = Lives(store, MESH, kept=True)
            lives.begin(0, max(0, incarnation - 1), before=incarnation > 0)
        lives.begin(0, incarnation, before=incarnation > 0)
        live(store, 0, incarnation, 3)
        lives.runs(0, incarnation)
        for _ in range(chance.choice([0, 1, 5, 30, 60])):
            lives.tidy()
        sizes.append(counted(store))
    for _ in range(400):
        lives.tidy()
    assert counted(store) <= sizes[1] + 4, sizes
    assert {int(key.rsplit("/", 1)[1]) for key in store._values if key.startswith("running/")} == {38, 39}
    assert store.get(tidied_key(0)) == "38", "the next driver begins there"


def test_a_member_whose_signs_of_life_are_deleted_does_not_come_back_to_life() -> None:
    """Another member looks at it again afterwards."""
    store, rules = MemoryRunStore(), QuorumRules(1.0, 1.0)
    old, new, other = (StoreQuorum(member, rules, ended_key) for member in ((0, 0), (0, 1), (1, 0)))

    def carry_out(operations: Generator[Operation, Reply, object]) -> None:
        StoreMembership(9, 9, store, derive(60.0, 5.0), 0.0)._carry_out(operations)

    for member in (old, new, other):
        carry_out(member.announce())
    store.put_if_absent(ended_key(0, 0), "yes")
    carry_out(other._read_known())
    carry_out(other._look([(0, 0), (0, 1)]))
    for key in StoreQuorum.traces_of((0, 0)):
        store.delete(key)
    carry_out(other._look([(0, 0), (0, 1)]))
    assert not other._lives((0, 0)) and other._lives((0, 1))
