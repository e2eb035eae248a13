"""Data sets of libraries that share their items out by themselves: over this run's streams, in an order that a restart repeats.

In: the files of a data set (webdataset and the like), or a data set of litdata or mosaicml-streaming. These libraries share out
by RANK and WORLD_SIZE or by torch.distributed: over the ranks of one replica, so that every replica would read everything. Out:
`ShardSplitter`, or the same data set, told which stream of how many this is. The order of each epoch follows from the seed and
the epoch alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import partial
from math import ceil
from typing import Any, TypeVar

from helixrt.errors import ConfigError

Data = TypeVar("Data")
File = TypeVar("File")


class ShardSplitter:
    """Of a list of files those of stream number `stream` of `streams`: a `nodesplitter` of webdataset. With `shuffle` each
    epoch has another order, and other files go to each stream. `random`: for a shuffle of items, `shuffle(1000, rng=random)`,
    seeded anew in each epoch. The session calls `set_epoch`."""

    def __init__(self, streams: int, stream: int, *, shuffle: bool, seed: int) -> None:
        self.streams, self.stream, self.shuffle, self.seed = streams, stream, shuffle, seed
        self.random = random.Random()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Take effect with the next iteration."""
        self.epoch = epoch
        self.random.seed(f"{self.seed} {epoch} {self.stream}")

    def __call__(self, files: Iterable[File]) -> Iterator[File]:
        """Raises ConfigError (shards) if they do not fill all streams alike."""
        found = list(files)
        if len(found) % self.streams or not found:
            rule = f"there are {self.streams} streams; each needs as many files as the others"
            raise ConfigError("shards", f"{len(found)} files", rule)
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(found)
        return iter(found[self.stream :: self.streams])


def over_streams(data: Data, streams: int, stream: int) -> Data:
    """A `StreamingDataset` of litdata or of mosaicml-streaming, changed in place. Raises ConfigError (dataset) for another
    object, or a version of these packages that shares out in another way."""
    library, given = type(data).__module__.partition(".")[0], vars(data) if hasattr(data, "__dict__") else {}
    if library == "litdata" and "distributed_env" in given:
        _litdata(data, streams, stream)
    elif library == "streaming" and "_parallel_rank_world" in given:
        _streaming(data, streams, stream)
    else:
        rule = "is no StreamingDataset of litdata or mosaicml-streaming; use session.sampler or session.split_shards"
        raise ConfigError("dataset", type(data).__name__, rule)
    return data


def _litdata(data: Any, streams: int, stream: int) -> None:
    data.distributed_env = type(data.distributed_env)(streams, stream, 1)
    data.drop_last = data.drop_last or streams > 1  # as litdata does for several processes: their epochs are equally long


def _streaming(data: Any, streams: int, stream: int) -> None:
    """It keeps who reads what (`_parallel_rank_world`) apart from which processes share memory."""
    data._parallel_rank_world = type(data._parallel_rank_world)(streams, 1, 1, stream)
    data.length = ceil(data.epoch_size / streams)
    data.set_epoch = partial(setattr, data, "next_epoch")
