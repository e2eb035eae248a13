"""Plans of all collectives: proved by `plan_check`, and executed on bytes against plain sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from helixrt.emulate.plans import ELEMENT
from helixrt.errors import ConfigError
from helixrt.protocol.collective.algorithms import chain, choice, direct, halving, ring
from helixrt.protocol.collective.algorithms.choice import Algorithm, choose
from helixrt.protocol.collective.algorithms.layout import Tuning, grid_of_blocks, grid_of_whole
from helixrt.protocol.collective.plan import Copy, Plan, Receive, Reduce, Region, Send, Space
from tests.protocol.plan_check import PlanError, check
from tests.protocol.run_plans import run_plans

SMALL = Tuning(chunk_bytes=128, chunks=2, least_chunk_bytes=64, direct_bytes=0, two_step_bytes=0, halving_bytes=0)
LENGTHS = (0, 1, 7, 8, 9, 33, 100, 257)  # elements: none, fewer than ranks, odd, several partitions
"""With SMALL and 8-byte elements, 257 elements over 2 ranks are five partitions."""


def numbers(rank: int, count: int) -> list[int]:
    return [1 + (rank * 7919 + i * 104729) % 9973 for i in range(count)]


def sums(sources: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*sources, strict=True)]


def verify(
    plans: Sequence[Plan],
    sources: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int] | None],
    shift: Sequence[int] | None,
    out_counts: Sequence[int],
) -> None:
    """Check, execute in two random orders, compare; SOURCE is preserved unless it is OUT."""
    source_bytes, out_bytes = [len(s) * ELEMENT for s in sources], [n * ELEMENT for n in out_counts]
    check(plans, source_bytes, out_bytes, shift)
    for seed, window in ((0, 0), (1, 1 << 30)):
        memories = run_plans(plans, sources, out_bytes, seed, window, shift)
        for rank, memory in enumerate(memories):
            if expected[rank] is not None:
                assert memory.numbers() == list(expected[rank] or ())
            if shift is None:
                assert bytes(memory.source) == memory.given


AllReduce = Callable[[int, int, int, int, Tuning, bool], Plan]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        *((ring.ring_all_reduce, n) for n in (1, 2, 3, 4, 5, 8)),
        *((direct.direct_all_reduce, n) for n in (1, 2, 3, 4, 5, 8)),
        *((direct.two_step_all_reduce, n) for n in (1, 2, 3, 4, 5, 8)),
        *((halving.halving_all_reduce, n) for n in (1, 2, 4, 8, 16)),
        *((partial(ring.ring_all_reduce, on_arrival=True), n) for n in (1, 2, 3, 4, 5, 8)),
        *((partial(halving.halving_all_reduce, on_arrival=True), n) for n in (1, 2, 4, 8, 16)),
    ],
)
def test_all_reduce(size: int, algorithm: AllReduce, in_place: bool) -> None:
    for count in LENGTHS:
        plans = [algorithm(rank, size, count * ELEMENT, ELEMENT, SMALL, in_place) for rank in range(size)]
        sources = [numbers(rank, count) for rank in range(size)]
        verify(plans, sources, [sums(sources)] * size, [0] * size if in_place else None, [count] * size)
        # every element is divided once by whoever makes its total, if there is anything to reduce
        lasts = [sum(n.left.length for n in p.nodes if isinstance(n, Reduce | Receive) and n.left and n.last) for p in plans]
        once = size if algorithm is direct.direct_all_reduce else 1
        assert sum(lasts) == (count * ELEMENT * once if size > 1 else 0)


def uneven(size: int, scale: int) -> list[int]:
    return [scale * (3 * r % 5) + r % 2 for r in range(size)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "algorithm",
    [ring.ring_reduce_scatter, partial(ring.ring_reduce_scatter, on_arrival=True), direct.direct_reduce_scatter],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_reduce_scatter(size: int, algorithm: Callable[..., Plan], in_place: bool) -> None:
    for counts in ([0] * size, [1] * size, [40] * size, uneven(size, 5), uneven(size, 30)):
        begins = [sum(counts[:r]) for r in range(size)]
        lengths = [c * ELEMENT for c in counts]
        plans = [algorithm(rank, lengths, ELEMENT, SMALL, in_place) for rank in range(size)]
        sources = [numbers(rank, sum(counts)) for rank in range(size)]
        total = sums(sources)
        expected = [total[b : b + c] for b, c in zip(begins, counts, strict=True)]
        verify(plans, sources, expected, [b * ELEMENT for b in begins] if in_place else None, counts)
        assert all(n.last or n.into[0].space is Space.SCRATCH for p in plans for n in p.nodes if isinstance(n, Reduce))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("algorithm", [ring.ring_all_gather, direct.direct_all_gather, choice.all_gather])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_gather(size: int, algorithm: Callable[..., Plan], in_place: bool) -> None:
    for counts in ([0] * size, [1] * size, [40] * size, uneven(size, 5), uneven(size, 30)):
        begins = [sum(counts[:r]) for r in range(size)]
        lengths = [c * ELEMENT for c in counts]
        plans = [algorithm(rank, lengths, ELEMENT, SMALL, in_place) for rank in range(size)]
        sources = [numbers(rank, c) for rank, c in enumerate(counts)]
        everything = [n for s in sources for n in s]
        shift = [-b * ELEMENT for b in begins] if in_place else None
        verify(plans, sources, [everything] * size, shift, [sum(counts)] * size)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_rooted(size: int, in_place: bool) -> None:
    """Broadcast, reduce, gather and scatter, from and to every root."""
    for root in {0, size // 2, size - 1}:
        for count in (0, 3, 100):
            sources = [numbers(rank, count) for rank in range(size)]
            for broadcast in (chain.chain_broadcast, direct.direct_broadcast):
                plans = [broadcast(r, size, root, count * ELEMENT, ELEMENT, SMALL, in_place) for r in range(size)]
                verify(plans, sources, [sources[root]] * size, [0] * size if in_place else None, [count] * size)
            for reduce in (chain.chain_reduce, direct.direct_reduce):
                plans = [reduce(r, size, root, count * ELEMENT, ELEMENT, SMALL, in_place) for r in range(size)]
                expected = [sums(sources) if r == root else None for r in range(size)]
                verify(plans, sources, expected, [0] * size if in_place else None, [count] * size)
        counts = uneven(size, 25)
        begins, lengths, total = [sum(counts[:r]) * ELEMENT for r in range(size)], [c * ELEMENT for c in counts], sum(counts)
        sources = [numbers(rank, c) for rank, c in enumerate(counts)]
        plans = [direct.gather(r, root, lengths, ELEMENT, SMALL, in_place) for r in range(size)]
        whole = [n for s in sources for n in s]
        expected = [whole if r == root else None for r in range(size)]
        out = [total if r == root else c for r, c in enumerate(counts)]
        verify(plans, sources, expected, [-begins[r] * (r == root) for r in range(size)] if in_place else None, out)
        plans = [direct.scatter(r, root, lengths, ELEMENT, SMALL, in_place) for r in range(size)]
        given = [numbers(9, total) if r == root else [0] * counts[r] for r in range(size)]
        parts = [numbers(9, total)[b // ELEMENT : b // ELEMENT + c] for b, c in zip(begins, counts, strict=True)]
        verify(plans, given, parts, [begins[r] * (r == root) for r in range(size)] if in_place else None, counts)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_to_all_with_splits(size: int) -> None:
    counts = [[(a * 5 + b * 3) % 7 * 9 for b in range(size)] for a in range(size)]  # [from][to]
    rows = [[c * ELEMENT for c in row] for row in counts]
    plans = [direct.all_to_all(r, rows[r], [row[r] for row in rows], ELEMENT, SMALL) for r in range(size)]
    sources = [numbers(r, sum(counts[r])) for r in range(size)]
    expected = [[n for a in range(size) for n in sources[a][sum(counts[a][:b]) : sum(counts[a][: b + 1])]] for b in range(size)]
    verify(plans, sources, expected, None, [len(e) for e in expected])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
def test_a_barrier_ends_nowhere_before_all_have_come(size: int) -> None:
    plans = [direct.barrier(r, size) for r in range(size)]
    check(plans, [0] * size, [0] * size)
    run_plans(plans, [[]] * size, [0] * size)
    for late in range(size):
        # without `late`, nobody ends: follow the messages that can still be delivered
        done = [[False] * len(p.nodes) for p in plans]
        moved = True
        while moved:
            moved = False
            for rank, plan in enumerate(plans):
                for number, node in enumerate(plan.nodes):
                    if rank == late or done[rank][number] or not all(done[rank][a] for a in plan.after[number]):
                        continue
                    if isinstance(node, Receive):
                        sent = plans[node.peer].index.sends[rank][node.index]
                        if not done[node.peer][sent]:
                            continue
                    done[rank][number] = moved = True
        assert all(not all(d) for rank, d in enumerate(done) if rank != late)


@pytest.mark.parametrize("count", [0, 1, 100])
def test_send_and_receive(count: int) -> None:
    length = count * ELEMENT
    plans = [direct.send_to(1, length, ELEMENT, SMALL), direct.receive_from(0, length, ELEMENT, SMALL)]
    verify(plans, [numbers(0, count), []], [None, numbers(0, count)], None, [0, count])
    assert len(plans[0].nodes) >= 1  # also of nothing


def test_choices_run_whatever_the_size() -> None:
    tuning = Tuning(chunk_bytes=256, chunks=2, least_chunk_bytes=64, direct_bytes=512, two_step_bytes=1024, halving_bytes=3000)
    for size in (2, 3, 4):
        for count in (1, 20, 60, 128, 129, 500):
            sources = [numbers(r, count) for r in range(size)]
            length = count * ELEMENT
            plans = [choice.all_reduce(r, size, length, ELEMENT, tuning) for r in range(size)]
            verify(plans, sources, [sums(sources)] * size, None, [count] * size)
            plans = [choice.reduce(r, size, 1, length, ELEMENT, tuning) for r in range(size)]
            verify(plans, sources, [sums(sources) if r == 1 else None for r in range(size)], None, [count] * size)
            plans = [choice.broadcast(r, size, 1, length, ELEMENT, tuning) for r in range(size)]
            verify(plans, sources, [sources[1]] * size, None, [count] * size)
            plans = [choice.reduce_scatter(r, [length] + [0] * (size - 1), ELEMENT, tuning) for r in range(size)]
            verify(plans, sources, [sums(sources)] + [[]] * (size - 1), None, [count] + [0] * (size - 1))


def test_thresholds() -> None:
    tuning = Tuning(direct_bytes=1000, two_step_bytes=4000, halving_bytes=8000)
    assert [choose(2, n, tuning) for n in (0, 1000, 1001, 4000)] == [Algorithm.DIRECT] * 2 + [Algorithm.RING] * 2
    assert [choose(5, n, tuning) for n in (250, 251, 4000, 4001)] == [
        Algorithm.DIRECT,
        Algorithm.TWO_STEP,
        Algorithm.TWO_STEP,
        Algorithm.RING,
    ]
    assert [choose(4, n, tuning) for n in (4000, 4001, 8000, 8001)] == [
        Algorithm.TWO_STEP,
        Algorithm.HALVING,
        Algorithm.HALVING,
        Algorithm.RING,
    ]


def test_halving_sends_no_more_than_the_ring_in_fewer_messages() -> None:
    length = 8 * 1024
    plans = [halving.halving_all_reduce(rank, 8, length, ELEMENT, Tuning()) for rank in range(8)]
    for plan in plans:
        sends = [node for node in plan.nodes if isinstance(node, Send)]
        assert sum(node.region.length for node in sends) == 2 * length * 7 // 8
        assert len(sends) == 6 and plan.scratch_bytes == length // 2


def test_summed_on_arrival_it_needs_no_scratch_and_each_rank_may_choose() -> None:
    count = 1000
    for algorithm in (ring.ring_all_reduce, halving.halving_all_reduce):
        plans = [algorithm(rank, 4, count * ELEMENT, ELEMENT, SMALL, on_arrival=rank % 2 == 0) for rank in range(4)]
        assert [plan.scratch_bytes > 0 for plan in plans] == [False, True, False, True]
        assert not any(isinstance(node, Reduce) for node in plans[0].nodes)
        sources = [numbers(rank, count) for rank in range(4)]
        verify(plans, sources, [sums(sources)] * 4, None, [count] * 4)


def test_partitions_and_chunks_keep_the_paper_s_bounds() -> None:
    chance = random.Random(3)
    for _ in range(300):
        element, size = chance.choice((1, 2, 4, 8, 12, 16)), chance.randint(2, 8)
        tuning = Tuning(chance.choice((192, 1000, 4096)), chance.randint(1, 5), chance.choice((1, 64, 500)))
        length = chance.randrange(60_000) * element
        unit = 192 if element == 12 else 64
        chunk = tuning.chunk_bytes // unit * unit
        for parts in grid_of_whole(length, size, tuning, unit):
            assert sum(c.length for part in parts for c in part) <= chunk * tuning.chunks * size
            assert all(c.length <= chunk and c.length % element == 0 for part in parts for c in part)
            assert all(len(part) <= tuning.chunks for part in parts)
        lengths = [chance.randrange(5000) * element for _ in range(size)]
        grid = grid_of_blocks(lengths, tuning, unit)
        assert all(c.length <= chunk for parts in grid for part in parts for c in part)
        for rank in range(size):
            cuts = [c for parts in grid for c in parts[rank]]
            assert [c.offset for c in cuts[1:]] == [c.offset + c.length for c in cuts[:-1]]
            assert (cuts[0].offset, sum(c.length for c in cuts)) == (sum(lengths[:rank]), lengths[rank])


def test_the_first_step_leaves_source_uncopied_and_scratch_is_bounded() -> None:
    plan = ring.ring_all_reduce(1, 4, 1 << 20, 4, SMALL)
    assert not any(isinstance(n, Copy) for n in plan.nodes)
    assert plan.scratch_bytes <= SMALL.chunk_bytes * SMALL.chunks
    first = next(n for n in plan.nodes if isinstance(n, Send))
    assert first.region.space is Space.SOURCE
    assert ring.ring_reduce_scatter(1, [1 << 18] * 4, 4, SMALL).scratch_bytes <= 2 * SMALL.chunk_bytes * SMALL.chunks


def test_the_next_partition_begins_without_waiting_for_the_last_one_to_end() -> None:
    """The first sends of a partition wait for nothing but their turn, so the link to the neighbour never idles."""
    plan = ring.ring_all_reduce(0, 4, 64 * 1024, 8, SMALL)
    from_source = [i for i, n in enumerate(plan.nodes) if isinstance(n, Send) and n.region.space is Space.SOURCE]
    assert len(from_source) >= 10 and all(plan.after[i] == () for i in from_source)


# ---------------------------------------------------------------- the checker finds what is wrong


def altered(plan: Plan, number: int, **changes: object) -> Plan:
    nodes = list(plan.nodes)
    nodes[number] = replace(nodes[number], **changes)  # type: ignore[arg-type]
    return Plan(tuple(nodes), plan.after, plan.scratch_bytes)


def without(plan: Plan, number: int) -> Plan:
    after = list(plan.after)
    after[number] = ()
    return Plan(plan.nodes, tuple(after), plan.scratch_bytes)


def rings(size: int = 3, count: int = 100, in_place: bool = False) -> list[Plan]:
    return [ring.ring_all_reduce(r, size, count * ELEMENT, ELEMENT, SMALL, in_place) for r in range(size)]


def test_check_finds_a_missing_dependency_of_any_node() -> None:
    for in_place in (False, True):
        plans = rings(in_place=in_place)
        shift = [0] * 3 if in_place else None
        size = [800] * 3
        check(plans, size, size, shift)
        depending = [n for n, after in enumerate(plans[1].after) if after]
        assert len(depending) > 20
        for number in depending:
            with pytest.raises(PlanError, match="may touch the same bytes"):
                check([plans[0], without(plans[1], number), plans[2]], size, size, shift)


def test_check_finds_that_a_plan_is_not_for_shared_memory() -> None:
    plans = [direct.direct_all_reduce(rank, 3, 800, ELEMENT, SMALL) for rank in range(3)]
    check(plans, [800] * 3, [800] * 3)
    with pytest.raises(PlanError, match="may touch the same bytes"):
        check(plans, [800] * 3, [800] * 3, [0] * 3)


def test_check_takes_the_order_that_messages_make_and_no_other() -> None:
    """An answer may replace what was sent, and only an answer."""
    here, there = Region(Space.OUT, 0, 8), Region(Space.OUT, 0, 8)
    asks = Plan((Send(1, 0, here), Receive(1, 0, here)), ((), ()))
    answers = Plan((Receive(0, 0, there), Send(0, 0, there)), ((), (0,)))
    check([asks, answers], [0, 0], [8, 8])
    speaks = Plan((Receive(0, 0, Region(Space.OUT, 8, 8)), Send(0, 0, there)), ((), ()))
    with pytest.raises(PlanError, match="rank 0: nodes 0 and 1 may touch the same bytes"):
        check([asks, speaks], [0, 0], [8, 16])


def test_check_finds_messages_that_do_not_match() -> None:
    plans = rings()
    number = next(i for i, n in enumerate(plans[0].nodes) if isinstance(n, Send))
    region = plans[0].nodes[number].region  # type: ignore[union-attr]
    shorter = altered(plans[0], number, region=Region(region.space, region.offset, region.length - 8))
    with pytest.raises(PlanError, match="bytes are sent"):
        check([shorter, *plans[1:]], [800] * 3, [800] * 3)
    with pytest.raises(PlanError, match="None received"):
        check([plans[0], Plan((), ()), plans[2]], [800] * 3, [800] * 3)


def test_check_finds_regions_outside_and_writes_to_source() -> None:
    with pytest.raises(PlanError, match="outside"):
        check(rings(), [800] * 3, [792] * 3)
    bad = Plan((Copy(Region(Space.OUT, 0, 8), Region(Space.SOURCE, 0, 8)),), ((),))
    with pytest.raises(PlanError, match="writes SOURCE"):
        check([bad], [8], [8])


def test_check_finds_a_deadlock_of_credits() -> None:
    """Each lets its neighbour in only when it was let in itself."""
    region = Region(Space.SCRATCH, 0, 0)
    plans = [Plan((Send(1 - r, 0, region), Receive(1 - r, 0, region)), ((), (0,))) for r in range(2)]
    with pytest.raises(PlanError, match="wait for one another"):
        check(plans, [0, 0], [0, 0])


def test_check_finds_a_deadlock_of_the_window() -> None:
    """Rank 0's first message waits for an answer to its second, and messages go in the order of their index."""
    a, b = Region(Space.OUT, 0, 8), Region(Space.OUT, 8, 8)
    sender = Plan((Send(1, 0, Region(Space.SOURCE, 0, 8)), Send(1, 1, Region(Space.SOURCE, 8, 8))), ((), ()))
    echo = Plan((Receive(0, 0, a), Receive(0, 1, b)), ((), ()))
    check([sender, echo], [16, 0], [0, 16])
    crossed = Plan((Receive(1, 0, a), Send(1, 0, a), Send(1, 1, b)), ((), (0,), ()))
    waiting = Plan((Receive(0, 0, a), Receive(0, 1, b), Send(0, 0, b)), ((), (), (1,)))
    with pytest.raises(PlanError, match="wait for one another"):
        check([crossed, waiting], [0, 0], [16, 16])


def test_wrong_tuning_is_one_line() -> None:
    with pytest.raises(ConfigError, match="tuning.chunks=0: must be at least 1"):
        Tuning(chunks=0)
    with pytest.raises(ConfigError, match="tuning.direct_bytes=-1: must not be negative"):
        Tuning(direct_bytes=-1)
