"""A run that is resumed with another number of streams reads what was not read: nothing twice, nothing left out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from helixrt.errors import ConfigError, Fatal
from helixrt.job.config import MeshConfig
from helixrt.job.dealing import Order, rounds_after
from helixrt.job.resume import deals_of, keep_stream, restore_stream
from helixrt.job.sampler import StreamSampler
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_host import SessionSettings
from helixrt.job.stream import Stream, StreamSettings
from helixrt.protocol.step.deal import Deal
from helixrt.protocol.step.lineage import CommitRecord, audit, genesis
from helixrt.protocol.step.quorum import Assessment, Member, successor
from helixrt.replica.store import MemoryRunStore

SEED = 5


class Reader:
    """One life of a run: each replica reads its streams by real loaders, and says which items it gave."""

    def __init__(
        self,
        replicas: int,
        shards: int = 1,
        items: int = 60,
        batch: int = 3,
        accumulate: int = 1,
        deals: tuple[Deal, ...] = (),
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.replicas, self.shards, self.accumulate, self.deals = replicas, shards, accumulate, deals
        self.store, self.said = MemoryRunStore(), list[str]()
        streams = replicas * shards
        self.streams: list[list[Stream]] = []
        for replica in range(replicas):
            row = []
            for shard in range(shards):
                number = replica * shards + shard
                sampler = StreamSampler(items, streams, number, shuffle=shuffle, seed=SEED, deals=deals)
                loader = DataLoader(np.arange(items), batch, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]
                given = StreamSettings(replica, accumulate, SEED, shard=shard, deals=deals)
                row.append(Stream(loader, given, self.store, self.said.append))
            self.streams.append(row)
        self.positions = [0] * replicas

    def steps(self, replica: int, count: int) -> list[tuple[int, int]]:
        """The (epoch of the data set, item) pairs of the next `count` steps of a replica."""
        found = []
        for _ in range(count):
            at = self.positions[replica]
            for stream in self.streams[replica]:
                for offset, batch in enumerate(stream.take(at)):
                    round_ = stream.epoch_of(at + offset)
                    found += [(round_, int(item)) for item in batch]
            self.positions[replica] += self.accumulate
        return found

    def deal(self) -> tuple[Deal, ...]:
        agreed = json.loads(self.store.get("loader/length") or "")
        usable = agreed["batches"] - agreed["batches"] % agreed["accumulate"]
        one = Deal(
            tuple(self.positions), self.shards, agreed["items"], agreed["shuffle"], agreed["batch"], usable
        )
        one = replace(one, first=agreed["first"], accumulate=self.accumulate)
        return (*self.deals, one)


LIVES = st.lists(
    st.tuples(
        st.integers(1, 4), st.integers(1, 2), st.integers(1, 4), st.integers(1, 2), st.lists(st.integers(0, 9), min_size=4)
    ),
    min_size=2,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(items=st.integers(16, 70), shuffle=st.booleans(), drop_last=st.booleans(), lives=LIVES)
def test_no_item_of_an_epoch_is_read_twice_or_left_out_whatever_the_numbers_of_streams(
    items: int, shuffle: bool, drop_last: bool, lives: list[Any]
) -> None:
    """Lives with any numbers of replicas and shards, batch sizes and positions follow each other. Every item is once in each
    epoch that was begun: read, still to be read, or left out at the end of a round, where the last group is not complete."""
    deals: tuple[Deal, ...] = ()
    read: Counter[int] = Counter()
    most_left_out, accumulate = 0, lives[0][3]
    for replicas, shards, batch, _, counts in lives:
        if items // (replicas * shards) // batch < accumulate:
            continue
        life = Reader(replicas, shards, items, batch, accumulate, deals, shuffle, drop_last)
        rounds = 0
        for replica in range(replicas):
            read.update(item for _, item in life.steps(replica, counts[replica]))
            ended = life.streams[replica][0].epoch_of(life.positions[replica])
            rounds = max(rounds, ended)
            most_left_out += ended * shards * batch * accumulate
        most_left_out += rounds * replicas * shards
        deals = life.deal()
        after = rounds_after(Order(items, shuffle, SEED), deals)
        left = Counter(after.remainder.tolist())
        assert max((read + left).values(), default=0) <= after.fresh, "an item comes twice in an epoch"
        assert after.fresh * items - (read + left).total() <= most_left_out, "items are lost"


@settings(deadline=None)
@given(
    items=st.integers(1, 90),
    old=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    new=st.integers(1, 9),
    batch=st.integers(1, 4),
    fraction=st.lists(st.floats(0, 0.999), min_size=5, max_size=5),
)
def test_within_an_epoch_read_and_dealt_are_all_items(
    items: int, old: tuple[int, int], new: int, batch: int, fraction: list[float]
) -> None:
    """Any old number, any new number, any positions, replicas apart from each other."""
    replicas, shards = old
    streams = replicas * shards
    if items < streams:
        return
    usable = max(1, items // streams // batch)
    positions = tuple(int(fraction[r] * usable) for r in range(replicas))
    rounds = rounds_after(Order(items, True, SEED), [Deal(positions, shards, items, True, batch, usable)])
    everything = Order(items, True, SEED).epoch(0)
    read = [
        int(item)
        for replica, position in enumerate(positions)
        for stream in range(replica * shards, (replica + 1) * shards)
        for item in everything[stream::streams][: items // streams][: position * batch]
    ]
    if not any(positions):
        assert (rounds.before, rounds.fresh) == (0, 0), "nothing was begun"
        return
    assert sorted([*read, *rounds.remainder.tolist()]) == list(range(items)), "no gap and no repeat"
    assert rounds.fresh == 1 and [i for i in everything if i in set(rounds.remainder)] == rounds.remainder.tolist()
    if items >= new:
        deals = [Deal(positions, shards, items, True, batch, usable)]
        ids = [i for s in range(new) for i in StreamSampler(items, new, s, shuffle=True, seed=SEED, deals=deals)]
        assert len(ids) == len(set(ids)) and set(ids) <= set(rounds.remainder.tolist())
        assert len(rounds.remainder) - len(ids) < new, "what does not fill all streams"


def test_a_replica_that_lags_leaves_a_hole_that_is_read_first() -> None:
    life = Reader(2, items=12, batch=1)  # an epoch has 6 batches
    first, ahead = life.steps(0, 2), life.steps(1, 8)
    rounds = rounds_after(Order(12, True, SEED), life.deal())
    order = Order(12, True, SEED)
    hole = [int(i) for i in order.epoch(0)[0::2][2:]]
    rest = [int(i) for n, i in enumerate(order.epoch(1)) if not (n % 2 == 1 and n // 2 < 2)]
    assert rounds.remainder.tolist() == hole + rest and rounds.fresh == 2
    assert {i for _, i in first}.isdisjoint(hole) and len(ahead) == 8


def test_after_the_remainder_whole_epochs_follow() -> None:
    life = Reader(2, items=24, batch=2, accumulate=2)
    for replica in range(2):
        life.steps(replica, 1)  # 4 items of each stream
    again = Reader(3, items=24, batch=2, accumulate=2, deals=life.deal())
    assert again.said[0] == "16 items that the 2 streams of before had not read come first, dealt over 3"
    stream = again.streams[0][0]
    # 5 items for each stream are 3 batches, of which a step of two batches is used; then epochs of 8 items, 4 batches
    assert (stream.first, stream.usable) == (2, 4)
    assert [stream.epoch_of(position) for position in range(11)] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    given_ = [again.steps(replica, 3) for replica in range(3)]
    whole = sorted(item for pairs in given_ for round_, item in pairs if round_ == 1)
    assert whole == list(range(24)), "the next epoch is whole"


def test_a_stream_that_starts_again_in_a_dealt_life_reads_the_same() -> None:
    life = Reader(3, items=50, batch=2)
    for replica, steps in enumerate((4, 7, 0)):
        life.steps(replica, steps)
    whole = Reader(2, items=50, batch=2, deals=life.deal())
    expected = whole.steps(0, 30)
    for position in (0, 3, 9, 17, 25):
        again = Reader(2, items=50, batch=2, deals=life.deal())
        again.positions[0] = position
        rest = again.steps(0, 30 - position)
        assert rest == expected[len(expected) - len(rest) :]


# ---------------------------------------------------------------- records


def record_after(base: CommitRecord, members: tuple[int, ...], deal: tuple[Deal, ...], life: int) -> CommitRecord:
    assessment = Assessment(base, members, (), supersedes=False)
    everyone = [Member(r, 0, base.step, base.hash) for r in members]
    return successor(assessment, base.generation + 1, everyone, life, 2, deal)


def test_records_carry_the_deal_and_the_audit_follows_it() -> None:
    chain = [genesis("run", 2)]
    for members in ((0, 1), (0,), (0, 1)):
        chain.append(record_after(chain[-1], members, (), 0))
    assert dict(chain[-1].positions) == {0: 6, 1: 4}
    deal = (Deal((6, 4), 1, 60, True, 3, 10),)
    dealt = list(chain)
    for members in ((0, 1, 2), (1, 2)):
        dealt.append(record_after(dealt[-1], members, deal, 1))
    assert dict(dealt[-1].positions) == {0: 2, 1: 4, 2: 4} and dealt[-1].deal == deal
    assert CommitRecord.from_json(dealt[-1].to_json()) == dealt[-1]
    assert audit(dealt, 2).clean
    other = replace(dealt[4], deal=(Deal((6, 2), 1, 60, True, 3, 10),))
    assert audit([*chain, other], 2).gaps == 1, "another position than the record before has"
    with pytest.raises(Fatal, match="goes back to step 2, and its data was dealt as of another step; resume it again"):
        record_after(chain[2], (0, 1, 2), deal, 1)


# ---------------------------------------------------------------- resuming


def resumed(folder: Path, replicas: int, record: CommitRecord, dp_shard: int = 1) -> tuple[Deal, ...]:
    return deals_of(MeshConfig(replicas, 1, dp_shard), folder, record)


def begun(folder: Path, loader: Any, replicas: int = 2) -> CommitRecord:
    """A run whose loader is this one, in its first life; a record of it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SessionConfig(mesh=MeshConfig(replicas, 1)).to_plain()))
    store = MemoryRunStore()
    Stream(loader, StreamSettings(0, 2, SEED), store)
    assert keep_stream(store, folder, replicas)
    return replace(genesis("run", replicas), step=9, positions={0: 6, 1: 4})


def sampler_of(items: int = 60, replicas: int = 2, deals: tuple[Deal, ...] = ()) -> StreamSampler:
    return StreamSampler(items, replicas, 0, shuffle=True, seed=SEED, deals=deals)


def test_a_resume_with_another_number_of_replicas_deals_and_one_with_the_same_does_not(tmp_path: Path) -> None:
    record = begun(tmp_path, StatefulDataLoader(range(60), 4, sampler=sampler_of()))  # type: ignore[arg-type]
    assert resumed(tmp_path, 2, record) == ()
    (deal,) = deals = resumed(tmp_path, 3, record)
    assert deal == Deal((6, 4), 1, 60, True, 4, 8, accumulate=2)

    store = MemoryRunStore()  # the second life: three replicas
    loader = StatefulDataLoader(range(60), 4, sampler=sampler_of(replicas=3, deals=deals))  # type: ignore[arg-type]
    Stream(loader, StreamSettings(0, 2, SEED, deals=deals), store, folder=tmp_path)
    assert keep_stream(store, tmp_path, 3, life=1)
    assert resumed(tmp_path, 3, record) == deals, "it was lost before its first commit: dealt as before"
    later = replace(record, life=1, deal=deals, positions={0: 4, 2: 2})
    assert resumed(tmp_path, 3, later) == deals
    assert resumed(tmp_path, 2, later) == (deal, Deal((4, 0, 2), 1, 60, True, 4, 4, 2, 2))
    assert resumed(tmp_path, 3, later, dp_shard=2) == (deal, Deal((4, 0, 2), 1, 60, True, 4, 4, 2, 2)), "twice the streams"
    assert restore_stream(MemoryRunStore(), tmp_path, before=1, life=2)
    assert resumed(tmp_path, 3, replace(later, life=2)) == deals

    assert keep_stream(store, tmp_path, 1, life=3, shards=2)  # a life of one replica with two dp_shard ranks
    sharded = replace(record, life=3, deal=deals, positions={0: 2})
    assert resumed(tmp_path, 1, sharded, dp_shard=2) == deals
    assert resumed(tmp_path, 2, sharded) == (deal, Deal((2,), 2, 60, True, 4, 4, 2, 2)), "as many streams, of other replicas"


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (DataLoader(range(60), 4), "DataLoader with SequentialSampler"),  # type: ignore[arg-type]
        (
            StatefulDataLoader(range(60), 4, sampler=list(range(30))),  # type: ignore[arg-type]
            "StatefulDataLoader with list",
        ),
        (list(range(30)), "list"),
    ],
)
def test_a_loader_that_cannot_be_dealt_is_refused_by_name(loader: Any, name: str, tmp_path: Path) -> None:
    record = begun(tmp_path, loader)
    assert resumed(tmp_path, 2, record) == ()
    with pytest.raises(ConfigError, match=f"replicas=3: {name} has no session.sampler, whose ids can be dealt over other"):
        resumed(tmp_path, 3, record)


def test_state_per_replica_is_not_dealt(tmp_path: Path) -> None:
    record = begun(tmp_path, DataLoader(range(60), 4, sampler=sampler_of()))  # type: ignore[arg-type]
    (tmp_path / "streams" / "0.0.per_replica").mkdir(parents=True)
    with pytest.raises(ConfigError, match="replicas=1: per_replica= state and buffers belong to the streams of before"):
        resumed(tmp_path, 1, record)


def test_a_batch_sampler_over_the_sessions_sampler_can_be_dealt(tmp_path: Path) -> None:
    loader = DataLoader(range(60), batch_sampler=BatchSampler(sampler_of(), 5, drop_last=True))  # type: ignore[arg-type]
    assert resumed(tmp_path, 1, begun(tmp_path, loader))[0].batch == 5


@pytest.mark.parametrize(
    ("sampler", "found"),
    [
        (RandomSampler(range(60), generator=torch.Generator()), "DataLoader with RandomSampler: the run was"),
        (sampler_of(items=59, replicas=3), "59 items, shuffle=True: the run was resumed with another number of streams"),
    ],
)
def test_a_script_that_reads_other_data_than_before_is_refused(sampler: Any, found: str) -> None:
    deals = (Deal((6, 4), 1, 60, True, 4, 8, accumulate=2),)
    loader = DataLoader(range(60), 4, sampler=sampler)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"loader={found}"):
        Stream(loader, StreamSettings(0, 2, SEED, deals=deals), MemoryRunStore())


def test_another_accumulation_than_before_is_refused() -> None:
    deals = (Deal((6, 4), 1, 60, True, 4, 8, accumulate=2),)
    loader = DataLoader(range(60), 4, sampler=sampler_of(replicas=3, deals=deals))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="accumulate=3: the run that is resumed has 2"):
        Stream(loader, StreamSettings(0, 3, SEED, deals=deals), MemoryRunStore())


def test_numbers_drawn_at_a_position_are_others_after_a_deal() -> None:
    deals = (Deal((6, 4), 1, 60, True, 4, 8),)
    seeds = {SessionSettings(seed=SEED, deals=deals * count).drawn_seed for count in range(4)}
    assert len(seeds) == 4 and SEED in seeds
