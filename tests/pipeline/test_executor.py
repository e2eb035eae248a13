"""The executor runs the schedule it is given, and refuses one that it cannot run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import GroupChannel
from helixrt.pipeline.executor import Executor, compile_program
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord, Kind
from helixrt.schedule.generators import build
from helixrt.schedule.ir import Op, Operation, Pair, Schedule, ScheduleError

DIM, MICROBATCHES = 6, 3


def f(c: int, m: int) -> Operation:
    return Operation(Op.F, c, m)


def bw(c: int, m: int) -> list[Operation]:
    return [Operation(Op.B, c, m), Operation(Op.W, c, m)]


def linear(chunk: int) -> nn.Linear:
    layer = nn.Linear(DIM, DIM, dtype=torch.float64)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape).double() * (chunk + 1 + index))
    return layer


def data() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, MICROBATCHES, 4, DIM, dtype=torch.float64, generator=generator)
    return list(both[0]), list(both[1])


def whole(chunks: int) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    model = nn.Sequential(*[linear(c) for c in range(chunks)])
    inputs, targets = data()
    loss = sum(nn.functional.mse_loss(model(x), t) for x, t in zip(inputs, targets, strict=True)) / MICROBATCHES
    loss.backward()
    return loss.detach(), [[p.grad for p in layer.parameters()] for layer in model]


Ran = tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]  # losses, gradients by chunk


def run_on(schedule: Schedule, stage: int, group: Any, record: FlightRecord) -> Ran:
    mine = [c for c, home in enumerate(schedule.placement) if home == stage]
    modules: dict[int, nn.Module] = {c: linear(c) for c in mine}
    chunks = {c: StageChunk(modules[c], nn.functional.mse_loss if c + 1 == schedule.chunks else None) for c in mine}
    channels = {peer: GroupChannel(group, peer, record) for peer in range(schedule.stages) if peer != stage}
    buckets = GradientBuckets(modules, bucket_bytes=8)
    order: list[int] = []
    buckets.begin(order.append)
    executor = Executor(chunks, channels, torch.empty(4, DIM, dtype=torch.float64), record)
    inputs, targets = data()
    losses = executor.run(compile_program(schedule, stage), inputs, targets, buckets, generation=0, step=0)
    assert order == list(reversed(range(len(buckets.flat))))
    for channel in channels.values():
        channel.close()
    return losses, {c: [p.grad for p in modules[c].parameters()] for c in mine}


def folded() -> Schedule:
    """Two stages, chunks 0 and 3 on the first, 1 and 2 on the second, one micro-batch after the other."""
    first: list[Any] = []
    second: list[Any] = []
    for m in range(MICROBATCHES):
        first += [f(0, m), f(3, m), *bw(3, m), *bw(0, m)]
        second += [f(1, m), f(2, m), *bw(2, m), *bw(1, m)]
    return Schedule("folded", 2, MICROBATCHES, (0, 1, 1, 0), (tuple(first), tuple(second)))


def paired() -> Schedule:
    """One stage with a pair in it."""
    order: list[Any] = [f(0, 0), Pair(f(0, 1), bw(0, 0)[0]), bw(0, 0)[1], f(0, 2), *bw(0, 1), *bw(0, 2)]
    return Schedule("paired", 1, MICROBATCHES, (0,), (tuple(order),))


@pytest.mark.parametrize("schedule", [build("gpipe", 3, 3), build("1f1b", 3, 3), folded(), paired()], ids=lambda s: s.name)
def test_any_valid_schedule_gives_the_whole_models_gradients_in_its_own_order(run_stages: Any, schedule: Schedule) -> None:
    records = [FlightRecord(f"pp{s}") for s in range(schedule.stages)]
    results = run_stages(schedule.stages, lambda stage, group: run_on(schedule, stage, group, records[stage]))
    loss, grads = whole(schedule.chunks)
    losses = next(losses for losses, _ in results if losses)
    torch.testing.assert_close(sum(losses) / MICROBATCHES, loss, rtol=1e-12, atol=0)
    for _, by_chunk in results:
        for chunk, got in by_chunk.items():
            torch.testing.assert_close(got, grads[chunk], rtol=1e-11, atol=1e-11)
    for stage, record in enumerate(records):
        ran = [(e.detail["op"], e.detail["chunk"], e.detail["microbatch"]) for e in record.events() if e.kind is Kind.OPERATION]
        assert ran == [(o.op.value, o.chunk, o.microbatch) for o in schedule.operations(stage) if o.op is not Op.W]


def test_what_cannot_be_run_is_refused_before_anything_runs() -> None:
    late = [f(0, 0), f(0, 1), *[Operation(Op.B, 0, m) for m in (0, 1)], *[Operation(Op.W, 0, m) for m in (0, 1)]]
    with pytest.raises(ScheduleError, match=r"W of B\(chunk 0, micro-batch 0\) must stand right after it"):
        compile_program(Schedule("late", 1, 2, (0,), (tuple(late),)), 0)
    good = build("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match="lacks"):
        compile_program(replace(good, entries=(good.entries[0], good.entries[1][2:])), 0)
    blocked = replace(good, entries=((f(0, 0), *bw(0, 0), f(0, 1), *bw(0, 1)), good.entries[1]))
    with pytest.raises(ScheduleError, match="blocks itself"):
        compile_program(blocked, 0)
