"""A stage that is slowed down on purpose takes its time and computes the same."""

from __future__ import annotations

import time

import pytest
import torch

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.executor import Executor, Slowdown
from helixrt.pipeline.program import compile_program, whole_backwards
from helixrt.pipeline.stage import AutogradStage, StageChunk, Task
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op

LEAST_S = 0.004  # that an operation takes


class Slept(AutogradStage):
    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        time.sleep(LEAST_S)
        return super().compute(tasks, buckets)


@pytest.mark.parametrize(("factor", "least_s"), [(1.0, 0.0), (3.0, 0.0), (1.0, 0.012)])
def test_operations_take_the_factor_of_the_step_and_their_least_time(factor: float, least_s: float) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 1, dtype=torch.float64)
    record = FlightRecord("r0.pp0")
    stage = Slept({0: StageChunk(module, torch.nn.functional.mse_loss)})
    executor = Executor(stage, {}, torch.empty(0), record)
    executor.slowdown = lambda step: Slowdown(factor, least_s) if step == 7 else Slowdown()
    record.step = 7
    buckets = GradientBuckets({0: module}, 1 << 10)
    buckets.begin(lambda bucket: None)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    program = compile_program(whole_backwards(build("1f1b", 1, 2)), 0)
    losses = executor.run(program, list(x), list(y), buckets, generation=1, step=1)
    expected = [torch.nn.functional.mse_loss(module(a), b) for a, b in zip(x, y, strict=True)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    took = [(e.detail["op"], e.end_s - e.begin_s) for e in record.events() if e.kind is Kind.OPERATION]
    least = {"F": max(factor * LEAST_S, least_s), "BW": max(factor * LEAST_S, 2 * least_s)}
    assert len(took) == 4 and all(took_s >= 0.98 * least[op] for op, took_s in took)


def test_the_least_time_is_of_each_part_and_the_longer_of_both_holds() -> None:
    slow = Slowdown(2.0, 0.010)
    assert slow.sleep_s(0.001, [Op.F]) == pytest.approx(0.009)
    assert slow.sleep_s(0.004, [Op.BW]) == pytest.approx(0.016), "B and W"
    assert slow.sleep_s(0.004, [Op.F, Op.BW]) == pytest.approx(0.026)
    assert slow.sleep_s(0.030, [Op.F]) == pytest.approx(0.030), "the factor asks for more"
    assert Slowdown().sleep_s(0.004, [Op.F]) == 0
