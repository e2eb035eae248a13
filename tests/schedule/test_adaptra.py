"""ADAPTRA's algorithms against a plain stepped simulation, their definitions and their mends."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators.adaptra import adapted_warmups, adaptra, initial_warmups, slack, tolerates
from helixrt.schedule.generators.orchestrate import orchestrate
from helixrt.schedule.ir import Op, Operation, Schedule, ScheduleError, linear, needs
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.instances import random_instance
from helixrt.schedule.simulate import simulate


def both_ways(costs: Costs, delays_ms: dict[int, float]) -> Costs:
    return with_delays(costs, {way: d for i, d in delays_ms.items() for way in ((i, i + 1), (i + 1, i))})


def step_by_step(costs: Costs, microbatches: int, warmups: list[int], step_ms: float) -> list[list[Operation]]:
    """Algorithms 3 and 4, mended, as a loop over every step and stage with sets of available operations."""
    stages = costs.stages
    available: list[list[tuple[float, Operation]]] = [[] for _ in range(stages)]
    available[0] = [(0.0, Operation(Op.F, 0, m)) for m in range(microbatches)]
    busy_until, quota = [0.0] * stages, list(warmups)
    chosen: list[list[Operation]] = [[] for _ in range(stages)]
    now = 0.0
    while sum(map(len, chosen)) < 3 * stages * microbatches:
        for s in range(stages):
            if busy_until[s] > now:
                continue
            here = [o for ready, o in available[s] if ready <= now]
            kinds = (Op.F,) if quota[s] else (Op.B, Op.F, Op.W)
            best = min((o for o in here if o.op in kinds), key=lambda o: (kinds.index(o.op), o.microbatch), default=None)
            if best is None:
                continue
            quota[s] -= best.op is Op.F and quota[s] > 0
            chosen[s].append(best)
            available[s] = [(ready, o) for ready, o in available[s] if o != best]
            end = busy_until[s] = now + costs.duration_ms(best)
            own = replace(best, op=Op.W if best.op is Op.B else Op.B)
            if best.op is Op.B or (best.op is Op.F and s == stages - 1):
                available[s].append((end, own))
            there = s + 1 if best.op is Op.F else s - 1
            if best.op is not Op.W and 0 <= there < stages:
                available[there].append((end + costs.link(s, there).delay_ms, replace(best, chunk=there)))
        now += step_ms
    return chosen


def test_orchestration_is_the_stepped_simulation() -> None:
    for seed in range(12):
        costs, microbatches = random_instance(seed)
        costs, microbatches = replace(costs, memory=()), min(microbatches, 10)
        warmups = [min(w, microbatches) for w in adapted_warmups(costs, microbatches)]
        step_ms = random.Random(seed).choice([1.0, 2.0, 5.0, 16.0])  # binary and whole: no rounding in either
        expected = step_by_step(costs, microbatches, warmups, step_ms)
        schedule = orchestrate("stepped", costs, microbatches, warmups, step_ms)
        assert [list(entries) for entries in schedule.entries] == expected, f"seed {seed}"


def test_algorithm_1_spreads_the_slack() -> None:
    assert initial_warmups(4, 4) == (4, 3, 2, 1)
    assert initial_warmups(4, 12) == (12, 8, 4, 1)
    assert initial_warmups(8, 12) == (12, 10, 8, 6, 4, 3, 2, 1)
    assert initial_warmups(4, 2) == (2, 1, 1, 1)
    assert initial_warmups(1, 7) == (1,)
    for stages in range(2, 9):
        for most in range(1, 40):
            counts = initial_warmups(stages, most)
            gaps = [a - b for a, b in zip(counts, counts[1:], strict=False)]
            assert counts[0] == most and counts[-1] == 1 and max(gaps) - min(gaps) <= 1 and min(gaps) >= 0


def test_algorithm_2_gives_every_link_what_equation_1_asks_for() -> None:
    assert adapted_warmups(uniform(4), 20) == (7, 5, 3, 1)
    assert adapted_warmups(both_ways(uniform(4), {1: 2.5}), 20) == (9, 7, 3, 1)  # (2 + 5) / 2 rounded up
    assert adapted_warmups(with_delays(uniform(4), {(1, 2): 5}), 20) == (9, 7, 3, 1)  # both ways count together
    for seed in range(200):
        costs, microbatches = random_instance(seed)
        counts = adapted_warmups(costs, microbatches)
        assert counts[-1] == 1 and max(counts) <= microbatches
        deltas = [a - b for a, b in zip(counts, counts[1:], strict=False)]
        clip = max(microbatches - 2 * costs.stages, 2)
        for delta, fine, less in zip(deltas, tolerates(costs, deltas), tolerates(costs, [d - 1 for d in deltas]), strict=True):
            assert 0 <= delta <= clip
            assert fine or delta == clip or counts[0] == microbatches
            assert not less or delta <= 2


def test_few_microbatches_do_not_turn_warmups_negative() -> None:
    """N - 2 S is -5 here: as printed the clip gives a slack of -5."""
    costs = both_ways(uniform(4), {0: 9.0})
    assert adapted_warmups(costs, 3) == (3, 3, 3, 1)
    check(adaptra(costs, 3))


def test_slack_is_the_difference_of_warmups() -> None:
    assert slack(adaptra(uniform(4), 12)) == (2, 2, 2)
    assert tolerates(both_ways(uniform(4), {0: 1.0, 1: 1.5}), [2, 2, 2]) == (True, False, True)


def test_adaptation_absorbs_a_delay_that_the_undisturbed_plan_does_not() -> None:
    """8 stages, 32 micro-batches of 10 ms operations, 30 ms on link 3, both ways, no cap."""
    costs = uniform(8, 10, 10, 10)
    slow = both_ways(costs, {3: 30.0})
    fixed, adapted = (simulate(adaptra(c, 32), slow).makespan_ms for c in (costs, slow))
    undisturbed = simulate(adaptra(costs, 32), costs).makespan_ms
    assert undisturbed == 1030
    assert fixed > 1.15 * undisturbed and adapted < 1.05 * undisturbed


def test_warmups_under_a_cap() -> None:
    """Algorithm 1's if they tolerate the delays, else Algorithm 2's if they fit, else Algorithm 1's."""
    capped = uniform(8, memory=20)
    for costs, counts in (
        (uniform(8, memory=8), initial_warmups(8, 8)),
        (both_ways(capped, {2: 1.0}), initial_warmups(8, 20)),
        (both_ways(capped, {6: 3.0}), (17, 15, 13, 11, 9, 7, 5, 1)),
        (both_ways(uniform(8, memory=16), {6: 3.0}), initial_warmups(8, 16)),
    ):
        assert adaptra(costs, 32) == orchestrate("adaptra", costs, 32, counts)


def test_the_cap_holds_on_random_instances() -> None:
    for seed in range(150):
        costs, microbatches = random_instance(seed)
        if seed % 3 == 0:  # W needs more or less than B
            factor = random.Random(seed).choice([0.0, 0.5, 1.5])
            costs = replace(costs, kept=tuple(factor * a for a in costs.activation), memory=tuple(2 * m for m in costs.memory))
        schedule = adaptra(costs, microbatches)
        check(schedule)
        peaks = peak_memory(schedule, costs)
        assert all(held <= cap for held, cap in zip(peaks, costs.memory, strict=True)), f"seed {seed}"


def any_valid_order(rng: random.Random) -> Schedule:
    """One chunk per stage; what comes next is drawn among all that has its inputs, so it need not be any good."""
    stages, count = rng.randint(2, 5), rng.randint(1, 8)
    draft = Schedule("any", stages, count, linear(stages), ((),) * stages)
    left = [Operation(op, s, m) for op in (Op.F, Op.B, Op.W) for s in range(stages) for m in range(count)]
    eager = {op: rng.random() for op in (Op.F, Op.B, Op.W)}
    made: set[Operation] = set()
    entries: list[list[Operation]] = [[] for _ in range(stages)]
    while left:
        able = [o for o in left if all(need in made for need in needs(draft, o))]
        chosen = rng.choices(able, [0.01 + eager[o.op] for o in able])[0]
        left.remove(chosen)
        made.add(chosen)
        entries[chosen.chunk].append(chosen)
    return replace(draft, entries=tuple(map(tuple, entries)))


def test_lemma_1_holds_for_every_order_that_can_run() -> None:
    """And not for one that can not: a stage that waits for a gradient with fewer forwards behind it than the next asks for."""
    for seed in range(300):
        schedule = any_valid_order(random.Random(seed))
        check(schedule)
        assert min(slack(schedule)) >= 0, f"seed {seed}"
    stuck = [[(Op.F, 0), (Op.B, 0), (Op.F, 1), (Op.B, 1)], [(Op.F, 0), (Op.F, 1), (Op.B, 0), (Op.B, 1)]]
    entries = tuple(tuple(Operation(op, s, m) for op, m in [*row, (Op.W, 0), (Op.W, 1)]) for s, row in enumerate(stuck))
    schedule = Schedule("stuck", 2, 2, linear(2), entries)
    assert slack(schedule) == (-1,)
    with pytest.raises(ScheduleError, match="blocks itself"):
        check(schedule)


def test_numbers_far_apart_are_planned_for() -> None:
    """Nothing overflows: a tiny activation under a large cap, a turn of no length beside a long delay."""
    small = replace(uniform(3), activation=(1e-300,) * 3, memory=(1e15,) * 3)
    check(adaptra(small, 5))
    short = both_ways(uniform(3, 1e-200, 1e-200, 1e-200), {1: 10.0})
    assert adapted_warmups(short, 40) == (37, 35, 1)  # the clip, 40 - 2 S, on the slow link; 2 on the other


def test_what_can_not_be_planned_is_one_line() -> None:
    tight = replace(uniform(3), activation=(2.0, 3.0, 2.0), memory=(2.0, 2.5, 2.0))
    with pytest.raises(ConfigError, match=r"^memory\[1\]=2.5: no forward fits; the smallest that would do is 3$"):
        adaptra(tight, 4)
    with pytest.raises(ConfigError, match="^step_ms=0"):
        adaptra(uniform(2), 4, step_ms=0)
    with pytest.raises(ConfigError, match=r"^warmups=\[1\]: must have one value per stage, 2 in all$"):
        orchestrate("odd", uniform(2), 4, [1])


def test_free_operations_and_wire_times() -> None:
    """Costs of zero end the simulation too, and the wire counts as latency."""
    free = Costs(placement=(0, 1), forward=(0, 0), backward=(0, 0), weight=(0, 0), links={(0, 1): Link(0, 0.5)})
    check(adaptra(free, 5))
    assert adapted_warmups(replace(uniform(2), links={(0, 1): Link(2, 1), (1, 0): Link(1, 2)}), 20) == (5, 1)
    assert math.isinf(free.memory[0])
