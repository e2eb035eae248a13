"""Estimates by operation are those of the operators, and cuts are compared by the schedule's own makespan."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helixrt.passes.capture import capture
from helixrt.passes.chunk_times import ChunkTimes, costs_of, makespan_of_cuts
from helixrt.passes.estimate import Rates
from helixrt.passes.unit_costs import balanced, unit_times
from helixrt.passes.units import units
from helixrt.schedule.generators.classic import build
from helixrt.schedule.simulate import makespan_ms

WIDTH, ROWS = 64, 32
BY_FLOPS = Rates(1e30, 0.0, {"float32": 1.0})  # memory and launches cost nothing


class Layers(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.fixture(scope="module")
def joint() -> object:
    target = torch.zeros(ROWS, dtype=torch.int64)
    return capture(Layers(), (torch.zeros(ROWS, WIDTH),), loss=cross_entropy, target=target)


def test_estimates_are_of_f_b_and_w(joint: object) -> None:
    first, *layers, head = unit_times(joint, units(joint), rates=BY_FLOPS)
    one = 2 * ROWS * WIDTH * WIDTH / 1e3
    for times, factor in ((first, 1), *((layer, 1) for layer in layers), (head, 4)):
        assert times.forward_ms == pytest.approx(factor * one, rel=0.1)
        assert times.weight_ms == pytest.approx(factor * one, rel=0.1)
        assert times.whole_ms == pytest.approx(times.backward_ms + times.weight_ms)
    for times, factor in (*((layer, 1) for layer in layers), (head, 4)):
        assert times.backward_ms == pytest.approx(factor * one, rel=0.1)
    assert first.backward_ms == 0.0  # nothing is before it


def test_chunks_take_the_sums_of_their_units() -> None:
    times = [ChunkTimes(1.0, 2.0, 3.0, 4.5), ChunkTimes(1.0, 2.0, 3.0, 5.0), ChunkTimes(2.0, 2.0, 2.0, 3.0)]
    for name in ("1f1b", "zb"):
        schedule = build(name, 2, 4)
        chunks = [ChunkTimes(2.0, 4.0, 6.0, 9.5), times[2]]
        costs = costs_of(chunks, schedule)
        assert costs.forward == (2.0, 2.0) and costs.backward == (4.0, 2.0)
        assert costs.weight == ((5.5, 1.0) if name == "1f1b" else (6.0, 2.0))  # what BW takes beyond B, or W
        assert makespan_of_cuts(times, schedule)((2,)) == makespan_ms(schedule, costs)


@pytest.mark.parametrize("name", ["1f1b", "zb", "zbv", "dualpipev"])
def test_no_neighbour_of_a_balanced_cut_is_faster(joint: object, name: str) -> None:
    schedule = build(name, 2, 4)
    names = units(joint).names
    measured = {each: ChunkTimes(1.0 + number % 3, 2.0, 0.5 * number, 2.5 + number) for number, each in enumerate(names)}
    makespan = makespan_of_cuts(list(measured.values()), schedule)
    starts = balanced(joint, schedule, measured=measured).starts
    for other in itertools.combinations(range(1, len(names)), schedule.chunks - 1):
        if sum(abs(a - b) for a, b in zip(other, starts, strict=True)) == 1:
            assert makespan(starts) <= makespan(other)
