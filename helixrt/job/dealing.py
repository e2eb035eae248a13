"""Which ids the streams of a resumed run read first: those that the streams of before, another number, had not read.

In: a data set's length, the seed, and how far the streams of each life had come (`Deal`). Out: the ids in rounds. Without a
change of the number of streams round k is epoch k. After one, the first round is the remainder, if there is one: what was not
read of the epochs that were begun, in their order (DESIGN.md, "Data"); the next round is the first epoch that nobody has
begun. Each round is dealt over the streams like an epoch. So within an epoch no id is read twice, and none is left out but what
does not fill all streams, or the last step, of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helixrt.job.permutation import permutation
from helixrt.protocol.step.deal import Deal


@dataclass(frozen=True)
class Order:
    """The ids of a data set of `items` items in each epoch."""

    items: int
    shuffle: bool
    seed: int

    def epoch(self, number: int) -> np.ndarray:
        """All ids, int64 [items]."""
        return permutation(self.items, self.seed, number) if self.shuffle else np.arange(self.items)


@dataclass(frozen=True)
class Rounds:
    """`remainder` (int64, may be empty) is the first round; `fresh` is the epoch of the round after it."""

    order: Order
    remainder: np.ndarray
    fresh: int

    @property
    def before(self) -> int:
        """How many rounds there are before the first whole epoch: 1 with a remainder, else 0."""
        return int(len(self.remainder) > 0)

    def ids(self, number: int) -> np.ndarray:
        """Of round `number`, from 0; over all streams."""
        return self.remainder if number < self.before else self.order.epoch(self.fresh + number - self.before)


def share(ids: np.ndarray, streams: int, stream: int) -> np.ndarray:
    """The ids of one stream of a round; every stream gets equally many."""
    return ids[stream::streams][: len(ids) // streams]


def rounds_after(order: Order, deals: Sequence[Deal]) -> Rounds:
    """What is to be read after these changes of the number of streams."""
    rounds = Rounds(order, np.empty(0, dtype=np.int64), 0)
    for deal in deals:
        rounds = _after(rounds, deal)
    return rounds


def _after(rounds: Rounds, deal: Deal) -> Rounds:
    places = [_place(position, deal, rounds.before) for position in deal.positions]
    first, last = min(number for number, _ in places), max(number for number, _ in places)
    if all(offset == 0 for number, offset in places if number == last):
        last -= 1  # nobody has begun it
    left = [_left(rounds.ids(number), number, places, deal) for number in range(first, last + 1)]
    if first > last and first < rounds.before:
        return rounds  # nobody has begun the remainder
    next_round = max(first, last + 1)
    remainder = np.concatenate([np.empty(0, dtype=np.int64), *left])
    return Rounds(rounds.order, remainder, rounds.fresh + next_round - rounds.before)


def _place(position: int, deal: Deal, before: int) -> tuple[int, int]:
    """The round of a position of a stream, and how many batches of the round come before it."""
    if position < deal.first:
        return 0, position
    number, offset = divmod(position - deal.first, deal.usable)
    return before + number, offset


def _left(ids: np.ndarray, number: int, places: Sequence[tuple[int, int]], deal: Deal) -> np.ndarray:
    """What was not read of a round that somebody has begun. A replica that is in a later round has left its last incomplete
    group out, and what did not fill all streams is left out once a replica has."""
    size = len(ids) // deal.streams
    left = np.ones(len(ids), dtype=bool)
    for replica, (at, offset) in enumerate(places):
        read = size if at > number else min(size, offset * deal.batch) if at == number else 0
        for stream in range(replica * deal.shards, (replica + 1) * deal.shards):
            left[stream : stream + read * deal.streams : deal.streams] = False
    if any(at > number for at, _ in places):
        left[size * deal.streams :] = False
    return ids[left]
