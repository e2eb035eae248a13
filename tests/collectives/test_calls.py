"""Ranks that call different collectives are told so, with both calls by name; no sum of theirs is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helixrt.collectives.communicator import Communicator
from helixrt.collectives.endpoints import Reach, open_endpoint
from helixrt.collectives.handle import CollectiveError
from helixrt.collectives.operations import Collectives, How
from helixrt.collectives.reduction import Op, Reduction

DEADLINE_S = 60.0
SHORT, LONG = 64, 200_000  # elements: without a credit and with
HOW = How(DEADLINE_S)
Call = Callable[[Collectives, int], Any]


@contextmanager
def group(transport: str, size: int) -> Iterator[list[Collectives]]:
    reach = Reach(transport=transport)
    ranks = [Collectives(Communicator(open_endpoint(b"a secret", "127.0.0.1", reach), name=f"rank {r}")) for r in range(size)]
    addresses = {r: rank.communicator.address for r, rank in enumerate(ranks)}
    with ThreadPoolExecutor(size) as pool:

        def configure(me: int) -> None:
            ranks[me].communicator.begin()
            peers = {r: address for r, address in addresses.items() if r != me}
            ranks[me].communicator.configure(1, me, peers, DEADLINE_S)

        list(pool.map(configure, range(size)))
    yield ranks
    for rank in ranks:
        rank.communicator.close()


@pytest.fixture(params=["tcp", "shared_memory"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two(transport: str) -> Iterator[list[Collectives]]:
    with group(transport, 2) as ranks:
        yield ranks


def all_reduce(dtype: torch.dtype = torch.float32, op: Op = Op.SUM, divisor: int = 1, longer: int = 0) -> Call:
    def call(calls: Collectives, length: int) -> Any:
        value = torch.ones(length + longer).to(dtype)
        return calls.all_reduce(value, value, Reduction(op, divisor), HOW)

    return call


def all_gather(calls: Collectives, length: int) -> Any:
    return calls.all_gather(torch.ones(length), torch.zeros(2 * length), [length, length], HOW)


def reduce_scatter(calls: Collectives, length: int) -> Any:
    return calls.reduce_scatter(torch.ones(2 * length), torch.zeros(length), [length, length], Reduction(Op.SUM), HOW)


def broadcast(root: int) -> Call:
    return lambda calls, length: calls.broadcast(torch.ones(length), root, HOW)


def barrier(calls: Collectives, length: int) -> Any:
    return calls.barrier(HOW)


def twice(calls: Collectives, length: int) -> Any:
    """Its second call is the other rank's first."""
    calls.barrier(HOW)
    return all_reduce()(calls, length)


DIFFERENT: list[tuple[Call, Call, str, str]] = [
    (all_reduce(), all_gather, "all-reduce of float32 by sum", "all-gather of float32"),
    (all_reduce(), reduce_scatter, "all-reduce of float32 by sum", "reduce-scatter of float32 by sum"),
    (all_reduce(), all_reduce(torch.int32), "all-reduce of float32 by sum", "all-reduce of int32 by sum"),
    (all_reduce(), all_reduce(op=Op.MAX), "all-reduce of float32 by sum", "all-reduce of float32 by max"),
    (all_reduce(), all_reduce(divisor=2), "all-reduce of float32 by sum", "all-reduce of float32 by mean"),
    (all_reduce(), all_reduce(longer=2), "all-reduce of float32 by sum", "of other sizes"),
    (all_reduce(), barrier, "all-reduce of float32 by sum", "barrier"),
    (all_reduce(), twice, "all-reduce of float32 by sum", "barrier"),
    (all_reduce(), broadcast(0), "all-reduce of float32 by sum", "broadcast of float32"),
]


@pytest.mark.grid
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize(("one", "other", "first", "second"), DIFFERENT, ids=[f"{a} {b}" for _, _, a, b in DIFFERENT])
@pytest.mark.parametrize("later", [0, 1])
def test_different_calls_end_both_ranks_and_both_errors_name_both(
    two: list[Collectives], one: Call, other: Call, first: str, second: str, length: int, later: int
) -> None:
    """Whoever calls first, and also after collectives that agree."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda calls: all_reduce()(calls, length).wait(), two))
    handles = [one(two[0], length)] if not later else []
    handles.append(other(two[1], length))
    if later:
        handles.append(one(two[0], length))
    for handle in handles:
        with pytest.raises(CollectiveError) as raised:
            assert handle.wait(DEADLINE_S / 2), "it goes on"
        assert first in str(raised.value) and second in str(raised.value)
        assert "collective 1 " in str(raised.value)


def gather(root: int) -> Call:
    def call(calls: Collectives, length: int) -> Any:
        size = calls.communicator.size
        return calls.gather(torch.ones(length), torch.zeros(size * length), root, [length] * size, HOW)

    return call


def scatter(root: int) -> Call:
    def call(calls: Collectives, length: int) -> Any:
        size = calls.communicator.size
        return calls.scatter(torch.ones(size * length), torch.zeros(length), root, [length] * size, HOW)

    return call


def reduce(root: int) -> Call:
    return lambda calls, length: calls.reduce(torch.ones(length), torch.zeros(length), root, Reduction(Op.SUM), HOW)


ROOTED = {"broadcast": broadcast, "gather": gather, "scatter": scatter, "reduce": reduce}
ROOTS = {"all send": (0, 1), "all receive": (1, 0)}  # of a broadcast; who sends in a gather receives here


@pytest.mark.grid
@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("roots", ROOTS.values(), ids=ROOTS.keys())
@pytest.mark.parametrize("name", ROOTED)
def test_different_roots_are_an_error_though_nothing_may_be_sent(
    two: list[Collectives], name: str, roots: tuple[int, int], length: int
) -> None:
    """Each rank waits for the other one, and no message travels that could be compared."""
    handles = [ROOTED[name](root)(calls, length) for root, calls in zip(roots, two, strict=True)]
    if length == SHORT and name in ("broadcast", "scatter") and roots == (0, 1):  # sent without being asked for, and done
        handles += [all_reduce()(calls, length) for calls in two]
    if length == SHORT and name in ("gather", "reduce") and roots == (1, 0):
        handles += [all_reduce()(calls, length) for calls in two]
    errors = []
    for handle in handles:
        try:
            handle.wait(DEADLINE_S / 2)
        except CollectiveError as error:
            errors.append(str(error))
    assert len(errors) >= 2 and all(f"is {name} of float32" in error and "another root" in error for error in errors), errors


@pytest.mark.parametrize("odd", range(4))
def test_one_rank_of_several_with_another_root_is_an_error_on_all(transport: str, odd: int) -> None:
    """Also on links over which only one of the two ranks has anything to send."""
    with group(transport, 4) as ranks:
        root = (odd + 1) % 4
        handles = [broadcast(odd if rank == odd else root)(calls, LONG) for rank, calls in enumerate(ranks)]
        with pytest.raises(CollectiveError, match="another root"):
            assert handles[odd].wait(DEADLINE_S / 2), "it goes on"
        for handle in (all_reduce()(calls, LONG) for calls in ranks):
            with pytest.raises(CollectiveError, match="another root"):
                assert handle.wait(DEADLINE_S / 2), "it goes on"


def test_calls_that_agree_may_differ_in_what_is_a_ranks_own(two: list[Collectives]) -> None:
    """In place or not, and what an all-to-all gives to whom."""
    values = [torch.ones(LONG), torch.ones(LONG)]
    outs = [values[0], torch.zeros(LONG)]
    handles = [two[r].all_reduce(values[r], outs[r], Reduction(Op.SUM), HOW) for r in range(2)]
    given = [torch.arange(3.0), torch.arange(5.0)]
    taken = [torch.zeros(3), torch.zeros(5)]
    handles.append(two[0].all_to_all(given[0], taken[0], [1, 2], [1, 2], HOW))
    handles.append(two[1].all_to_all(given[1], taken[1], [2, 3], [2, 3], HOW))
    assert all(handle.wait(DEADLINE_S) for handle in handles)
    assert all(torch.equal(out, torch.full((LONG,), 2.0)) for out in outs)
    assert taken[0].tolist() == [0, 0, 1] and taken[1].tolist() == [1, 2, 2, 3, 4]
