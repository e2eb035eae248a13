"""What the driver keeps of lives that are over, and what these leave in the run's store: next to nothing."""

from __future__ import annotations

import pytest

from helixrt.job.config import MeshConfig
from helixrt.job.leader_reports import metrics_key
from helixrt.job.lives import Lives
from helixrt.job.metrics import Notice
from helixrt.job.places import coordinates
from helixrt.replica.commands import Channel, Exit, orders_channel, reports_channel
from helixrt.replica.run_keys import ended_key, progress_key, spec_key, working_key
from helixrt.replica.store import MemoryRunStore

MESH = MeshConfig(2, 1, dp_shard=2)


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
    store.put_if_absent(ended_key(replica, incarnation), "yes")


@pytest.mark.parametrize("messages", [0, 3, 255, 256, 257, 700])
def test_the_store_does_not_grow_with_the_number_of_lives(messages: int) -> None:
    store = MemoryRunStore()
    lives, sizes = Lives(store, MESH), []
    for incarnation in range(12):
        for replica in range(2):
            lives.begin(replica, incarnation, before=False)
            live(store, replica, incarnation, messages)
            lives.runs(replica, incarnation)
        for _ in range(80):
            lives.tidy()
        sizes.append(len([key for key in store._values if not key.startswith("ended/")]))
    assert len(set(sizes[2:])) == 1, sizes
    assert sorted(lives.shown) == [(replica, incarnation) for replica in range(2) for incarnation in (10, 11)]
    assert all(store.get(ended_key(replica, life)) == "yes" for replica in range(2) for life in range(12)), "that stays"


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
