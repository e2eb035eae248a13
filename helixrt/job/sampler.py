"""The sampler of `session.sampler`: one order per epoch for all streams, dealt over them.

In: a number of items, (seed, epoch), and which stream of how many this is. Out: the item ids of this stream, a
`torch.utils.data.Sampler`. In each epoch every stream gets the same number of ids, no id goes to two streams, and what does not
fill all streams is left out of that epoch (with `shuffle` other ids each time).
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
from torch.utils.data import Sampler

from helixrt.errors import ConfigError
from helixrt.job.permutation import permutation


class StreamSampler(Sampler[int]):
    """Ids of stream number `stream` of `streams` over a data set of `items` items.

    `set_epoch` selects the order; the session calls it. Raises ConfigError (sampler) if there are fewer items than streams.
    """

    def __init__(self, items: int, streams: int, stream: int, *, shuffle: bool, seed: int) -> None:
        if items < streams:
            raise ConfigError("sampler", f"{items} items", f"there are {streams} streams; each needs at least one item")
        if not 0 <= stream < streams:
            raise ConfigError("sampler", stream, f"must be the number of one of {streams} streams, from 0")
        self.items, self.streams, self.stream = items, streams, stream
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Take effect with the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.items // self.streams

    def __iter__(self) -> Iterator[int]:
        return (int(item) for item in self.order())

    def order(self) -> np.ndarray:
        """The ids of this stream in the present epoch: int64 [len(self)]."""
        everything = permutation(self.items, self.seed, self.epoch) if self.shuffle else np.arange(self.items)
        return everything[self.stream :: self.streams][: len(self)]


def stream_sampler(data: Sized, streams: int, stream: int, *, shuffle: bool, seed: int) -> StreamSampler:
    """The sampler of a data set with a length. Raises ConfigError (sampler) for one without."""
    try:
        items = len(data)
    except TypeError as error:
        rule = "has no length; a data set without one (IterableDataset) divides itself by session.stream and session.streams"
        raise ConfigError("sampler", type(data).__name__, rule) from error
    return StreamSampler(items, streams, stream, shuffle=shuffle, seed=seed)
