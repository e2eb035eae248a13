"""The flat form says all that a plan says: carried out by an interpreter that knows integers only, it agrees with numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helixrt.native.flat import FIELDS, LAST, ON_ARRIVAL, RECEIVE, REDUCE, TWICE, flatten
from helixrt.protocol.collective.algorithms import choice
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Copy, Plan, Receive, Reduce, Region, Send, Space
from tests.native.flat_run import Numbers, run_flat

ELEMENT = 8
COUNTS = (0, 1, 9, 100, 257)
TUNINGS = {  # each has an algorithm for every length
    "direct": Tuning(128, 2, 64, direct_bytes=1 << 30),
    "two-step": Tuning(128, 2, 64, direct_bytes=0),
    "halving": Tuning(128, 2, 64, direct_bytes=0, two_step_bytes=0),
    "ring": Tuning(128, 2, 64, direct_bytes=0, two_step_bytes=0, halving_bytes=0),
}
CASES = {f"{size}-{name}": (size, tuning) for size in (1, 2, 3, 4, 5, 8) for name, tuning in TUNINGS.items()}
cases = pytest.mark.parametrize(("size", "tuning"), CASES.values(), ids=CASES)


def numbers(rank: int, count: int) -> Numbers:
    return np.array([1.0 + (rank * 7919 + i * 104729) % 9973 for i in range(count)])


def empty(count: int) -> Numbers:
    return np.full(count, np.nan)


def run(plans: list[Plan], sources: list[Numbers], outs: list[Numbers], seed: int) -> None:
    run_flat([flatten(plan) for plan in plans], sources, outs, seed)


@cases
@pytest.mark.parametrize("on_arrival", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_is_a_mean(size: int, tuning: Tuning, on_arrival: bool, in_place: bool) -> None:
    for seed, count in enumerate(COUNTS):
        plans = [choice.all_reduce(r, size, count * ELEMENT, ELEMENT, tuning, in_place, on_arrival) for r in range(size)]
        sources = [numbers(r, count) for r in range(size)]
        expected = sum(sources, np.zeros(count)) / size
        outs = sources if in_place else [empty(count) for _ in range(size)]
        run(plans, sources, outs, seed)
        for out in outs:
            np.testing.assert_array_equal(out, expected)


@cases
@pytest.mark.parametrize("on_arrival", [False, True])
def test_reduce_scatter(size: int, tuning: Tuning, on_arrival: bool) -> None:
    for seed, scale in enumerate((0, 1, 30)):
        counts = [scale * (3 * r % 5) + r % 2 for r in range(size)]
        lengths = [n * ELEMENT for n in counts]
        plans = [choice.reduce_scatter(r, lengths, ELEMENT, tuning, False, on_arrival) for r in range(size)]
        sources = [numbers(r, sum(counts)) for r in range(size)]
        outs = [empty(n) for n in counts]
        run(plans, sources, outs, seed)
        mean = sum(sources, np.zeros(sum(counts))) / size
        for out, expected in zip(outs, np.split(mean, np.cumsum(counts)[:-1]), strict=True):
            np.testing.assert_array_equal(out, expected)


@cases
@pytest.mark.parametrize("in_place", [False, True])
def test_all_gather(size: int, tuning: Tuning, in_place: bool) -> None:
    for seed, scale in enumerate((0, 1, 30)):
        counts = [scale * (3 * r % 5) + r % 2 for r in range(size)]
        begins = [0, *np.cumsum(counts)]
        plans = [choice.all_gather(r, [n * ELEMENT for n in counts], ELEMENT, tuning, in_place) for r in range(size)]
        expected = np.concatenate([numbers(r, n) for r, n in enumerate(counts)])
        outs = [empty(sum(counts)) for _ in range(size)]
        sources = [out[begins[r] : begins[r + 1]] if in_place else empty(counts[r]) for r, out in enumerate(outs)]
        for r, source in enumerate(sources):
            source[:] = numbers(r, counts[r])
        run(plans, sources, outs, seed)
        for out in outs:
            np.testing.assert_array_equal(out, expected)


@cases
@pytest.mark.parametrize("in_place", [False, True])
def test_broadcast(size: int, tuning: Tuning, in_place: bool) -> None:
    for root, count in itertools.product({0, size - 1}, COUNTS):
        plans = [choice.broadcast(r, size, root, count * ELEMENT, ELEMENT, tuning, in_place) for r in range(size)]
        sources = [numbers(r, count) for r in range(size)]
        outs = sources if in_place else [empty(count) for _ in range(size)]
        run(plans, sources, outs, root + count)
        for out in outs:
            np.testing.assert_array_equal(out, numbers(root, count))


@cases
def test_reduce(size: int, tuning: Tuning) -> None:
    for root, count in itertools.product({0, size - 1}, COUNTS):
        plans = [choice.reduce(r, size, root, count * ELEMENT, ELEMENT, tuning) for r in range(size)]
        sources, outs = [numbers(r, count) for r in range(size)], [empty(count) for _ in range(size)]
        expected = sum(sources, np.zeros(count)) / size
        run(plans, sources, outs, root + count)
        np.testing.assert_array_equal(outs[root], expected)


def test_every_field_of_every_kind_of_node() -> None:
    a, b, c, d = Region(Space.SOURCE, 1, 24), Region(Space.OUT, 2, 24), Region(Space.SCRATCH, 3, 24), Region(Space.OUT, 4, 24)
    nodes = (
        Send(3, 0, a),
        Receive(2, 0, b),
        Receive(2, 1, b, c, True),
        Reduce(a, c, (b,)),
        Reduce(a, c, (b, d), True),
        Copy(a, b),
    )
    flat = flatten(Plan(nodes, ((), (0,), (0, 1), (), (3,), (2, 4)), 27))
    none = (0, 0)
    rows = [
        (0, 3, 0, 0, 24, *(0, 1), *none, *none, *none),
        (1, 2, 0, 0, 24, *(1, 2), *none, *none, *none),
        (1, 2, 1, ON_ARRIVAL | LAST, 24, *(1, 2), *(2, 3), *none, *none),
        (2, 0, 0, 0, 24, *(1, 2), *(0, 1), *(2, 3), *none),
        (2, 0, 0, TWICE | LAST, 24, *(1, 2), *(0, 1), *(2, 3), *(1, 4)),
        (3, 0, 0, 0, 24, *(1, 2), *none, *(0, 1), *none),
    ]
    assert [tuple(flat.nodes[i * FIELDS : (i + 1) * FIELDS]) for i in range(flat.count)] == rows
    assert list(flat.after) == [0, 0, 1, 3, 2, 4] and list(flat.after_begin) == [0, 0, 1, 3, 3, 4, 6]
    assert flat.scratch_bytes == 27


def test_no_nodes() -> None:
    flat = flatten(Plan((), ()))
    assert flat.count == 0 and not flat.nodes and list(flat.after_begin) == [0]


def test_the_algorithms_use_every_flag() -> None:
    """Else the tests above do not show that flags are carried over."""
    found = set()
    for size, tuning in CASES.values():
        for on_arrival in (False, True):
            flat = flatten(choice.all_reduce(0, size, 100 * ELEMENT, ELEMENT, tuning, False, on_arrival))
            found |= {(flat.nodes[i], flat.nodes[i + 3]) for i in range(0, len(flat.nodes), FIELDS)}
    assert {(RECEIVE, ON_ARRIVAL), (RECEIVE, ON_ARRIVAL | LAST), (REDUCE, 0), (REDUCE, LAST)} <= found
