"""Cuts are the best there are: compared with all cuts, for random costs and placements of all kinds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from helixrt.errors import ConfigError
from helixrt.passes.balance import UnitCost, balance

PLACEMENTS = ((0, 1), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0))


def best_of_all(costs: Sequence[UnitCost], placement: Sequence[int], limit: float, flying: Sequence[int]) -> tuple | None:
    """The slowest stage and the sum of the chunks' squares of the best cut; None if none fits in memory."""
    found = []
    for starts in itertools.combinations(range(1, len(costs)), len(placement) - 1):
        times, sizes, squares = [0.0] * len(placement), [0.0] * len(placement), 0.0
        for chunk, (begin, end) in enumerate(itertools.pairwise((0, *starts, len(costs)))):
            own = sum(cost.time for cost in costs[begin:end])
            times[placement[chunk]] += own
            squares += own * own
            sizes[placement[chunk]] += sum(c.lasting_bytes + flying[chunk] * c.saved_bytes for c in costs[begin:end])
        if max(sizes) <= limit:
            found.append((max(times), squares))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    placement = draw.choice(PLACEMENTS)
    costs = [
        UnitCost(draw.randint(1, 20), draw.randint(1, 9), draw.randint(0, 3))
        for _ in range(draw.randint(len(placement), len(placement) + 4))
    ]
    flying, limit = [draw.randint(1, 3) for _ in placement], draw.choice([float("inf"), 30.0, 60.0])
    expected = best_of_all(costs, placement, limit, flying)
    if expected is None:
        with pytest.raises(ConfigError, match="limit_bytes"):
            balance(costs, placement, limit_bytes=limit, in_flight=flying)
        return
    found = balance(costs, placement, limit_bytes=limit, in_flight=flying)
    limits = itertools.pairwise((0, *found.starts, len(costs)))
    squares = sum(sum(cost.time for cost in costs[begin:end]) ** 2 for begin, end in limits)
    assert (max(found.times), squares) == expected and max(found.bytes) <= limit


@pytest.mark.parametrize("placement", [tuple(range(8)), (*range(8), *reversed(range(8))), (*range(8), *range(8))])
def test_many_layers_stay_even(placement: tuple[int, ...]) -> None:
    """32 equal layers, an embedding and a head as long as three layers: the head's stage has one layer beside it."""
    costs = [UnitCost(3.0), *[UnitCost(10.0)] * 32, UnitCost(27.0)]
    found = balance(costs, placement)
    assert sum(found.times) == sum(cost.time for cost in costs)
    assert max(found.times) == 50.0  # 350 / 8 is 43.75; seven stages of four layers leave too much for the eighth


def test_what_cannot_be_is_refused() -> None:
    costs = [UnitCost(1.0, 4.0)] * 3
    with pytest.raises(ConfigError, match="chunks=4: must be at most 3"):
        balance(costs, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match="every stage from 0 on"):
        balance(costs, (0, 2))
    with pytest.raises(ConfigError, match="in_flight"):
        balance(costs, (0, 1), in_flight=(1,))
    with pytest.raises(ConfigError, match="too little for any cut"):
        balance(costs, (0, 1), limit_bytes=7.0)


@pytest.mark.parametrize("seed", range(40))
def test_no_neighbour_takes_less_and_none_exceeds_the_memory(seed: int) -> None:
    """With an arbitrary time for each cut; from the cut with the fastest slowest stage on it only gets better."""
    draw = random.Random(seed)
    placement = draw.choice(PLACEMENTS)
    costs = [UnitCost(draw.randint(1, 20), draw.randint(1, 9)) for _ in range(draw.randint(len(placement), len(placement) + 5))]
    every = list(itertools.combinations(range(1, len(costs)), len(placement) - 1))
    taken = {starts: draw.random() for starts in every}

    def fits(starts: tuple[int, ...], limit: float) -> bool:
        sizes = [0.0] * len(placement)
        for chunk, (begin, end) in enumerate(itertools.pairwise((0, *starts, len(costs)))):
            sizes[placement[chunk]] += sum(cost.lasting_bytes for cost in costs[begin:end])
        return max(sizes) <= limit

    plain = balance(costs, placement)
    limit = draw.choice([float("inf"), max(plain.bytes)])
    first, found = (
        balance(costs, placement, limit_bytes=limit),
        balance(costs, placement, limit_bytes=limit, makespan=taken.__getitem__),
    )
    assert taken[found.starts] <= taken[first.starts] and fits(found.starts, limit)
    for other in every:
        if sum(abs(a - b) for a, b in zip(other, found.starts, strict=True)) == 1 and fits(other, limit):
            assert taken[found.starts] <= taken[other]
