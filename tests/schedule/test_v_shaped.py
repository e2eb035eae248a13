"""Orders of two chunks per stage: against torch's own, the figures of their papers, and their building rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from helixrt.schedule.check import check
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.generators.classic import interleaved, one_f_one_b
from helixrt.schedule.generators.v_shaped import dualpipev, w, zbv
from helixrt.schedule.ir import Entry, Op, Operation, Pair, Schedule, folded
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.simulate import simulate

KINDS = {"F": Op.F, "I": Op.B, "W": Op.W, "B": Op.BW}


def torch_order(kind: type, stages: int, microbatches: int) -> tuple[tuple[Entry, ...], ...]:
    """What torch's schedule of this class lets every rank compute, without the process group that it asks for."""

    def operation(action: torch_schedules._Action) -> Operation:
        assert action.microbatch_index is not None
        return Operation(KINDS[action.computation_type.value], action.stage_index, action.microbatch_index)

    orders = []
    for rank in range(stages):
        schedule = object.__new__(kind)
        schedule.pp_group_size, schedule.num_stages, schedule.n_local_stages = stages, 2 * stages, 2
        schedule.rank, schedule._n_microbatches, schedule.microbatches_per_round = rank, microbatches, stages
        order: list[Entry] = []
        for action in schedule._calculate_single_rank_operations(rank):
            if action is not None and action.sub_actions:
                order.append(Pair(*map(operation, action.sub_actions)))
            elif action is not None:
                order.append(operation(action))
        orders.append(tuple(order))
    return tuple(orders)


@pytest.mark.parametrize("stages,microbatches", [(1, 1), (1, 3), (2, 2), (2, 5), (3, 5), (4, 6), (4, 12), (5, 13), (8, 32)])
def test_zbv_is_torchs(stages: int, microbatches: int) -> None:
    assert zbv(stages, microbatches).entries == torch_order(torch_schedules.ScheduleZBVZeroBubble, stages, microbatches)


@pytest.mark.parametrize("stages,microbatches", [(1, 2), (1, 3), (2, 4), (2, 7), (3, 6), (4, 8), (4, 12), (5, 13), (8, 32)])
def test_dualpipev_is_torchs(stages: int, microbatches: int) -> None:
    assert dualpipev(stages, microbatches).entries == torch_order(torch_schedules.ScheduleDualPipeV, stages, microbatches)


@pytest.mark.parametrize("stages,microbatches", [(1, 3), (2, 2), (2, 8), (3, 6), (4, 12), (8, 32)])
def test_interleaved_is_torchs_where_microbatches_divide(stages: int, microbatches: int) -> None:
    assert interleaved(stages, microbatches).entries == torch_order(
        torch_schedules.ScheduleInterleaved1F1B, stages, microbatches
    )


@pytest.mark.parametrize("make", [zbv, dualpipev, w])
def test_few_microbatches_are_the_whole_pattern_without_the_absent(make: Callable[[int, int], Schedule]) -> None:
    for stages in range(1, 7):
        for microbatches in range(1, 2 * stages + 3):
            check(make(stages, microbatches))


@pytest.mark.parametrize("delay,expected", [(0, 99.5), (1, 110), (2, 145), (4, 217)])
def test_zbv_under_a_slow_link(delay: float, expected: float) -> None:
    """8 stages, 32 micro-batches, chunks of half the unit costs, the middle link slow both ways."""
    costs = with_delays(uniform(8).split(folded(8)), {(3, 4): delay, (4, 3): delay})
    assert simulate(zbv(8, 32), costs).makespan_ms == expected


@pytest.mark.parametrize("stages,microbatches", [(2, 8), (4, 12), (8, 32)])
def test_zbv_has_no_bubble_but_the_first_ones_way_down(stages: int, microbatches: int) -> None:
    schedule = zbv(stages, microbatches)
    costs = uniform(stages).split(folded(stages))
    assert simulate(schedule, costs).makespan_ms == 3 * microbatches + (stages - 1) / 2
    assert peak_memory(schedule, costs) == (stages,) * stages


def test_w_is_figure_8() -> None:
    """4 stages, 12 micro-batches: alpha 1-4 alone, beta 5-8 with alpha 1-4, alpha 9-12 with beta 5-8, then backwards."""
    schedule = w(4, 12)
    for entries in schedule.entries:
        pairs = [e for e in entries if isinstance(e, Pair)]
        assert sorted((e.forward.microbatch, e.backward.microbatch) for e in pairs) == [
            (m + 4, m) for m in range(8) for _ in ("down", "back")
        ]
        assert all(e.forward.chunk + e.backward.chunk == 7 for e in pairs)  # both on the same leg of the W
        alone = [e for e in entries if isinstance(e, Operation)]
        assert {(o.op, o.microbatch) for o in alone} == {(Op.F, m) for m in range(4)} | {(Op.BW, m) for m in range(8, 12)}
    kinds = ["P" if isinstance(e, Pair) else e.op.value for e in schedule.entries[3]]
    assert kinds == ["F"] * 8 + ["P"] * 16 + ["BW"] * 8


@pytest.mark.parametrize("factor", [1.0, 2 / 3])
@pytest.mark.parametrize("stages,microbatches", [(2, 8), (4, 12), (8, 32)])
def test_w_goes_from_pair_to_pair(stages: int, microbatches: int, factor: float) -> None:
    """Once every stage has pairs alone it has no gap; and with pairs that save nothing W takes as long as 1F1B."""
    costs = replace(uniform(stages).split(folded(stages)), pair_factor=factor)
    schedule = w(stages, microbatches)
    timeline = simulate(schedule, costs)
    for spans in timeline.spans:
        steady = [span for span in spans if isinstance(span.entry, Pair)]
        assert all(after.start_ms == pytest.approx(before.end_ms) for before, after in pairwise(steady[stages:-stages]))
    if factor == 1.0:
        assert timeline.makespan_ms == simulate(one_f_one_b(stages, microbatches), uniform(stages)).makespan_ms
    assert max(peak_memory(schedule, costs)) <= stages + 0.5
