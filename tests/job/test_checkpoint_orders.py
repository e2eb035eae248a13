"""Checkpoints out of turn are ordered when they are owed, and the last state is safe before a replica is done, whoever dies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helixrt.job.checkpoint import newest_complete
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.checkpoint_orders import CheckpointOrders, last_pause_s, unsaved_key
from helixrt.job.checkpoint_writer import Checkpointer, kept_key
from helixrt.job.finish import ObservedMembership
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.job.stored_path import Place, StoredPath
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import Member
from helixrt.record import FlightRecord
from helixrt.replica.commands import Save, decode, encode
from helixrt.replica.contracts import Formed, Membership, State
from helixrt.replica.store import MemoryRunStore
from tests.job.object_store import ObjectStore

PART = RankPart.of(State({"weight": torch.arange(6.0)}), {})


def record_of(step: int, contributors: tuple[int, ...] = (0, 1)) -> CommitRecord:
    pairs = tuple((replica, 0) for replica in contributors)
    return CommitRecord(step, step, "parent", pairs, {0: step, 1: step, 2: step}, "run")


class Disk:
    """The run's folder: `fail` puts a file in its place."""

    folder: Place

    def __init__(self, root: Path) -> None:
        self.folder = root / "checkpoints"

    def fail(self) -> None:
        assert isinstance(self.folder, Path)
        if self.folder.is_dir():
            self.folder.rename(self.folder.with_name("away"))
        self.folder.write_text("in its place")

    def mend(self) -> None:
        assert isinstance(self.folder, Path)
        if self.folder.is_file():
            self.folder.unlink()
        away = self.folder.with_name("away")
        if away.is_dir():
            away.rename(self.folder)


class Storage(Disk):
    """A storage that does not answer between `fail` and `mend`."""

    def __init__(self, root: Path) -> None:
        self.folder = StoredPath(f"objects://{root}/bucket")

    def fail(self) -> None:
        ObjectStore.broken = "Not a directory"

    def mend(self) -> None:
        ObjectStore.broken = ""


REPLICAS: list[Replica] = []  # of the present test


@pytest.fixture(autouse=True)
def _savers_are_closed() -> Iterator[None]:
    yield
    while REPLICAS:
        REPLICAS.pop().saver.close()


class Replica:
    """A replica of one stage: its checkpointer and its leader's orders, which are carried out when the test says so."""

    def __init__(self, number: int, disk: Disk, store: MemoryRunStore, last_step: int, every: int = 5) -> None:
        self.number, self.alive, self.now, self.told = number, True, 0.0, list[Save]()
        self.said: list[str] = []
        record = FlightRecord(f"r{number}")
        self.saver = Checkpointer(disk.folder, 0, {"pp": 1}, store, record, every, 3, last_step, life=f"{number}/0")
        REPLICAS.append(self)
        self.saver.trouble = StorageTrouble("checkpoint", record, self.said.append, lambda: self.now)
        self.orders = CheckpointOrders(
            number, disk.folder, every, 60.0, last_step, store, self.saver, None, self.told.append, lambda: self.now
        )

    def apply(self, record: CommitRecord, waits: bool = True) -> None:
        """What a rank does with an update and the order behind it."""
        save = self.orders.out_of_turn(record)
        self.saver.maybe_save(record, lambda: PART, record.replicas[0] == self.number, lambda: None)
        if save is not None:
            self.told.append(save)
            self.saver.save(save.record, lambda: PART, lambda: None, save.after_failover)
        if waits:
            self.saver.wait(60)

    def carry_out(self) -> None:
        for save in self.told:
            self.saver.save(save.record, lambda: PART, lambda: None, save.after_failover)
        self.told.clear()
        self.saver.wait(60)


@pytest.fixture(params=[Disk, Storage])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made: Disk = request.param(tmp_path)
    yield made
    made.mend()


def test_short_steps_do_not_all_ask_for_failovers(tmp_path: Path) -> None:
    class Counting:
        asked = 0

        def newest(self) -> int:
            self.asked += 1
            return -1

    store, news = MemoryRunStore(), Counting()
    replica = Replica(0, Disk(tmp_path), store, last_step=1000, every=1000)
    replica.orders._failovers = news  # type: ignore[assignment]
    for step in range(1, 100):
        replica.now = 0.01 * step
        assert replica.orders.out_of_turn(CommitRecord(step, step, "", ((0, 0),))) is None
    assert 15 <= news.asked <= 20


def saved_steps(replica: Replica) -> list[int]:
    return [save.record.step for save in replica.told]


def test_a_failed_checkpoint_is_tried_at_the_next_steps_and_not_only_at_the_next_that_is_due(disk: Disk) -> None:
    one = Replica(0, disk, MemoryRunStore(), last_step=1000, every=50)
    for step in range(1, 50):
        one.apply(record_of(step))
    assert one.told == []
    disk.fail()
    for step in range(50, 60):
        one.apply(record_of(step))
    assert saved_steps(one) == [51, 53, 57], "with growing pauses"
    disk.mend()
    for step in range(60, 110):
        one.apply(record_of(step))
    assert saved_steps(one) == [51, 53, 57, 65], "and no more once one is written"
    assert newest_complete(disk.folder).record.step == 100  # type: ignore[union-attr]
    assert "was written, after 4 failed attempts" in one.said[-1]


def test_when_the_writer_is_lost_its_checkpoint_is_made_up_for_by_the_next(disk: Disk) -> None:
    store = MemoryRunStore()
    first, second = Replica(0, disk, store, 1000), Replica(1, disk, store, 1000)
    for step in range(1, 10):
        for each in (first, second):
            each.apply(record_of(step))
    assert first.told == second.told == []
    for step in range(10, 14):  # replica 0 dies in step 10, before it has written anything
        second.apply(record_of(step, (1,)) if step > 10 else record_of(step))
    assert saved_steps(second) == [11]


def test_one_that_is_still_being_written_is_not_ordered_again(disk: Disk) -> None:
    one = Replica(0, disk, MemoryRunStore(), 1000)
    one.saver._unfinished += 1  # as while another is under way
    for step in range(5, 9):
        one.apply(record_of(step), waits=False)
    assert one.told == []


def test_what_a_silent_storage_could_not_say_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    one = Replica(1, storage, MemoryRunStore(), 1000)  # not the writer of step 5, which replica 0 has lost
    one.apply(record_of(5), waits=False)
    storage.fail()
    assert one.orders.out_of_turn(record_of(6, (1,))) is None
    storage.mend()
    assert one.orders.out_of_turn(record_of(7, (1,))) == Save(record_of(7, (1,)))


def test_nothing_is_ordered_without_checkpoints_or_of_a_fresh_run(disk: Disk) -> None:
    none = Replica(0, disk, MemoryRunStore(), 12, every=0)
    some = Replica(0, disk, MemoryRunStore(), 12)
    for step in range(1, 5):
        none.apply(record_of(step))
        some.apply(record_of(step))
    assert none.told == some.told == [] and none.orders.last_is_safe(record_of(12), {0}) == ""


def test_an_order_survives_the_way_to_another_rank() -> None:
    for save in (Save(record_of(3)), Save(record_of(3), after_failover=True)):
        assert decode(encode(save)) == save


LAST = record_of(12)


def world(disk: Disk, replicas: int = 3) -> tuple[MemoryRunStore, list[Replica]]:
    store = MemoryRunStore()
    return store, [Replica(n, disk, store, LAST.step) for n in range(replicas)]


def test_the_last_state_is_not_safe_before_its_checkpoint_is_complete(disk: Disk) -> None:
    store, (zero, one, _) = world(disk)
    holders = {0, 1, 2}
    assert one.orders.last_is_safe(LAST, holders) is None and one.told == [], "replica 0 writes it"
    zero.apply(LAST)
    assert {r.orders.last_is_safe(LAST, holders) for r in (zero, one)} == {""} and zero.told == one.told == []
    assert store.get(kept_key(LAST)) == "yes", "for those who do not see the folder"


def test_if_its_writer_dies_another_writes_it(disk: Disk) -> None:
    store, (_, one, two) = world(disk)
    for _ in range(3):  # in each quorum without replica 0; it is ordered once
        assert two.orders.last_is_safe(LAST, {1, 2}) is None
        assert one.orders.last_is_safe(LAST, {1, 2}) is None
    assert saved_steps(one) == [12] and two.told == []
    assert two.orders.last_is_safe(LAST, {2}) is None, "and now replica 1 died too"
    assert saved_steps(two) == [12]
    two.carry_out()
    assert two.orders.last_is_safe(LAST, {2}) == ""
    assert newest_complete(disk.folder).record == LAST  # type: ignore[union-attr]


def test_a_last_checkpoint_that_fails_is_tried_again_and_then_all_know_that_it_is_lost(disk: Disk) -> None:
    store, (zero, one, _) = world(disk)
    disk.fail()
    zero.apply(LAST)
    orders = 0
    while (why := zero.orders.last_is_safe(LAST, {0, 1})) is None:
        assert one.orders.last_is_safe(LAST, {0, 1}) is None
        orders += len(zero.told)
        zero.carry_out()
        zero.now += 1.0
        assert zero.now < 100.0
    assert orders >= 4 and zero.now >= 60.0 and "Not a directory" in why
    assert one.orders.last_is_safe(LAST, {0, 1}) == why == store.get(unsaved_key(LAST))


def test_the_time_to_try_again_begins_with_the_last_checkpoint_and_success_ends_it(disk: Disk) -> None:
    """An outage that began long before the last step leaves the last checkpoint its whole time."""
    _, (zero, *_) = world(disk)
    disk.fail()
    zero.apply(record_of(5))
    zero.now = 1000.0
    zero.apply(LAST)
    assert zero.orders.last_is_safe(LAST, {0}) is None
    zero.carry_out()
    disk.mend()
    zero.now += last_pause_s(20) + 1
    assert zero.orders.last_is_safe(LAST, {0}) is None and zero.told
    zero.carry_out()
    assert zero.orders.last_is_safe(LAST, {0}) == ""


@pytest.mark.parametrize("case", range(20))
def test_no_replica_is_done_before_the_last_state_is_on_disk_or_known_to_be_lost(case: int, disk: Disk, seed: int) -> None:
    """Replicas die, the disk comes and goes: whoever is done was right, and somebody gets done."""
    rng = random.Random(seed + case)
    store, replicas = world(disk)
    if rng.random() < 0.5:
        disk.fail()
    for replica in replicas:
        if rng.random() < 0.7:
            replica.apply(LAST)  # else it was lost before and has fetched the state
    done: dict[int, str] = {}
    for _ in range(400):
        living = [r for r in replicas if r.alive]
        if all(r.number in done for r in living):
            break
        if rng.random() < 0.1:
            rng.choice((disk.fail, disk.mend))()
        if len(living) > 1 and rng.random() < 0.05:
            rng.choice(living).alive = False
        living = [r for r in replicas if r.alive]
        for replica in living:
            replica.now += rng.random() * 3
            if replica.number in done:
                continue
            said = replica.orders.last_is_safe(LAST, {r.number for r in living})
            if said is not None:
                done[replica.number] = said
                disk.mend()  # to look
                found = newest_complete(disk.folder)
                assert (found is not None and found.record == LAST) or said
            if rng.random() < 0.8:
                replica.carry_out()
    assert done and all(r.number in done for r in replicas if r.alive)


def test_members_that_hold_another_state_do_not_write_it() -> None:
    """The holders are told from the quorum's members, as every replica of it sees them."""

    class Fixed(Membership):
        def announce(self) -> None: ...

        def join(self, me: Member, timeout_s: float) -> Formed:
            return Formed(7, (Member(0, 0, 11, "old"), me))

        def close(self) -> None: ...

    seen = ObservedMembership(Fixed())
    seen.join(Member(1, 0, 12, LAST.hash), 1.0)
    assert {m.replica for m in seen.members if m.lineage == LAST.hash} == {1}
