"""The data of one replica by position, against a plain list of batches: through kills, repeats and steps back."""

from __future__ import annotations

import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from helixrt.errors import ConfigError, Fatal, MisuseError, StartAgain
from helixrt.job.data_random import seed_generators
from helixrt.job.loader_states import LoaderStates
from helixrt.job.sampler import StreamSampler, stream_sampler
from helixrt.job.stream import LENGTH_KEY, Stream, StreamSettings
from helixrt.replica.store import MemoryRunStore

ITEMS, BATCH = 44, 4


class Numbers(Dataset[torch.Tensor]):
    """Item i is the number i."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Noisy(Numbers):
    """Draws from the process's generators for each item, as random crops do."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()).double() / 4 + random.random() / 4


class Lines(IterableDataset[torch.Tensor]):
    """No length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor(i) for i in range(ITEMS))


class Resumable(IterableDataset[torch.Tensor]):
    """Keeps its own position, also in a state, and begins again only after its end (torchdata's convention)."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < ITEMS:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled:
    """A loader of the user's own: an order per epoch, no torch class."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch).sample(range(ITEMS), ITEMS)
        return (order[i : i + BATCH] for i in range(0, ITEMS, BATCH))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [[i, i + 1] for i in range(11)],
    "own": Shuffled,
    "loader": lambda: DataLoader(Numbers(), BATCH),
    "generator": lambda: DataLoader(Numbers(), BATCH, shuffle=True, generator=seeded()),
    "random sampler": lambda: DataLoader(Numbers(), BATCH, sampler=RandomSampler(Numbers(), generator=seeded())),
    "sampler": lambda: DataLoader(Numbers(), BATCH, sampler=StreamSampler(ITEMS, 3, 1, shuffle=True, seed=9)),
    "noise": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=seeded()),
    "lines": lambda: DataLoader(Lines(), BATCH),
    "stateful": lambda: StatefulDataLoader(Numbers(), BATCH),
    "stateful generator": lambda: StatefulDataLoader(Numbers(), BATCH, shuffle=True, generator=seeded()),
    "stateful sampler": lambda: StatefulDataLoader(Numbers(), BATCH, sampler=StreamSampler(ITEMS, 3, 1, shuffle=True, seed=9)),
    "stateful noise": lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True, generator=seeded()),
    "stateful lines": lambda: StatefulDataLoader(Lines(), BATCH),
    "resumable": lambda: StatefulDataLoader(Resumable(), BATCH),
}


def plain(batch: Any) -> list[float]:
    return batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


@functools.cache
def undisturbed(make: Callable[[], Any], accumulate: int, groups: int, seed: int = 0) -> list[list[list[float]]]:
    stream = Stream(make(), StreamSettings(0, accumulate, seed), MemoryRunStore())
    found = [[plain(b) for b in stream.take(g * accumulate)] for g in range(groups)]
    stream.close()
    return found


@pytest.mark.parametrize("kind", ["list", "loader", "lines", "stateful", "stateful lines", "resumable"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_positions_follow_a_plain_list(kind: str, accumulate: int) -> None:
    """11 batches an epoch; the incomplete last group is left out, and the next epoch begins."""
    batches = [plain(b) for b in LOADERS[kind]()]
    usable = len(batches) // accumulate * accumulate
    expected = (batches[:usable] * 3)[: 3 * usable]
    groups = 3 * usable // accumulate
    found = undisturbed(LOADERS[kind], accumulate, groups)
    assert [b for group in found for b in group] == expected


@pytest.mark.parametrize("kind", ["own", "sampler", "stateful sampler"])
def test_the_order_of_each_epoch_is_that_of_set_epoch(kind: str) -> None:
    expected = []
    for epoch in range(3):
        loader = LOADERS[kind]()
        (loader if kind == "own" else loader.sampler).set_epoch(epoch)
        expected += [plain(b) for b in loader]
    found = undisturbed(LOADERS[kind], 1, len(expected))
    assert [b for group in found for b in group] == expected
    assert expected[: len(expected) // 3] != expected[len(expected) // 3 : 2 * len(expected) // 3]


@pytest.mark.parametrize("kind", sorted(LOADERS))
@settings(max_examples=12)
@given(data=st.data())
def test_a_killed_replica_reads_what_an_undisturbed_one_reads(kind: str, data: st.DataObject) -> None:
    """Any sequence of commits, repeats, steps back, batches left half read, and new processes on the same store."""
    accumulate, every = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 3, 100]))
    model, store = undisturbed(LOADERS[kind], accumulate, 30), MemoryRunStore()
    settings_ = StreamSettings(0, accumulate, 0, every)
    stream, group = Stream(LOADERS[kind](), settings_, store), 0
    for _ in range(data.draw(st.integers(1, 25))):
        read = data.draw(st.sampled_from([accumulate, accumulate, accumulate, 1]))
        try:
            batches = stream.take(group * accumulate)
            found = [plain(next(batches)) for _ in range(read)]
        except StartAgain:  # the process ends and a new one begins
            assert kind == "resumable"
            stream = Stream(LOADERS[kind](), settings_, store)
            continue
        assert found == model[group][:read]
        event = data.draw(st.sampled_from(["commit", "commit", "commit", "again", "back", "kill", "kill and lag"]))
        if event == "commit" and read == accumulate:
            group = min(group + 1, 29)
        elif event == "back":  # the head was superseded
            group = max(0, group - 1)
        elif event in ("kill", "kill and lag"):
            stream.close()
            stream = Stream(LOADERS[kind](), settings_, store)
            group = max(0, group - data.draw(st.integers(0, 9))) if event == "kill and lag" else group
    stream.close()


@pytest.mark.parametrize("lines", [False, True])
def test_with_workers_a_killed_replica_reads_the_same(lines: bool) -> None:
    def make() -> Any:
        if lines:
            return StatefulDataLoader(Resumable(), BATCH, num_workers=2)
        return StatefulDataLoader(Numbers(), BATCH, shuffle=True, generator=seeded(), num_workers=2, persistent_workers=True)

    model, store = undisturbed(make, 2, 24), MemoryRunStore()
    for first, last in ((0, 4), (3, 9), (9, 14), (12, 24)):
        stream = Stream(make(), StreamSettings(0, 2, 0, 3), store)
        assert [[plain(b) for b in stream.take(2 * g)] for g in range(first, last)] == model[first:last]
        stream.close()


def test_streams_draw_different_random_numbers() -> None:
    fractions = []
    for replica in range(2):
        stream = Stream(LOADERS["noise"](), StreamSettings(replica), MemoryRunStore())
        fractions.append([x % 1 for x in plain(next(stream.take(0)))])
    assert fractions[0] != fractions[1]


def test_a_batch_that_was_changed_in_place_is_read_again() -> None:
    stream = Stream(LOADERS["loader"](), StreamSettings(0), MemoryRunStore())
    (batch,) = stream.take(3)
    expected = plain(batch)
    batch.zero_()
    (again,) = stream.take(3)
    assert plain(again) == expected
    (third,) = stream.take(3)
    assert third is again  # in memory, not read


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Plain:
    """Nothing special, and it holds containers."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.parts, self.made = x, [{"y": x + 1}], lambda: x

    def __repr__(self) -> str:
        return f"Plain({self.x}, {self.parts})"


class Locked(Plain):
    """It cannot be copied."""

    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


BATCHES = {
    "plain object": Plain,
    "object in a list": lambda x: [x, (Plain(x), [x])],
    "dictionary": lambda x: {"x": x, "others": [x + 1, {"y": x + 2}]},
    "list": lambda x: [x, (x + 1, [x + 2])],
    "mapping": lambda x: UserDict(x=x, y=x + 1),
    "data class": lambda x: Pair(x, x + 1),
    "array": lambda x: {"x": x.numpy().copy()},
}


def changed(batch: Any) -> None:
    """What loops do with a batch: new tensors in its containers, entries taken out, arrays changed in place."""
    if isinstance(batch, Pair | Plain):
        batch.x = batch.x * 10
        if isinstance(batch, Plain):
            batch.parts[0].pop("y")
            batch.parts.append(1)
    elif isinstance(batch, list):
        batch[0] = batch[0] * 10
        batch[1][1].clear()
        if isinstance(batch[1][0], Plain):
            changed(batch[1][0])
    elif isinstance(batch["x"], numpy.ndarray):
        batch["x"] *= 10
    else:
        batch["x"] = batch["x"] * 10
        if "others" in batch:
            batch["others"][1].pop("y")
            batch.pop("others")
        batch["new"] = 1


@pytest.mark.parametrize("known", [True, False], ids=["length", "no length"])
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_comes_again_as_it_was_read(kind: str, known: bool) -> None:
    """After a step that was dropped, whatever the loop has put into the batch; it is not read again for that."""
    read: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for number in range(6):
                read.append(number)
                yield BATCHES[kind](torch.full((2,), float(number + 1)))

    class Known(Loader):
        def __len__(self) -> int:
            return 6

    stream = Stream(Known() if known else Loader(), StreamSettings(0, accumulate=2), MemoryRunStore())
    for _ in range(3):
        for number, batch in enumerate(stream.take(2), start=2):
            assert repr(batch) == repr(BATCHES[kind](torch.full((2,), float(number + 1))))
            changed(batch)
    assert read == [0, 1, 2, 3]


@pytest.mark.parametrize("known", [True, False], ids=["length", "no length"])
def test_a_batch_that_cannot_be_copied_is_read_again_and_the_user_is_told_once(known: bool) -> None:
    read: list[int] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for number in range(6):
                read.append(number)
                yield Locked(torch.full((2,), float(number)))

    class Known(Loader):
        def __len__(self) -> int:
            return 6

    said: list[str] = []
    stream = Stream(Known() if known else Loader(), StreamSettings(0, accumulate=2), MemoryRunStore(), said.append)
    for _ in range(3):
        for number, batch in enumerate(stream.take(2), start=2):
            assert repr(batch) == repr(Locked(torch.full((2,), float(number))))
            changed(batch)
    assert len(read) > 4
    copying = [text for text in said if "cannot be copied" in text]
    assert copying == [
        "a batch of type Locked cannot be copied (TypeError: it holds a lock): a step that is repeated reads its batches again"
    ]


def test_a_restart_skips_from_the_newest_state_before_its_position() -> None:
    read: list[int] = []

    class Counting(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return torch.tensor(index)

    store, said = MemoryRunStore(), []
    first = Stream(StatefulDataLoader(Counting(), 1), StreamSettings(0, every=5), store)
    for position in range(18):
        list(first.take(position))
    read.clear()
    (batch,) = Stream(StatefulDataLoader(Counting(), 1), StreamSettings(0, every=5), store, said.append).take(13)
    assert plain(batch) == [13] and read == [10, 11, 12, 13]  # the state at 15 is too new
    assert any("skips 3 batches" in line for line in said)


@pytest.mark.parametrize(("before", "now"), [(0, 2), (2, 0), (2, 1)])
def test_a_loader_with_other_workers_reads_its_epoch_from_the_beginning(before: int, now: int) -> None:
    """torchdata's loader takes a state of as many workers alone."""
    store, said = MemoryRunStore(), list[str]()
    first = Stream(StatefulDataLoader(Numbers(), 1, num_workers=before), StreamSettings(0, every=5), store)
    for position in range(8):
        list(first.take(position))
    first.close()
    other = Stream(StatefulDataLoader(Numbers(), 1, num_workers=now), StreamSettings(0, every=5), store, said.append)
    (batch,) = other.take(7)
    other.close()
    assert plain(batch) == [7]
    assert f"the loader has {now} workers, and its states are of {before}: the epoch is read from its beginning" in said
    if not before:
        keeping = Stream(StatefulDataLoader(Resumable(), 1, num_workers=now), StreamSettings(1, every=5), store)
        alone = Stream(StatefulDataLoader(Resumable(), 1), StreamSettings(1, every=5), store)
        list(alone.take(0))
        alone.close()
        with pytest.raises(ConfigError, match="num_workers=2: the run was begun with 0, and its data set keeps a position"):
            list(keeping.take(0))


def test_states_that_cannot_be_published_cost_a_message_and_nothing_else() -> None:
    class Odd(Resumable):
        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "what": object}

    store, said = MemoryRunStore(), []
    settings_ = StreamSettings(0, every=2)
    stream = Stream(StatefulDataLoader(Odd(), BATCH), settings_, store, said.append)
    for position in range(7):
        list(stream.take(position))
    again = Stream(StatefulDataLoader(Odd(), BATCH), settings_, store)
    assert [plain(b) for b in again.take(6)] == [[24, 25, 26, 27]]
    assert sum("not published" in line for line in said) == 1


def test_few_states_stay_in_the_store() -> None:
    store = MemoryRunStore()
    states = LoaderStates(store, "0/0", print)
    for offset in range(0, 100, 10):
        states.put((2, offset), {"at": offset})
    fresh = LoaderStates(store, "0/0", print)
    assert fresh.newest((2, 95)) == (90, {"at": 90}) and fresh.newest((2, 79)) == (70, {"at": 70})
    assert fresh.newest((2, 59)) == (0, {"at": 0})  # the start of the epoch
    assert fresh.newest((1, 95)) is None and store.get("loader/0/0/2/30") is None


# ---------------------------------------------------------------- lengths


def test_the_incomplete_last_group_is_said_once() -> None:
    said: list[str] = []
    stream = Stream(LOADERS["lines"](), StreamSettings(0, 4), MemoryRunStore(), said.append)
    assert stream.usable is None
    for group in range(5):
        list(stream.take(4 * group))
    assert stream.usable == 8 and stream.epoch_of(8) == 1
    assert [line for line in said if "not used" in line] == [
        "the last 3 of 11 batches of each epoch are not used: a step takes accumulate=4"
    ]


def test_streams_of_unequal_length_are_refused_at_the_start() -> None:
    store = MemoryRunStore()
    Stream([1, 2, 3], StreamSettings(0), store)
    with pytest.raises(MisuseError, match="list: batches per epoch=4 in stream 1/0, and 3 in stream 0/0: all streams must"):
        Stream([1, 2, 3, 4], StreamSettings(1), store)


def test_unequal_accumulation_is_refused_at_the_start() -> None:
    store = MemoryRunStore()
    Stream([1, 2, 3, 4], StreamSettings(0, 2), store)
    with pytest.raises(MisuseError, match="list: accumulate=4 in stream 1/0, and 2 in stream 0/0"):
        Stream([1, 2, 3, 4], StreamSettings(1, 4), store)


def test_unequal_lengths_that_are_found_at_the_end_of_an_epoch_are_refused() -> None:
    store = MemoryRunStore()
    short, longer = (Stream(DataLoader(Lines(), size), StreamSettings(r), store) for r, size in ((0, BATCH), (1, 2)))
    list(longer.take(0))  # before a length is known
    for position in range(12):
        list(short.take(position))
    assert store.get(LENGTH_KEY) is not None
    with pytest.raises(MisuseError, match="batches per epoch=22 in stream 1/0, and 11 in stream 0/0: all streams"):
        for position in range(23):
            list(longer.take(position))
    other = Stream(DataLoader(Lines(), 2), StreamSettings(1), store)
    with pytest.raises(MisuseError, match="batches per epoch=more than 11 in stream 1/0, and 11 in the others"):
        for position in range(23):
            list(other.take(position))


def test_a_loader_that_is_shorter_than_its_length_is_an_error() -> None:
    class Short(Shuffled):
        def __len__(self) -> int:
            return 14

    stream = Stream(Short(), StreamSettings(0), MemoryRunStore())
    with pytest.raises(Fatal, match="has a length of 14 batches, and an epoch had 11"):
        for position in range(14):
            list(stream.take(position))


@pytest.mark.parametrize("accumulate", [0, 12])
def test_accumulation_that_no_epoch_can_fill_is_refused(accumulate: int) -> None:
    with pytest.raises(ConfigError, match=f"accumulate={accumulate}: "):
        Stream(LOADERS["loader"](), StreamSettings(0, accumulate), MemoryRunStore())


# ---------------------------------------------------------------- orders that are not reproducible

class Own(Sampler[Any]):
    """`order(n)` gives the numbers below n in any order."""

    def __init__(self, order: Callable[[int], Any], held: object = None) -> None:
        self.order, self.held = order, held

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(ITEMS))

    def __len__(self) -> int:
        return ITEMS


def fresh() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


UNSEEDED: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Numbers(), BATCH, shuffle=True),
    "sampler": lambda: DataLoader(Numbers(), BATCH, sampler=RandomSampler(Numbers())),
    "weighted": lambda: DataLoader(Numbers(), BATCH, sampler=WeightedRandomSampler([1.0] * ITEMS, ITEMS)),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=torch.utils.data.BatchSampler(RandomSampler(Numbers()), BATCH, False)
    ),
    "stateful": lambda: StatefulDataLoader(Numbers(), BATCH, shuffle=True),
    "own, by random": lambda: DataLoader(Numbers(), BATCH, sampler=Own(lambda n: random.Random().sample(range(n), n))),
    "own, by NumPy": lambda: DataLoader(Numbers(), BATCH, sampler=Own(lambda n: numpy.random.default_rng().permutation(n))),
    "own, by torch": lambda: DataLoader(Numbers(), BATCH, sampler=Own(lambda n: torch.randperm(n, generator=fresh()))),
    "own batches": lambda: DataLoader(Numbers(), batch_sampler=Own(lambda n: torch.randperm(n, generator=fresh()).view(-1, 4))),
}
SEEDED: dict[str, Callable[[], Any]] = {
    "by the process's numbers": lambda: Own(lambda n: random.sample(range(n), n)),
    "by its own generator": lambda: Own(numpy.random.default_rng(3).permutation),
    "cannot be copied": lambda: Own(lambda n: random.sample(range(n), n), (i for i in range(3))),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_an_own_order_that_follows_from_seeds_is_not_refused_or_changed(kind: str) -> None:
    sampler = SEEDED[kind]()
    stream = Stream(DataLoader(Numbers(), BATCH, sampler=sampler), StreamSettings(0), MemoryRunStore())
    seed_generators(0, 1, 0)  # (seed, an epoch's begin, its number)
    expected = list(SEEDED[kind]())
    assert [int(i) for position in range(ITEMS // BATCH) for batch in stream.take(position) for i in batch] == expected


@pytest.mark.parametrize("kind", sorted(UNSEEDED))
def test_an_unseeded_order_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"has an unseeded order; use sampler=session\.sampler"):
        Stream(UNSEEDED[kind](), StreamSettings(0), MemoryRunStore())


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: iter([1, 2]), "can be iterated once only"),
        (lambda: (i for i in range(3)), "can be iterated once only"),
        (lambda: 7, "is not iterable"),
        (lambda: DataLoader(Numbers(), num_workers=2, in_order=False), "in the order of their arrival"),
    ],
)
def test_what_is_no_loader_is_refused(make: Callable[[], Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Stream(make(), StreamSettings(0), MemoryRunStore())


def test_a_data_set_whose_epoch_would_not_reach_its_workers_is_refused() -> None:
    class Epochs(Numbers):
        def set_epoch(self, epoch: int) -> None: ...

    with pytest.raises(ConfigError, match="which set_epoch does not reach"):
        Stream(DataLoader(Epochs(), num_workers=1, persistent_workers=True), StreamSettings(0), MemoryRunStore())


# ---------------------------------------------------------------- the sampler


@given(items=st.integers(1, 60), streams=st.integers(1, 7), epoch=st.integers(0, 5), shuffle=st.booleans())
def test_the_sampler_deals_each_item_to_one_stream(items: int, streams: int, epoch: int, shuffle: bool) -> None:
    if items < streams:
        with pytest.raises(ConfigError, match="each needs at least one item"):
            StreamSampler(items, streams, 0, shuffle=shuffle, seed=0)
        return
    dealt = []
    for stream in range(streams):
        sampler = StreamSampler(items, streams, stream, shuffle=shuffle, seed=3)
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == items // streams
        dealt.append(list(sampler))
    flat = [item for ids in dealt for item in ids]
    assert len(set(flat)) == len(flat) == items // streams * streams and set(flat) <= set(range(items))
    if not shuffle:
        assert dealt == [list(range(items))[s::streams][: items // streams] for s in range(streams)]


def test_the_sampler_needs_a_length() -> None:
    with pytest.raises(ConfigError, match="sampler=Lines: has no length"):
        stream_sampler(Lines(), 2, 0, shuffle=True, seed=0)
    assert isinstance(DataLoader(Numbers()).sampler, SequentialSampler)
