"""The sampler of `session.sampler`: one order per epoch for all streams, dealt over them.

In: a number of items, (seed, epoch), and which stream of how many this is. Out: the item ids of this stream, a
`torch.utils.data.Sampler`. In each epoch every stream gets the same number of ids, no id goes to two streams, and what does not
fill all streams is left out of that epoch (with `shuffle` other ids each time). In a run that was resumed with another number
of streams the first round is what the streams of before had not read (`dealing`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Sized
from functools import cached_property

import numpy as np
from torch.utils.data import Sampler

from helixrt.errors import ConfigError
from helixrt.job.dealing import Order, Rounds, rounds_after, share
from helixrt.protocol.step.deal import Deal


class StreamSampler(Sampler[int]):
    """Ids of stream number `stream` of `streams` over a data set of `items` items.

    `set_epoch` selects the order; the session calls it. `deals`: the changes of the number of streams before this life of the
    run; epochs count from the newest one. Raises ConfigError (sampler) if there are fewer items than streams.
    """

    def __init__(self, items: int, streams: int, stream: int, *, shuffle: bool, seed: int, deals: Sequence[Deal] = ()) -> None:
        if items < streams:
            raise ConfigError("sampler", f"{items} items", f"there are {streams} streams; each needs at least one item")
        if not 0 <= stream < streams:
            raise ConfigError("sampler", stream, f"must be the number of one of {streams} streams, from 0")
        self.items, self.streams, self.stream = items, streams, stream
        self.shuffle, self.seed, self.epoch, self.deals = shuffle, seed, 0, tuple(deals)

    @cached_property
    def rounds(self) -> Rounds:
        """What all streams read."""
        return rounds_after(Order(self.items, self.shuffle, self.seed), self.deals)

    @property
    def mark(self) -> str:
        """Names the order over these streams, among those that a run has had."""
        return hashlib.sha256(repr((self.streams, self.deals)).encode()).hexdigest()[:12]

    def set_epoch(self, epoch: int) -> None:
        """Take effect with the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """In the present epoch."""
        return self.lengths[self.epoch < self.rounds.before]

    @property
    def lengths(self) -> tuple[int, int]:
        """Of an epoch, and of what was left when the streams were dealt anew (0 if nothing was)."""
        return self.items // self.streams, len(self.rounds.remainder) // self.streams

    def __iter__(self) -> Iterator[int]:
        return (int(item) for item in self.order())

    def order(self) -> np.ndarray:
        """The ids of this stream in the present epoch: int64 [len(self)]."""
        return share(self.rounds.ids(self.epoch), self.streams, self.stream)


def stream_sampler(
    data: Sized, streams: int, stream: int, *, shuffle: bool, seed: int, deals: Sequence[Deal] = ()
) -> StreamSampler:
    """The sampler of a data set with a length. What was dealt of another data set, or in another kind of order, does not count
    for this one (a data set for validation). Raises ConfigError (sampler) for one without."""
    try:
        items = len(data)
    except TypeError as error:
        rule = "has no length; a data set without one (IterableDataset) divides itself by session.stream and session.streams"
        raise ConfigError("sampler", type(data).__name__, rule) from error
    same = all((deal.items, deal.shuffle) == (items, shuffle) for deal in deals)
    return StreamSampler(items, streams, stream, shuffle=shuffle, seed=seed, deals=deals if same else ())
