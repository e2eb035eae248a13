"""The built-in job as a user of the session: its loader of epochs, its figures, and its loop beside plain PyTorch."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.engines.staged import StagePlace
from helixrt.job.config import MeshConfig
from helixrt.record import FlightRecord
from helixrt.train.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig
from helixrt.train.data import EpochLoader, ReplicaStream, load_corpus
from helixrt.train.engine import inputs_and_targets, token_loss
from helixrt.train.loop import LoopHooks, train
from helixrt.train.models.build import build_chunk
from helixrt.train.optimizer import adamw, cosine_with_warmup
from tests.job.session_world import LocalHost, session_with


def test_an_epoch_is_read_from_any_state_on(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        batches, epoch = rng.randrange(1, 12), rng.randrange(5)
        first, cut = EpochLoader(lambda at: torch.tensor(at), batches), rng.randrange(batches + 1)
        first.set_epoch(epoch)
        whole, state, read = iter(first), first.state_dict(), []
        for _ in range(cut):
            read.append(int(next(whole)))
            state = first.state_dict()
        other = EpochLoader(lambda at: torch.tensor(at), batches)
        other.set_epoch(epoch)
        other.load_state_dict(state)
        rest = [int(at) for at in other]
        assert read + rest == list(range(epoch * batches, (epoch + 1) * batches)) and len(other) == batches
        assert [int(at) for at in other] == read + rest  # the state counts once


class JobHost(LocalHost):
    def connect_stages(self) -> StagePlace:
        return StagePlace(0, 1, None, FlightRecord("r0.pp0"))


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return TrainConfig(
        steps=9,
        seed=3,
        mesh=MeshConfig(1, 1),
        model=ModelConfig(layers=2, dim=16, heads=2, kv_heads=2, ffn=32),
        data=DataConfig(str(tmp_path / "text"), batch=4, seq_len=12),
        schedule=ScheduleConfig("1f1b", 2),
        optim=OptimConfig(warmup_steps=3),
        eval=EvalConfig(every=4, batches=2),
    )


def test_the_loop_trains_as_plain_pytorch_does(config: TrainConfig) -> None:
    host, models = JobHost(), []
    updates: list[tuple[int, float]] = []
    session = session_with(host, seed=config.seed)
    train(session, config, LoopHooks(ready=models.append, updated=lambda step, loss: updates.append((step, loss))))

    data = config.data
    stream = ReplicaStream(load_corpus(data), 0, 1, data.batch, data.seq_len, config.seed)
    model = build_chunk(config.model, data.seq_len, 0, 1, seed=config.seed)
    optimizer = adamw(model.parameters(), config.optim)
    scheduler = cosine_with_warmup(optimizer, config.steps, config.optim)
    told: list[dict[str, Any]] = []
    for number in range(config.steps):
        optimizer.zero_grad()
        inputs, targets = inputs_and_targets(stream.batch_at(number))
        losses = [token_loss(model(x), y) for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
        for loss in losses:
            (loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        mean = sum(loss.item() for loss in losses) / 2
        rate = optimizer.param_groups[0]["lr"]
        told.append({"loss_nats": mean, "tokens": 48, "grad_norm": norm.item(), "learning_rate": rate})
        optimizer.step()
        scheduler.step()
    (trained,) = models
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(trained.parameters(), model.parameters(), strict=True))
    assert [step for step, _ in host.logged] == [step for step, _ in updates] == list(range(1, 10))
    for (_, found), expected in zip(host.logged, told, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert [(step, set(sums)) for step, sums in host.validated] == [(4, {"loss_nats"}), (8, {"loss_nats"})]
    assert host.weights == [2 * 4 * 12, 2 * 4 * 12], "tokens"
    assert 0 < host.validated[0][1]["loss_nats"] / host.weights[0] < math.log(256) + 1


def test_an_update_that_was_not_applied_is_not_logged(config: TrainConfig) -> None:
    host = JobHost(applied=lambda step: step != 4)
    train(session_with(host, seed=config.seed), config)
    assert [step for step, _ in host.logged] == [1, 2, 3, 5, 6, 7, 8, 9]
