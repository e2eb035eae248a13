"""A pipeline that computes in bfloat16 has the gradients of a plain loop under autocast, bit for bit, by whatever schedule."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagedModel, StagePlace, Stages
from helixrt.errors import MisuseError
from helixrt.pipeline.graph_stage import GraphStage
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from tests.train.test_pipeline_gradients import SEQ, batch_at, make_engine, record_of

MICROBATCHES, STEPS = 4, 3
MODEL = ModelConfig(layers=4, dim=16, heads=4, kv_heads=2, ffn=24, vocab=256)


def plain(model: ModelConfig, position: int) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss and gradients of a batch, and the loss of a validation, before any update."""
    whole = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float32)
    losses = []
    for tokens in batch_at(position).chunk(MICROBATCHES):
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_loss(whole(tokens[:, :-1]), tokens[:, 1:])
        (loss / MICROBATCHES).backward()
        losses.append(loss.item())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = [token_loss(whole(t[:, :-1]), t[:, 1:]).item() for t in batch_at(1000).chunk(MICROBATCHES)]
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return math.fsum(losses) / MICROBATCHES, gradients, math.fsum(found) / MICROBATCHES


@pytest.mark.parametrize(
    ("family", "policy", "graphs"),
    [("gpt", "1f1b", "never"), ("llama", "zb-h1", "auto"), ("llama", "dualpipev", "auto"), ("gpt", "gpipe", "always")],
)
def test_gradients_are_those_of_a_plain_loop_under_autocast(
    run_stages: Any, family: str, policy: str, graphs: str, captured_once: None
) -> None:
    model = replace(MODEL, family=family)
    loss, gradients, validation = plain(model, 3)

    def body(stage: int, group: Any) -> None:
        engine = make_engine(model, ScheduleConfig(policy, MICROBATCHES, graphs), stage, 2, group, autocast=torch.bfloat16)
        assert engine.evaluate(1)[0] == validation
        assert engine.run(3, lambda bucket: None).loss == loss
        for slot, (key, parameter) in zip(engine._buckets.slots, engine._buckets.named, strict=True):
            assert parameter.dtype is torch.float32, key
            assert torch.equal(slot.view(engine.buckets), gradients[key]), key
        stage_graphs = engine._executor.stage
        if isinstance(stage_graphs, GraphStage):
            assert stage_graphs.casts.made > 0, "weights are cast outside of the graphs"
        engine.close()

    run_stages(2, body)


def test_weights_are_cast_once_a_step_and_not_for_each_micro_batch(run_stages: Any, captured_once: None) -> None:
    """By graphs as many casts each step as there are weights to cast, whatever the number of micro-batches; by autograd the
    micro-batches share the casts, too."""

    def body(stage: int, group: Any) -> None:
        engine = make_engine(MODEL, ScheduleConfig("zb-h1", MICROBATCHES), stage, 2, group, autocast=torch.bfloat16)
        made = []
        for step in range(1, STEPS + 1):
            engine.run(step, lambda bucket: None)
            engine.apply(record_of(step), [b.clone() for b in engine.buckets])
            assert isinstance(engine._executor.stage, GraphStage)
            made.append(engine._executor.stage.casts.made)
        matrices = sum(p.dim() > 1 for name, p in engine._buckets.named if "embed" not in name and "position" not in name)
        each = {b - a for a, b in zip([0, *made], made, strict=False)}
        assert each == {made[0]} and made[0] >= matrices > 0
        engine.close()

    run_stages(2, body)
    casts: list[int] = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.profile() as profile:
                result = super().forward(x)
            casts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy"))
            return result

    part, example = nn.Sequential(Counted(8, 8)), torch.zeros(2, 8)
    loss = lambda y, target: nn.functional.mse_loss(y.float(), target)  # noqa: E731
    model = StagedModel(
        Stages([part], loss, (example, example), example, microbatches=3, graphs="never"),
        StagePlace(0, 1, None, FlightRecord("pp0")),
        torch.bfloat16,
    )
    engine = model.engine(Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    for step in (1, 2):
        engine.begin(lambda bucket: None)
        engine.train(torch.randn(6, 8), torch.zeros(6, 8))
        engine.end()
        engine.apply(record_of(step), [b.clone() for b in engine.buckets])
    assert casts == [3, 1, 1] * 2, "weight, bias and input; then the input alone, until the weights have changed"


def test_parts_that_send_another_type_than_was_declared_are_refused(run_stages: Any) -> None:
    """A linear layer at the end of a part gives bfloat16 under autocast."""
    example = torch.zeros(2, 8)

    def made(stage: int, group: Any, boundary: torch.Tensor) -> Any:
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        stages = Stages(parts, nn.functional.mse_loss, (example, example), boundary, microbatches=2, graphs="never")
        model = StagedModel(stages, StagePlace(stage, 2, group, FlightRecord(f"pp{stage}")), torch.bfloat16)
        return model.engine(Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))

    def fits(stage: int, group: Any) -> float:
        engine = made(stage, group, example.bfloat16())
        engine.begin(lambda bucket: None)
        loss = engine.train(torch.ones(4, 8), torch.zeros(4, 8))
        engine.end()
        engine.close()
        return loss

    one, other = run_stages(2, fits)
    assert one == other > 0

    over = threading.Event()

    def wrong(stage: int, group: Any) -> str:
        engine = made(stage, group, example)
        engine.begin(lambda bucket: None)
        if stage == 1:
            assert over.wait(60), "a stage that ends before would be lost to the other one"
            engine.close()
            return ""
        with pytest.raises(MisuseError) as caught:
            engine.train(torch.ones(4, 8), torch.zeros(4, 8))
        over.set()
        engine.close()
        return str(caught.value)

    said, _ = run_stages(2, wrong)
    assert said.startswith("part 0 gives torch.bfloat16 [2, 8], and the boundary between parts was declared as torch.float32")
