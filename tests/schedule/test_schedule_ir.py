"""The IR's check against a brute-force oracle."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.check import check, check_microbatch_order
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, ScheduleError, needs, operations_of, provides


def with_stage(schedule: Schedule, stage: int, entries: list[Entry]) -> Schedule:
    return replace(schedule, entries=tuple(tuple(entries) if s == stage else e for s, e in enumerate(schedule.entries)))


def test_missing_doubled_and_misplaced_operations_are_named() -> None:
    schedule = build("zb-h1", 2, 4)
    order = list(schedule.entries[1])
    with pytest.raises(ScheduleError, match=r"stage 1 lacks W\(chunk 1, micro-batch 3\)"):
        check(with_stage(schedule, 1, order[:-1]))
    with pytest.raises(ScheduleError, match=r"stage 1 has F\(chunk 1, micro-batch 0\) 2 times"):
        check(with_stage(schedule, 1, [order[0], *order]))
    with pytest.raises(ScheduleError, match=r"F\(chunk 0, micro-batch 0\) does not belong on stage 1"):
        check(with_stage(schedule, 1, [Operation(Op.F, 0, 0), *order]))
    with pytest.raises(ScheduleError, match="placement"):
        check(replace(schedule, placement=(0, 0)))


def test_a_circle_names_the_operations_that_block_each_other() -> None:
    schedule = build("gpipe", 2, 2)
    first = [Operation(Op.F, 0, 0), *[Operation(op, 0, 0) for op in (Op.B, Op.W)], Operation(Op.F, 0, 1)]
    first += [Operation(op, 0, 1) for op in (Op.B, Op.W)]
    with pytest.raises(ScheduleError) as caught:
        check(with_stage(schedule, 0, first))  # stage 1 wants both forwards before any backward
    assert "stage 0 stands at B(chunk 0, micro-batch 0) and waits for B(chunk 1, micro-batch 0)" in str(caught.value)
    assert "stage 1 stands at F(chunk 1, micro-batch 1) and waits for F(chunk 0, micro-batch 1)" in str(caught.value)


def test_a_backward_before_its_own_forward_is_refused() -> None:
    order = [Operation(Op.B, 0, 0), Operation(Op.W, 0, 0), Operation(Op.F, 0, 0)]
    with pytest.raises(ScheduleError, match=r"stage 0 stands at B\(chunk 0, micro-batch 0\)"):
        check(Schedule("odd", 1, 1, (0,), (tuple(order),)))


def test_folded_placement_and_pairs() -> None:
    f, b, w = (lambda c, m, op=op: Operation(op, c, m) for op in (Op.F, Op.B, Op.W))
    good: list[Entry] = [f(0, 0), f(1, 0), f(0, 1), Pair(f(1, 1), b(1, 0)), w(1, 0), b(0, 0), w(0, 0)]
    good += [b(1, 1), w(1, 1), b(0, 1), w(0, 1)]
    check(Schedule("folded", 1, 2, (0, 0), (tuple(good),)))
    own: list[Entry] = [Pair(f(0, 0), b(0, 0)), w(0, 0)]  # a backward cannot overlap its own forward
    with pytest.raises(ScheduleError, match="blocks itself"):
        check(Schedule("own", 1, 1, (0,), (tuple(own),)))


def runs_to_the_end(schedule: Schedule) -> bool:
    """The oracle: is program order plus data dependencies free of circles? (Kahn's algorithm)"""
    units = [(s, i) for s in range(schedule.stages) for i in range(len(schedule.entries[s]))]
    home = {r: (s, i) for s, i in units for o in operations_of(schedule.entries[s][i]) for r in provides(o)}
    before = {
        (s, i): {(s, i - 1)} - {(s, -1)} | {home[n] for o in operations_of(schedule.entries[s][i]) for n in needs(schedule, o)}
        for s, i in units
    }
    left = set(units)
    while free := {u for u in left if not before[u] & left}:
        left -= free
    return not left


def test_check_agrees_with_the_oracle_on_random_orders(seed: int) -> None:
    rng = random.Random(seed)
    verdicts = set()
    for _ in range(400):
        stages, microbatches = rng.randint(1, 4), rng.randint(1, 5)
        schedule = build(rng.choice(["gpipe", "zb-h2", "zbv", "w"]), stages, microbatches)
        entries = []
        for stage in range(stages):
            order = list(schedule.entries[stage])
            for _ in range(rng.randint(0, 4)):
                i, j = rng.randrange(len(order)), rng.randrange(len(order))
                order[i], order[j] = order[j], order[i]
            entries.append(tuple(order))
        shuffled = replace(schedule, entries=tuple(entries))
        try:
            check(shuffled)
            verdict = True
        except ScheduleError:
            verdict = False
        assert verdict == runs_to_the_end(shuffled), f"seed {seed}: {shuffled}"
        verdicts.add(verdict)
    assert verdicts == {True, False}


def last_first(count: int) -> tuple[Entry, ...]:
    return tuple(Operation(op, 0, m) for op, order in ((Op.F, range(count)), (Op.BW, reversed(range(count)))) for m in order)


def test_micro_batches_out_of_order_are_named() -> None:
    backwards = Schedule("lifo", 1, 3, (0,), (last_first(3),))
    check(backwards)
    said = r"stage 0 runs BW\(chunk 0, micro-batch 2\) before BW\(chunk 0, micro-batch 1\).*the B and BW of each chunk"
    with pytest.raises(ScheduleError, match=said):
        check_microbatch_order(backwards)

    schedule = build("zb-h1", 2, 4)
    order = list(schedule.entries[0])
    weights = [i for i, entry in enumerate(order) if isinstance(entry, Operation) and entry.op is Op.W]
    order[weights[-2]], order[weights[-1]] = order[weights[-1]], order[weights[-2]]
    check_microbatch_order(schedule)
    with pytest.raises(ScheduleError, match=r"stage 0 runs W\(chunk 0, micro-batch 3\) before W\(chunk 0, micro-batch 2\)"):
        check_microbatch_order(with_stage(schedule, 0, order))

    forwards = [Operation(Op.F, 0, m) for m in (0, 2, 1)] + [Operation(Op.BW, 0, m) for m in range(3)]
    with pytest.raises(ScheduleError, match=r"F\(chunk 0, micro-batch 2\) before F\(chunk 0, micro-batch 1\).*the forwards of"):
        check_microbatch_order(Schedule("forwards", 1, 3, (0,), (tuple(forwards),)))


def test_a_whole_backward_between_weight_backwards_has_its_place_in_their_order() -> None:
    f, b, w, bw = ([Operation(op, 0, m) for m in range(3)] for op in (Op.F, Op.B, Op.W, Op.BW))
    good: tuple[Entry, ...] = (*f, b[0], w[0], bw[1], b[2], w[2])
    check_microbatch_order(Schedule("mixed", 1, 3, (0,), (good,)))
    late: tuple[Entry, ...] = (*f, b[0], bw[1], w[0], b[2], w[2])
    check(Schedule("mixed", 1, 3, (0,), (late,)))
    with pytest.raises(ScheduleError, match=r"BW\(chunk 0, micro-batch 1\) before W\(chunk 0, micro-batch 0\)"):
        check_microbatch_order(Schedule("mixed", 1, 3, (0,), (late,)))
    early: tuple[Entry, ...] = (*f, b[1], b[0], w[0], w[1], bw[2])  # B adds to the gradients of layer norms
    with pytest.raises(ScheduleError, match=r"B\(chunk 0, micro-batch 1\) before B\(chunk 0, micro-batch 0\)"):
        check_microbatch_order(Schedule("early", 1, 3, (0,), (early,)))


def some_costs(rng: random.Random, stages: int) -> Costs:
    costs = uniform(stages, rng.choice((5, 10)), rng.choice((10, 17)), rng.choice((4, 10)), memory=rng.choice((9.0, 40.0)))
    return with_delays(costs, {(s, s + 1): rng.choice((0.0, 30.0)) for s in range(stages - 1)})


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_generators_keep_micro_batches_in_order(policy: str, seed: int) -> None:
    rng, made = random.Random(seed), 0
    for _ in range(12):
        stages = rng.choice((2, 3, 4))
        try:
            schedule = policies.build(policy, some_costs(rng, stages), 2 * stages)
        except ConfigError:
            continue  # has no order within these caps
        check_microbatch_order(schedule)
        made += 1
    assert made


def test_how_many_micro_batches_each_chunk_holds() -> None:
    assert build("1f1b", 4, 8).in_flight == (4, 3, 2, 1)
    assert build("gpipe", 3, 8).in_flight == (8, 8, 8)
    f, b, w = ([Operation(op, 0, m) for m in range(3)] for op in (Op.F, Op.B, Op.W))
    assert Schedule("late W", 1, 3, (0,), ((f[0], b[0], f[1], b[1], w[0], w[1], f[2], b[2], w[2]),)).in_flight == (2,)


def test_schedule_imports_no_torch() -> None:
    code = "import sys, helixrt.schedule.generators.classic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 0
