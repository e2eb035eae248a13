"""The exact optimum against every schedule there is (tiny problems), and against the twelve optima of the issue."""

import itertools
import math
import random
import sys

import pytest

from helixrt.errors import ConfigError, MissingExtra
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.ir import Op, Operation, Pair, Schedule, ScheduleError, folded, linear, operations_of
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.bounds import lower_bound, smallest_memory
from helixrt.schedule.planner.instances import random_instance
from helixrt.schedule.planner.optimum import optimum
from helixrt.schedule.simulate import makespan_ms, simulate

pytest.importorskip("ortools", reason="the exact optimum needs OR-tools (extra `exact`)")


def tiny(seed: int, *, pairs: bool, wires: bool) -> Costs:
    """Two stages with every kind of cost."""
    draw = random.Random(seed)
    times = [tuple(draw.choice((0.5, 1.0, 1.75, 2.1, 3.0)) for _ in range(2)) for _ in range(3)]
    sizes = [tuple(draw.choice((0.0, 1.0, 1.5, 2.0)) for _ in range(2)) for _ in range(2)]
    return Costs(
        placement=linear(2),
        forward=times[0],
        backward=times[1],
        weight=times[2],
        links={(0, 1): Link(draw.choice((0.0, 0.3, 2.0)), 1.2 * wires), (1, 0): Link(draw.choice((0.0, 1.0)), 3.5 * wires)},
        activation=sizes[0],
        kept=sizes[1],
        memory=tuple(size * draw.choice((1.0, 1.5, 2.0, math.inf)) if size else math.inf for size in sizes[0]),
        pair_factor=draw.choice((0.6, 0.8)) if pairs else 1.0,
    )


def lists(stage: int, count: int) -> list[tuple[Operation | Pair, ...]]:
    """Every list a stage of one chunk can have, with micro-batches in any order."""
    found = []
    for whole in itertools.product((False, True), repeat=count):
        backs = [Operation(Op.BW if w else Op.B, stage, m) for m, w in enumerate(whole)]
        single = [Operation(Op.F, stage, m) for m in range(count)] + backs
        single += [Operation(Op.W, stage, m) for m, w in enumerate(whole) if not w]
        options = [[]] + [[Pair(Operation(Op.F, stage, i), backs[j])] for i in range(count) for j in range(count) if i != j]
        for paired in options:
            taken = [o for pair in paired for o in operations_of(pair)]
            entries = paired + [o for o in single if o not in taken]
            for order in itertools.permutations(entries):
                rank = {o: i for i, entry in enumerate(order) for o in operations_of(entry)}
                fine = True
                for m, back in enumerate(backs):
                    fine &= rank[Operation(Op.F, stage, m)] < rank[back]
                    fine &= rank[back] < rank.get(Operation(Op.W, stage, m), 99)
                if fine:
                    found.append(order)
    return found


def best_of_all(costs: Costs, count: int) -> float:
    def fitting(stage: int) -> list[tuple[Operation | Pair, ...]]:
        found = []
        for entries in lists(stage, count):
            alone = Schedule("alone", 2, count, costs.placement, (entries, ()) if stage == 0 else ((), entries))
            if peak_memory(alone, costs)[stage] <= costs.memory[stage] * (1 + 1e-9):
                found.append(entries)
        return found

    best = math.inf
    for pick in itertools.product(fitting(0), fitting(1)):
        try:
            best = min(best, makespan_ms(Schedule("any", 2, count, costs.placement, pick), costs))
        except ScheduleError:
            continue  # this order blocks itself
    return best


@pytest.mark.parametrize(("pairs", "wires"), [(False, False), (False, True), (True, False), (True, True)])
def test_equals_the_best_of_all_orders(pairs: bool, wires: bool) -> None:
    for seed in range(3):
        costs = tiny(seed + 10 * pairs + 100 * wires, pairs=pairs, wires=wires)
        expected = best_of_all(costs, 2)
        assert lower_bound(costs, 2) <= expected + 1e-9, (seed, pairs, wires)
        found = optimum(costs, 2)
        assert found.proven, (seed, pairs, wires)
        assert found.makespan_ms == pytest.approx(expected, rel=1e-9), (seed, pairs, wires)


TWELVE = {math.inf: (103, 104, 105, 107), 12.0: (103, 104, 105, 107), 8.0: (103, 107, 111, 123)}


@pytest.mark.grid
@pytest.mark.parametrize("delay", (0, 1, 2, 4))
@pytest.mark.parametrize("cap", TWELVE)
def test_the_twelve_optima(cap: float, delay: int) -> None:
    expected = TWELVE[cap][(0, 1, 2, 4).index(delay)]
    costs = with_delays(uniform(8, memory=cap), {(3, 4): delay, (4, 3): delay})
    found = optimum(costs, 32, time_limit_s=150)  # seconds where nothing else runs
    assert found.proven and found.makespan_ms == found.bound_ms == expected
    check(found.schedule)
    timeline = simulate(found.schedule, costs)
    assert timeline.makespan_ms == expected and max(timeline.peak_memory) <= cap


def test_a_hint_is_never_lost() -> None:
    costs, count = random_instance(5)
    first = optimum(costs, count)
    again = optimum(costs, count, hint=first.schedule, time_limit_s=1e-3)
    assert again.makespan_ms == first.makespan_ms
    assert again.bound_ms <= again.makespan_ms


def test_two_chunks_under_a_cap() -> None:
    costs = uniform(2, memory=2.0).split(folded(2))
    found = optimum(costs, 4)
    # Two half activations per micro-batch: two micro-batches at a time. Stage 0 works 12, and waits for its first B.
    assert found.proven and max(simulate(found.schedule, costs).peak_memory) <= 2.0
    assert found.makespan_ms == lower_bound(costs, 4) == 12.5


def test_times_without_a_common_unit_are_rounded_and_the_bound_holds() -> None:
    draw = random.Random(7)
    times = [tuple(draw.uniform(1, 2) for _ in range(3)) for _ in range(3)]
    costs = Costs(linear(3), *times, memory=(2.0, 2.0, 2.0))
    found = optimum(costs, 5)
    assert found.proven and found.bound_ms <= found.makespan_ms <= found.bound_ms * (1 + 1e-6)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = uniform(2, memory=0.5)
    with pytest.raises(ConfigError, match=r"memory\[0\]=0.5: .*smallest that would do is 1"):
        optimum(costs, 4)
    assert smallest_memory(costs.split(folded(2))) == (1.0, 1.0)
    with pytest.raises(ConfigError, match="hint"):
        optimum(uniform(2), 4, hint=optimum(uniform(2), 3).schedule)
    hungry = optimum(uniform(3), 6).schedule
    with pytest.raises(ConfigError, match="must fit the memory caps"):
        optimum(uniform(3, memory=1.0), 6, hint=hungry)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtra, match=r"helixrt\[exact\]"):
        optimum(uniform(2), 2)
