"""Records that are put in the background: each stands once, in order, whatever the store and other incarnations do."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from helixrt.errors import Retryable, StartAgain
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.replica import appends
from helixrt.replica.appends import GatheredAppends
from helixrt.replica.evidence import Holders
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import MemoryRunStore

ROOT = genesis("run", 1)


class Flaky(MemoryRunStore):
    """Loses calls and answers, as the chance has it; a lost answer is of a call that was carried out."""

    def __init__(self, chance: random.Random, loses: float) -> None:
        super().__init__()
        self._chance, self.loses = chance, loses

    def get(self, key: str) -> str | None:
        reads_log = key.startswith("log/")  # all of it, which would succeed too seldom
        if not reads_log and self._chance.random() < self.loses:
            raise Retryable("no answer")
        return super().get(key)

    def put_if_absent(self, key: str, value: str) -> str:
        lost = self._chance.random()
        if lost < self.loses / 2:
            raise Retryable("no answer")
        found = super().put_if_absent(key, value)
        if lost < self.loses:
            raise Retryable("the answer is lost")
        return found


class Incarnation:
    """Commits records, one behind the other, as a leader of a replica alone does."""

    def __init__(self, store: MemoryRunStore, number: int) -> None:
        self.number, self.log = number, RunLog(store)
        self.holders = Holders(store, 0, number)
        self.told: list[tuple[int, CommitRecord]] = []
        self.ended: list[BaseException] = []
        self.committed: list[tuple[int, CommitRecord]] = []
        self.appends = GatheredAppends(
            self.log, self.holders.check_fence, lambda index, record: self.told.append((index, record)), self.ended.append
        )
        self.index, self.newest = 0, ROOT

    def begin(self) -> None:
        """Fence those before, and go on behind what stands."""
        sure(self.holders.end_predecessors)
        entries = sure(self.log.read).entries
        self.index, self.newest = len(entries), entries[-1]

    def commit(self) -> None:
        """One step; another's record that stands in its place is found at the first alone."""
        while not self.ended:
            step = self.newest.step + 1
            record = CommitRecord(step, 100 * step + self.number, self.newest.hash, ((0, self.number),), {0: step}, "run")
            try:
                standing = self.appends.append(self.index, record)
            except (Retryable, StartAgain) as error:
                if isinstance(error, StartAgain):
                    self.ended.append(error)
                continue
            self.newest, self.index = standing, self.index + 1
            if standing.hash == record.hash:
                self.committed.append((self.index - 1, record))
                return


def with_one_record() -> tuple[Flaky, Incarnation]:
    """A store that answers, and an incarnation whose first record stands."""
    store = Flaky(random.Random(0), 0.0)
    RunLog(store).append(0, ROOT)
    life = Incarnation(store, 0)
    life.begin()
    life.commit()
    return store, life


def sure(call):  # type: ignore[no-untyped-def]
    while True:
        try:
            return call()
        except Retryable:
            pass


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(appends, "GATHER_S", 0.0005)
    monkeypatch.setattr(appends, "_PAUSE_S", 0.0005)
    monkeypatch.setattr(appends, "WAIT_S", 0.01)
    yield


@pytest.mark.parametrize("loses", [0.0, 0.1, 0.5])
def test_incarnations_that_overlap_leave_a_log_in_which_none_puts_behind_its_successor(seed: int, loses: float) -> None:
    for number in range(60):
        chance = random.Random(f"{seed}/{loses}/{number}")
        store = Flaky(chance, loses)
        sure(lambda: RunLog(store).append(0, ROOT))  # noqa: B023 called here
        lives = [Incarnation(store, each) for each in range(3)]
        begins = [0, chance.randrange(1, 40), chance.randrange(40, 80)]
        for moment in range(120):
            for life in lives:
                if moment == begins[life.number]:
                    life.begin()
                if moment >= begins[life.number] and not life.ended and chance.random() < 0.7:
                    life.commit()
            if chance.random() < 0.1:
                time.sleep(0.001)
        for life in lives:
            life.appends.close(20.0)
        store.loses = 0.0
        entries = RunLog(store).read_from(0)
        writers = [-1, *(record.contributors[0][1] for record in entries[1:])]
        assert writers == sorted(writers)
        for life in lives:
            assert all(entries[index] == record for index, record in life.told), "what was told stands"
            mine = [(index, entries[index]) for index, writer in enumerate(writers) if writer == life.number]
            assert mine == life.committed[: len(mine)], "what stands is the beginning of what was committed"
            assert len(life.told) <= max(0, len(mine) - 1) <= len(life.told) + 1, "each is told once, but for a lost answer's"
            assert life.told == mine[1 : len(life.told) + 1]
        assert writers.count(2) == len(lives[2].committed) and not lives[2].ended


def test_what_was_flushed_stands_and_is_told(seed: int) -> None:
    chance = random.Random(seed)
    store = Flaky(chance, 0.3)
    sure(lambda: RunLog(store).append(0, ROOT))
    life = Incarnation(store, 0)
    life.begin()
    for count in range(1, 200):
        life.commit()
        if chance.random() < 0.2:
            life.appends.flush(20.0)
            stands = sure(lambda: RunLog(store).read_from(0))
            assert len(stands) == count + 1 and life.told == life.committed[1:]
    life.appends.close(20.0)


def test_a_flush_that_cannot_be_says_why() -> None:
    store, life = with_one_record()
    store.loses = 1.0
    life.commit()
    begin_s = time.monotonic()
    with pytest.raises(Retryable, match="do not reach the run's store: no answer"):
        life.appends.flush(0.2)
    assert time.monotonic() - begin_s < 5.0 and life.told == []
    store.loses = 0.0
    life.appends.flush(20.0)
    assert life.told == life.committed[1:]
    life.appends.close()


def test_records_may_be_ahead_of_the_store_for_a_second_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends, "AHEAD_S", 0.1)
    store, life = with_one_record()
    store.loses = 1.0
    begin_s = time.monotonic()
    record = life.newest
    with pytest.raises(Retryable, match="do not reach the run's store"):
        while True:
            record = CommitRecord(record.step + 1, record.generation + 1, record.hash, ((0, 0),), {0: record.step + 1}, "run")
            life.appends.append(life.index, record)
            life.index += 1
            time.sleep(0.001)
    assert 0.1 <= time.monotonic() - begin_s < 5.0
    store.loses = 0.0
    life.appends.close(20.0)
    assert [index for index, _ in life.told] == list(range(2, life.index))


def test_closing_gives_up_a_store_that_stays_away() -> None:
    store, life = with_one_record()
    store.loses = 1.0
    life.commit()
    begin_s = time.monotonic()
    life.appends.close(0.2)
    life.appends.close(0.2)
    assert 0.2 <= time.monotonic() - begin_s < 10.0 and life.told == []
    with pytest.raises(Retryable, match="do not reach"):
        life.appends.append(life.index, life.newest)
