"""The lower bound against schedules made at random, the true optimum, and what is known by arithmetic."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.ir import (
    Entry,
    Op,
    Operation,
    Pair,
    Schedule,
    folded,
    interleaved,
    linear,
    needs,
    operations_of,
    provides,
)
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner import optimum as exact
from helixrt.schedule.planner.bounds import Bounds, check_reachable, lower_bound, smallest_memory
from helixrt.schedule.planner.instances import random_instance
from helixrt.schedule.simulate import Direct, makespan_ms


def random_costs(draw: random.Random, *, stages: int, whole: bool) -> Costs:
    """Costs of every kind: one or two chunks, delays, wire times, pairs, memory freed at B or W."""
    placement = draw.choice((linear(stages), folded(stages), interleaved(stages)))
    chunks = len(placement)

    def times(low: int, high: int) -> tuple[float, ...]:
        return tuple(draw.randint(low, high) * (1.0 if whole else 0.37) for _ in range(chunks))

    links = {
        (a, b): Link(draw.choice((0.0, 2.0, 11.0)), draw.choice((0.0, 0.0, 1.0, 7.0)))
        for a in range(stages)
        for b in range(stages)
        if a != b and draw.random() < 0.6
    }
    pair_ms = {}
    if draw.random() < 0.3:
        for c in range(chunks):
            for d in range(chunks):
                if placement[c] == placement[d]:
                    pair_ms[c, draw.choice((Op.B, Op.BW)), d] = float(draw.randint(1, 14))
    return Costs(
        placement,
        times(1, 6),
        times(1, 9),
        times(0, 6),
        links=links,
        activation=times(1, 4),
        kept=draw.choice(((), times(0, 5), (0.0,) * chunks)),
        pair_factor=draw.choice((1.0, 1.0, 0.5, 0.75)),
        pair_ms=pair_ms,
    )


def greedy(draw: random.Random, costs: Costs, count: int) -> Schedule:
    """A valid order without foresight: again and again something that can start soon, with random tastes."""
    stages, placement = costs.stages, costs.placement
    blank = Schedule("greedy", stages, count, placement, ((),) * stages)
    taste = {op: draw.random() * draw.choice((0.0, 20.0)) for op in Op}
    pairing, fused = draw.choice((0.0, 0.9)), draw.choice((0.0, 0.2))
    left = {Operation(op, c, m) for op in (Op.F, Op.B, Op.W) for c in range(costs.chunks) for m in range(count)}
    ready: dict[Operation, float] = {}
    free = [0.0] * stages
    entries: list[list[Entry]] = [[] for _ in range(stages)]

    def start(o: Operation) -> float:
        came = [0.0]
        for n in needs(blank, o):
            a, b = placement[n.chunk], placement[o.chunk]
            link = costs.link(a, b) if a != b else Link()
            came.append(ready[n] + link.delay_ms + link.wire_ms)
        return max(free[placement[o.chunk]], *came)

    while left:
        able = [o for o in sorted(left, key=str) if all(n in ready for n in needs(blank, o))]
        entry: Entry = min(able, key=lambda o: (start(o) + taste[o.op], o.microbatch, draw.random()))
        stage = placement[entry.chunk]
        if entry.op is Op.B and draw.random() < fused:
            entry = Operation(Op.BW, entry.chunk, entry.microbatch)
        partners = [o for o in able if o.op is Op.F and placement[o.chunk] == stage]
        if isinstance(entry, Operation) and entry.op in (Op.B, Op.BW) and partners and draw.random() < pairing:
            entry = Pair(min(partners, key=lambda o: o.microbatch), entry)
        begin = max(start(o if o.op is not Op.BW else replace(o, op=Op.B)) for o in operations_of(entry))
        free[stage] = begin + costs.duration_ms(entry)
        for result in (r for o in operations_of(entry) for r in provides(o)):
            ready[result] = free[stage]
            left.remove(result)
        entries[stage].append(entry)
    return replace(blank, entries=tuple(map(tuple, entries)))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9))
def test_no_schedule_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    costs = random_costs(draw, stages=draw.randint(1, 4), whole=draw.random() < 0.5)
    count = draw.randint(1, 7)
    schedule = greedy(draw, costs, count)
    # The tightest caps that this schedule fits.
    costs = replace(costs, memory=peak_memory(schedule, costs))
    bound = lower_bound(costs, count)
    assert bound <= makespan_ms(schedule, costs) * (1 + 1e-9)
    assert bound <= makespan_ms(schedule, costs, Direct(depth=2)) * (1 + 1e-9)


def nothing_known(costs: Costs, microbatches: int) -> Bounds:
    zeros = {(op, c): np.zeros(microbatches) for op in (Op.F, Op.B, Op.W) for c in range(costs.chunks)}
    return Bounds(0.0, zeros, zeros)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(12))
def test_never_above_the_optimum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools", reason="the true optimum needs OR-tools (extra `exact`)")
    monkeypatch.setattr(exact, "bounds", nothing_known)  # the solver must not lean on what is tested
    draw = random.Random(seed)
    costs = random_costs(draw, stages=draw.choice((1, 2, 2, 3)), whole=True)
    costs = replace(costs, memory=tuple(m * draw.choice((1.0, 1.5, 2.2, math.inf)) for m in smallest_memory(costs)))
    count = 4 if costs.chunks > costs.stages else 5
    found = exact.optimum(costs, count, time_limit_s=2)
    assert lower_bound(costs, count) <= found.makespan_ms
    if found.proven and not costs.pair_ms and costs.pair_factor == 1.0:
        assert lower_bound(costs, count) >= 0.85 * found.makespan_ms


@pytest.mark.parametrize("seed", (3, 8, 9, 12, 13, 15, 18))
def test_near_the_optimum_of_realistic_problems(seed: int) -> None:
    pytest.importorskip("ortools", reason="the true optimum needs OR-tools (extra `exact`)")
    costs, count = random_instance(seed)
    found = exact.optimum(costs, count, time_limit_s=20)
    assert lower_bound(costs, count) >= 0.99 * found.bound_ms


def test_the_issue_s_figures() -> None:
    """8 stages, 32 micro-batches, unit costs, one link between the halves."""
    for delay, uncapped, capped in ((0, 103, 103), (1, 104, 107), (2, 105, 111), (4, 107, 122)):
        delays = {(3, 4): float(delay), (4, 3): float(delay)}
        for cap, expected in ((math.inf, uncapped), (12.0, uncapped), (8.0, capped)):
            assert lower_bound(with_delays(uniform(8, memory=cap), delays), 32) == expected
        assert lower_bound(with_delays(uniform(8).split(folded(8)), delays), 32) == uncapped - 3.5


def test_a_slow_wire_is_a_machine_too() -> None:
    # Nine messages of 10 each on the way to stage 1, an F before, and F, B, B and W after.
    costs = replace(uniform(2), links={(0, 1): Link(wire_ms=10.0)})
    assert lower_bound(costs, 9) == 1 + 90 + 4
    # Both chunks' forwards go down the same wire of an interleaved placement.
    costs = replace(costs.split(interleaved(2)), links={(0, 1): Link(wire_ms=10.0)})
    assert lower_bound(costs, 9) >= 180


def test_memory_below_one_micro_batch_is_refused() -> None:
    costs = replace(uniform(2).split(folded(2)), activation=(1.0, 2.0, 0.5, 0.25), memory=(1.25, 2.4))
    assert smallest_memory(costs) == (1.25, 2.5)
    with pytest.raises(ConfigError, match=r"memory\[1\]=2.4: no schedule fits; the smallest that would do is 2.5"):
        lower_bound(costs, 3)
    check_reachable(replace(costs, memory=(1.25, 2.5)))
    with pytest.raises(ConfigError, match="microbatches"):
        lower_bound(uniform(2), 0)
