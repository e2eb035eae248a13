"""A stage of a pipeline that communicates in two groups plans with the ranks that share it, not with other stages' ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helixrt.errors import ConfigError
from helixrt.parallel.collective_functions import enter, leave
from helixrt.passes.pair import Rules
from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.channels import GroupChannel
from helixrt.pipeline.executor import Executor
from helixrt.pipeline.graph_stage import Example, GraphStage
from helixrt.pipeline.program import compile_program
from helixrt.pipeline.stage import StageChunk
from helixrt.record import FlightRecord
from helixrt.schedule.generators.classic import build

STAGES, MICROBATCHES, ROWS, DIM = 2, 4, 3, 8


class Shared(nn.Module):
    """A layer in a tensor-parallel and an expert-parallel group; with None, alone."""

    def __init__(self, tp: str | None, ep: str | None) -> None:
        super().__init__()
        self.a, self.b, self.groups = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), (tp, ep)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, group in zip((self.a, self.b), self.groups, strict=True):
            y = layer(x if group is None else enter(x, group)).tanh()
            x = x + (y if group is None else leave(y, group))
        return x


def chunks_of(schedule: Any, stage: int | None, groups: tuple[str | None, str | None]) -> dict[int, nn.Module]:
    """The chunks of a stage (None: of all), the last one larger, so that stages have other graphs."""
    made = {}
    for number, place in enumerate(schedule.placement):
        torch.manual_seed(number)
        layers = [Shared(*groups) for _ in range(1 + (number + 1 == schedule.chunks))]
        if stage is None or place == stage:
            made[number] = nn.Sequential(*layers).double()
    return made


def train_stage(case: str) -> None:
    """This rank is one stage, alone in its groups; the other rank is the other stage."""
    schedule = build("w", STAGES, MICROBATCHES)
    own = dist.get_rank()
    tp, ep, shared = ([dist.new_group([stage]) for stage in range(STAGES)][own] for _ in range(3))
    modules = chunks_of(schedule, own, (tp.group_name, ep.group_name))
    last = schedule.chunks - 1
    chunks = {number: StageChunk(module, F.mse_loss if number == last else None) for number, module in modules.items()}
    row = torch.empty(ROWS, DIM, dtype=torch.float64)
    comes_in = {number: Example(row, row if number == last else None) for number in chunks}
    program = compile_program(schedule, own)
    if case == "not said":
        stage = GraphStage(chunks, comes_in, mode="estimate")
        with pytest.raises(ConfigError, match="group=None: must be given: .* 2 groups"):
            stage.prepare(program)
        return
    stage = GraphStage(chunks, comes_in, mode="measure", rules=Rules(labels=500), group=shared)
    stage.prepare(program)
    assert stage.plans and all(plan.profile is not None and len(plan.profile.groups) == 2 for plan in stage.plans.values())
    record = FlightRecord(f"pp{own}")
    channels = {peer: GroupChannel(dist.new_group(), peer, record) for peer in range(STAGES) if peer != own}
    buckets = GradientBuckets(modules, 256)
    buckets.begin(lambda bucket: None)
    data = torch.randn(2, MICROBATCHES, ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    x, y = (list(part.unbind()) for part in data.unbind())
    losses = Executor(stage, channels, row, record).run(program, x, y, buckets, generation=0, step=0)
    whole = chunks_of(schedule, None, (None, None))
    model = nn.Sequential(*whole.values())
    expected = torch.stack([F.mse_loss(model(a), b) for a, b in zip(x, y, strict=True)]).mean()
    expected.backward()
    if last in modules:
        torch.testing.assert_close(torch.stack(losses).mean(), expected.detach(), rtol=1e-12, atol=0)
    for number, module in modules.items():
        for one, other in zip(module.parameters(), whole[number].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-14)
    for channel in channels.values():
        channel.close()


@pytest.mark.system
def test_stages_plan_by_themselves(ask_ranks: Callable[..., Any]) -> None:
    """Without the stage's own group it is refused; with it, stages with other graphs plan, measure and train."""
    answers = ask_ranks(train_stage, ["not said", "said"])
    answers.check("not said")
    answers.check("said")
