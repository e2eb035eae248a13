"""A stage that is slowed down on purpose takes its time and computes the same."""

from __future__ import annotations

import time

import pytest
import torch

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.program import compile_program, whole_backwards
from helixrt.pipeline.stage import AutogradStage, StageChunk, Task
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.generators.classic import build

LEAST_S = 0.004  # that an operation takes


class Slept(AutogradStage):
    def compute(self, tasks: list[Task], buckets: GradientBuckets | None) -> list[torch.Tensor | None]:
        time.sleep(LEAST_S)
        return super().compute(tasks, buckets)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_operations_take_the_factor_of_the_step(factor: float) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 1, dtype=torch.float64)
    record = FlightRecord("r0.pp0")
    stage = Slept({0: StageChunk(module, torch.nn.functional.mse_loss)})
    executor = Executor(stage, {}, torch.empty(0), record)
    executor.slowdown = lambda step: factor if step == 7 else 1.0
    record.step = 7
    buckets = GradientBuckets({0: module}, 1 << 10)
    buckets.begin(lambda bucket: None)
    x, y = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    program = compile_program(whole_backwards(build("1f1b", 1, 2)), 0)
    losses = executor.run(program, list(x), list(y), buckets, generation=1, step=1)
    expected = [torch.nn.functional.mse_loss(module(a), b) for a, b in zip(x, y, strict=True)]
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    took_s = [e.end_s - e.begin_s for e in record.events() if e.kind is Kind.OPERATION]
    assert len(took_s) == 4 and all(each >= 0.98 * factor * LEAST_S for each in took_s)
