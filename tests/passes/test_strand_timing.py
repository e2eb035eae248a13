"""The lane model: what runs when, by hand-made cases whose times can be told by thinking."""

from __future__ import annotations

import random

import pytest

from helixrt.passes.errors import VerifyError
from helixrt.passes.operators import Kind, Operator, Overlap
from helixrt.passes.timing import bound_us, simulate
from tests.passes.strand_pairs import even

PERFECT = even(1.0)


def compute(time: float, *needs: int) -> Operator:
    return Operator(f"c{time}", Kind.COMPUTE, time, needs)


def send(time: float, *needs: int, kind: Kind = Kind.INTRA, host: float = 0.0) -> Operator:
    return Operator(f"s{time}", kind, time, needs, host_us=host)


def wait(*needs: int) -> Operator:
    return Operator("wait", Kind.WAIT, 0.0, needs)


def total(operators: list[Operator], overlap: Overlap = PERFECT) -> float:
    return simulate((operators,), [(0, index) for index in range(len(operators))], overlap).total_us


def test_a_collective_hides_behind_compute() -> None:
    assert total([send(5.0), compute(3.0), wait(0), compute(1.0, 2)]) == 6.0
    assert total([send(5.0), compute(8.0), wait(0), compute(1.0, 2)]) == 9.0


def test_one_lane_is_in_order_and_two_run_side_by_side() -> None:
    assert total([send(5.0), send(4.0), wait(0), wait(1)]) == 9.0
    assert total([send(5.0), send(4.0, kind=Kind.INTER), wait(0), wait(1)]) == 5.0


def test_a_collective_nobody_waits_for_still_ends() -> None:
    assert total([compute(1.0), send(5.0, 0)]) == 6.0


def test_launching_keeps_the_processor() -> None:
    assert total([send(5.0, host=2.0), compute(4.0), wait(0)]) == 6.0
    assert total([send(5.0, host=2.0), wait(0)]) == 5.0


@pytest.mark.parametrize("factor", (1.0, 0.5, 0.0, -0.4))
def test_two_started_together_take_what_equation_one_says(factor: float) -> None:
    overlap = even(factor)
    for first, second in ((4.0, 7.0), (7.0, 4.0), (5.0, 5.0)):
        one, other = compute(first), send(second)
        assert total([other, one, wait(0)], overlap) == pytest.approx(first + second - factor * min(first, second))


def test_slow_overlap_ends_where_the_collective_does() -> None:
    # 4 us of each proceed together at half speed in 8 us; then 6 us of compute are left.
    assert total([send(4.0), compute(10.0), wait(0)], even(0.0)) == pytest.approx(14.0)


def test_lanes_slow_each_other_while_the_processor_waits() -> None:
    overlap = even(0.5)
    assert total([send(4.0), send(4.0, kind=Kind.INTER), wait(0), wait(1)], overlap) == pytest.approx(6.0)


def test_bad_orders_are_named() -> None:
    strands = ([compute(1.0), compute(2.0, 0)],)
    with pytest.raises(VerifyError, match="c2.0 is issued before c1.0"):
        simulate(strands, [(0, 1), (0, 0)], PERFECT)
    with pytest.raises(VerifyError, match="c2.0 is never issued"):
        simulate(strands, [(0, 0)], PERFECT)
    with pytest.raises(VerifyError, match="c1.0 is issued twice"):
        simulate(strands, [(0, 0), (0, 0)], PERFECT)
    with pytest.raises(VerifyError, match="none of what it takes in is a collective"):
        total([compute(1.0), wait(0)])


@pytest.mark.parametrize("seed", range(30))
def test_no_order_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    overlap = even(rng.choice((1.0, 0.8, 0.5, 0.2, -0.2)))
    operators: list[Operator] = []
    for _ in range(10):
        needs = tuple(n for n in range(len(operators)) if rng.random() < 0.15 and operators[n].kind is not Kind.INTRA
                      and operators[n].kind is not Kind.INTER)  # fmt: skip
        if rng.random() < 0.4:
            kind = rng.choice((Kind.INTRA, Kind.INTER))
            operators.append(send(rng.randint(1, 9), *needs, kind=kind, host=rng.randint(0, 1)))
            operators.append(wait(len(operators) - 1))
        else:
            operators.append(compute(rng.randint(1, 9), *needs))
    for _ in range(10):
        order: list[int] = []
        while len(order) < len(operators):
            ready = [n for n, o in enumerate(operators) if n not in order and set(o.needs) <= set(order)]
            order.append(rng.choice(ready))
        time = simulate((operators,), [(0, index) for index in order], overlap).total_us
        assert time >= bound_us((operators,), overlap) - 1e-9, f"seed {seed}"
