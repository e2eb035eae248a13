"""Pairing: against every order there is of small strands, against simpler policies, and in what it promises."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from helixrt.errors import ConfigError
from helixrt.passes.baselines import BASELINES
from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap
from helixrt.passes.pair import CLOSE, Pairing, Rules, baseline, pair
from helixrt.passes.search import Problem, issue_order, search
from helixrt.passes.segment import segments, steps
from helixrt.passes.sequence import candidates, captured, layer_ranks
from helixrt.passes.timing import Place, Slowdowns, bound_us, check_order, collective_of, simulate, work_us
from tests.passes.strand_pairs import Make, even, transformer

PERFECT = even(1.0)
RATIOS = (0.25, 0.5, 1.0)


def random_strand(seed: int, layers: int = 2, *, backwards: bool = False) -> tuple[Operator, ...]:
    """A chain of compute and collectives, with movable operators beside it. Whole microseconds, so sums are exact."""
    rng = random.Random(seed)
    made: list[Operator] = []
    last: tuple[int, ...] = ()
    for layer in range(layers - 1, -1, -1) if backwards else range(layers):

        def add(
            kind: Kind, time: float, needs: tuple[int, ...], movable: bool = False, host: float = 0.0, at: int = layer
        ) -> int:
            made.append(Operator(f"{kind.name}{len(made)}", kind, time, needs, f"{kind}{time}", host, movable, layer=at))
            return len(made) - 1

        before = add(Kind.COMPUTE, rng.randint(1, 6), last)
        last = (before,)
        if rng.random() < 0.8:
            lane = rng.choice((Kind.INTRA, Kind.INTER))
            launch = add(lane, rng.randint(1, 9), last, host=rng.randint(0, 1))
            last = (add(Kind.WAIT, 0.0, (launch,)),)
            last = (add(Kind.COMPUTE, rng.randint(1, 4), last),)
        if rng.random() < 0.6:
            add(Kind.COMPUTE, rng.randint(1, 5), (before,), movable=True)
    return tuple(made)


Strand = tuple[Operator, ...]


def layers_ahead(forward: Strand, backward: Strand, order: Sequence[tuple[int, int]]) -> int:
    """By how many layers the forward is at most ahead of what the backward has released, in an order of both
    ((strand, operator), strand 0 the forward). A layer is released when its last operator has been issued."""
    begun_by, ended_by = layer_ranks(forward), layer_ranks(backward)
    left = [0] * (max(ended_by, default=-1) + 1)
    for rank in ended_by:
        left[rank] += 1
    begun = released = most = 0
    for strand, index in order:
        if strand == 0:
            begun = max(begun, begun_by[index] + 1)
            if released < len(left):
                most = max(most, begun - released)
        else:
            left[ended_by[index]] -= 1
            while released < len(left) and not left[released]:
                released += 1
    return most


def random_pair(seed: int, forward: int = 2, backward: int = 2) -> tuple[Strand, Strand]:
    """By numbers of layers."""
    return random_strand(2 * seed, forward), random_strand(2 * seed + 1, backward, backwards=True)


def best_of_all(forward: Strand, backward: Strand, parts: list[tuple[tuple[int, ...], ...]] | None = None) -> float:
    """The shortest time of any issue order, under perfect overlap, by trying them all; shares no code with the search.

    With `parts` (fixed, deferred for each strand) fixed operators keep their order; deferred ones, and without `parts`
    all, go in any order that their needs, the memory rule and the backlog of one layer allow.
    """
    strands = forward, backward
    ranks = [layer_ranks(strand) for strand in strands]

    def may(strand: int, index: int, done: frozenset[Place]) -> bool:
        operators = strands[strand]
        if any((strand, need) not in done for need in operators[index].needs):
            return False
        if parts is not None and index in parts[strand][0]:
            before = parts[strand][0][: parts[strand][0].index(index)]
            if any((strand, other) not in done for other in before):
                return False
        if strand == 0:
            late = [rank for n, rank in enumerate(ranks[1]) if (1, n) not in done]
            return not late or ranks[0][index] <= min(late)
        movable = parts[1][1] if parts is not None else [n for n, o in enumerate(operators) if o.movable]
        return index in movable or all((1, n) in done or ranks[1][n] >= ranks[1][index] - 1 for n in movable)

    @cache
    def shortest(done: frozenset[Place], now: float, free: tuple[float, float], ends: tuple[tuple[Place, float], ...]) -> float:
        if len(done) == sum(map(len, strands)):
            return max(now, *free)
        best = float("inf")
        for strand, operators in enumerate(strands):
            for index, operator in enumerate(operators):
                if (strand, index) in done or not may(strand, index, done):
                    continue
                then, lanes, flying = now + work_us(operator), list(free), dict(ends)
                if operator.kind in COMMUNICATION:
                    lane = operator.kind is Kind.INTER
                    lanes[lane] = flying[strand, index] = max(now, free[lane]) + operator.time_us
                elif operator.kind is Kind.WAIT:
                    then = max(now, flying.pop((strand, collective_of(operators, index))))
                found = shortest(done | {(strand, index)}, then, (lanes[0], lanes[1]), tuple(sorted(flying.items())))
                best = min(best, found)
        return best

    return shortest(frozenset(), 0.0, (0.0, 0.0), ())


def exact(forward: Strand, backward: Strand, overlap: Overlap = PERFECT) -> tuple[float, list[Place]]:
    """The search that drops nothing but what is dominated, operator by operator."""
    cut = steps(captured(forward)), steps(captured(backward))
    problem = Problem(*cut, Slowdowns((forward, backward), overlap), ahead=1)
    found, tracks = search(problem, None, labels=None)
    return found, issue_order(problem, tracks)


def best_baseline_us(forward: Strand, backward: Strand, overlap: Overlap = PERFECT) -> float:
    """The time of the fastest of the simpler policies."""
    return min(baseline(policy, forward, backward, overlap).predicted_us for policy in BASELINES)


@cache
def paired(make: Make, ratio: float, layers: int = 6) -> Pairing:
    strands = transformer(layers, make, ratio)
    return pair(strands.forward, strands.backward, PERFECT, Rules(labels=10_000))


CASES = [
    *((seed, 1, 2) for seed in range(15)),
    *((seed, 2, 1) for seed in range(15)),
    *(pytest.param(seed, 2, 2, marks=pytest.mark.slow) for seed in range(40)),
]


@pytest.mark.parametrize("seed, layers_forward, layers_backward", CASES)
def test_unbounded_search_equals_brute_force(seed: int, layers_forward: int, layers_backward: int) -> None:
    forward, backward = random_pair(seed, layers_forward, layers_backward)
    found, order = exact(forward, backward)
    parts = [(line.fixed, line.deferred) for line in (captured(forward), captured(backward))]
    assert found == best_of_all(forward, backward, parts), f"seed {seed}"
    assert simulate((forward, backward), order, PERFECT).total_us == found
    assert found >= bound_us((forward, backward), PERFECT)


@pytest.mark.parametrize("layers, seeds", [(1, 15), pytest.param(2, 40, marks=pytest.mark.slow)])
def test_fixed_lines_lie_between_every_topological_order_and_the_simpler_policies(layers: int, seeds: int) -> None:
    """Never faster than the fastest order there is, and over all seeds nearer to it than the best simpler policy."""
    lost_us = lost_by_baselines_us = 0.0
    for seed in range(1000, 1000 + seeds):
        forward, backward = random_pair(seed, layers, 2)
        best_us = best_of_all(forward, backward)
        found_us = pair(forward, backward, PERFECT).predicted_us
        assert found_us >= best_us - 1e-9, f"seed {seed}"
        lost_us += found_us - best_us
        lost_by_baselines_us += best_baseline_us(forward, backward) - best_us
    print(f"lost {lost_us:.1f} us, by the best simpler policy {lost_by_baselines_us:.1f} us")
    assert lost_us < lost_by_baselines_us


@pytest.mark.parametrize("factor", (1.0, 0.7))
def test_pairing_is_nearer_to_the_unbounded_search_than_the_simpler_policies(factor: float) -> None:
    """The beam on coarse steps, with slowed overlap too, compared with the search that drops nothing."""
    lost_us = lost_by_baselines_us = 0.0
    for seed in range(15):
        forward, backward = random_pair(seed + 200, 3, 3)
        overlap = even(factor)
        best_us, _ = exact(forward, backward, overlap)
        lost_us += pair(forward, backward, overlap).predicted_us - best_us
        lost_by_baselines_us += best_baseline_us(forward, backward, overlap) - best_us
    print(f"factor {factor}: lost {lost_us:.1f} us, by the best simpler policy {lost_by_baselines_us:.1f} us")
    assert lost_us < lost_by_baselines_us


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("factor", (1.0, 0.6, -0.3))
def test_never_slower_than_any_policy_and_every_rule_kept(seed: int, factor: float) -> None:
    forward, backward = random_pair(seed + 300, 4, 4)
    overlap = even(factor)
    found = pair(forward, backward, overlap)
    for policy in BASELINES:
        other = baseline(policy, forward, backward, overlap)
        check_order((forward, backward), other.order)
        assert layers_ahead(forward, backward, other.order) <= 1, policy
        assert found.predicted_us <= other.predicted_us + 1e-9, policy
        assert other.predicted_us >= found.bound_us - 1e-9, policy
    check_order((forward, backward), found.order)
    assert layers_ahead(forward, backward, found.order) <= 1
    assert found.predicted_us <= found.sequential_us


@pytest.mark.parametrize("make", list(Make))
@pytest.mark.parametrize("ratio", RATIOS)
def test_transformers_hide_all_of_their_communication_or_more_than_by_any_simpler_policy(make: Make, ratio: float) -> None:
    found, strands = paired(make, ratio), transformer(6, make, ratio)
    print(f"{make} {ratio}: {found.policy} hides {found.hidden_share:.3f}")
    assert found.policy == "helix"
    assert found.predicted_us >= found.bound_us - 1e-6
    at_the_bound = found.predicted_us <= CLOSE * found.bound_us
    assert at_the_bound or found.predicted_us < best_baseline_us(strands.forward, strands.backward)
    assert found.hidden_us <= found.communication_us + 1e-6


def test_eighty_layers_come_close_to_the_bound() -> None:
    strands = transformer(80, Make.TENSOR, 1.0)
    found = pair(strands.forward, strands.backward, PERFECT, Rules(labels=20_000))
    # What is not hidden is at the ends, where the other strand has nothing left to hide behind: it does not grow with depth.
    assert found.predicted_us - found.bound_us <= 3 * found.sequential_us / 80
    assert layers_ahead(strands.forward, strands.backward, found.order) <= 1


def test_memory_rule_can_be_stricter() -> None:
    strands = transformer(5, Make.TENSOR, 0.5)
    for ahead in (0, 1, 2):
        found = pair(strands.forward, strands.backward, PERFECT, Rules(ahead=ahead))
        assert layers_ahead(strands.forward, strands.backward, found.order) <= ahead


def test_movable_operators_help_and_stay_within_their_backlog() -> None:
    strands = transformer(6, Make.TENSOR, 1.0)
    moved = pair(strands.forward, strands.backward, PERFECT, Rules(labels=10_000))
    kept = pair(strands.forward, strands.backward, PERFECT, Rules(labels=10_000, reorder=False))
    assert moved.predicted_us < kept.predicted_us
    done = set()
    for place in moved.order:
        done.add(place)
        if place[0] == 1:
            layer = strands.backward[place[1]].layer
            assert layer is not None
            late = [o.node for n, o in enumerate(strands.backward) if o.layer is not None and o.layer > layer + 1
                    and (1, n) not in done]  # fmt: skip
            assert not late


def test_lanes_side_by_side_help() -> None:
    strands = transformer(6, Make.EXPERTS, 1.0)
    both, alone = (
        pair(strands.forward, strands.backward, PERFECT, Rules(labels=10_000, cross=cross)) for cross in (True, False)
    )
    assert both.predicted_us < alone.predicted_us
    assert any(found.beside for found in both.pairs)


def test_pairs_account_for_every_stall() -> None:
    found = paired(Make.EXPERTS, 1.0)
    strands = transformer(6, Make.EXPERTS, 1.0)
    operators = strands.forward, strands.backward
    assert [p.collective for p in found.pairs] == [p for p in found.order if operators[p[0]][p[1]].kind in COMMUNICATION]
    stalls = sum(span.length_us for span in found.timing.processor if span.kind is Kind.WAIT)
    assert found.timing.stalled_us == pytest.approx(stalls)
    for hidden, span in zip(found.pairs, found.timing.network, strict=True):
        assert hidden.hidden_us + hidden.exposed_us == pytest.approx(span.length_us)
        assert all(operators[s][o].kind is Kind.COMPUTE for s, o in hidden.behind)
    assert any(p.behind and p.behind[0][0] != p.collective[0] for p in found.pairs)


@pytest.mark.parametrize("seed", range(20))
def test_lines_are_orders_with_early_launches_and_late_waits(seed: int) -> None:
    strand = random_strand(seed, layers=4, backwards=bool(seed % 2))
    for line in candidates(strand):
        check_order((strand,), [(0, index) for index in line.order])
        assert sorted((*line.fixed, *line.deferred)) == list(range(len(strand)))
        for at, index in enumerate(line.order):
            if strand[index].kind is Kind.WAIT and at + 1 < len(line.order):
                assert index in strand[line.order[at + 1]].needs or not any(index in o.needs for o in strand)
            if strand[index].kind in COMMUNICATION:
                assert line.order[at - 1] in strand[index].needs
        assert [index for piece in segments(line) for index in piece] == list(line.order)
        for grain in (0.0, 5.0):
            cut = steps(line, grain)
            assert [index for step in cut.fixed for index in step.operators] == list(line.fixed)
            assert [index for step in cut.deferred for index in step.operators] == list(line.deferred)


def test_segments_keep_a_collective_with_what_hides_it() -> None:
    strands = transformer(1, Make.TENSOR)
    pieces = segments(captured(strands.backward, reorder=False))
    sending = [piece for piece in pieces if any(strands.backward[index].kind in COMMUNICATION for index in piece)]
    assert len(sending) == 2
    for piece in sending:
        kinds = [strands.backward[index].kind for index in piece]
        assert kinds[0] in COMMUNICATION and kinds[-1] is Kind.WAIT and Kind.COMPUTE in kinds


def test_strands_of_any_shape() -> None:
    alone = (Operator("only", Kind.COMPUTE, 3.0),)
    assert pair(alone, (), PERFECT).predicted_us == 3.0
    assert pair((), (), PERFECT).order == ()
    unwaited = (Operator("a", Kind.COMPUTE, 1.0), Operator("send", Kind.INTER, 5.0, (0,)))
    assert pair(alone, unwaited, PERFECT).predicted_us == 6.0
    uneven = transformer(2, Make.TENSOR).forward, transformer(7, Make.TENSOR).backward
    found = pair(*uneven, PERFECT)
    assert layers_ahead(*uneven, found.order) <= 1
    reverse = transformer(7, Make.TENSOR).forward, transformer(2, Make.TENSOR).backward
    check_order(reverse, pair(*reverse, PERFECT).order)


def test_a_router_may_move_but_goes_before_its_dispatch() -> None:
    strands = transformer(3, Make.EXPERTS, 0.5)
    line = captured(strands.forward)
    assert {strands.forward[index].signature for index in line.deferred} == {"router"}
    check_order((strands.forward, strands.backward), pair(strands.forward, strands.backward, PERFECT).order)


def test_launches_that_keep_the_processor_count_as_work() -> None:
    strands = transformer(6, Make.TENSOR, 0.5, host=0.3)
    found = pair(strands.forward, strands.backward, PERFECT)
    work = sum(work_us(operator) for strand in (strands.forward, strands.backward) for operator in strand)
    assert found.bound_us >= work - 1e-6 and found.predicted_us >= work - 1e-6
    assert found.predicted_us < found.sequential_us


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="strands.ahead=-1"):
        Rules(ahead=-1)
    with pytest.raises(ConfigError, match="strands.policy=best"):
        baseline("best", (), (), PERFECT)
    with pytest.raises(ConfigError, match="layers=0"):
        transformer(0)


def test_same_input_same_order() -> None:
    strands = transformer(3, Make.SEQUENCE, 1.0)
    first, second = (pair(strands.forward, strands.backward, PERFECT, Rules(labels=3_000)) for _ in range(2))
    assert first.order == second.order
    assert all(collective_of(strands.forward, i) < i for i, o in enumerate(strands.forward) if o.kind is Kind.WAIT)
