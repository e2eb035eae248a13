"""The built-in job as a user of the session: its data dealt again, its figures, and its loop beside plain PyTorch."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.engines.staged import StagePlace
from helixrt.errors import MisuseError
from helixrt.job.config import MeshConfig
from helixrt.job.stream import LENGTH_KEY, RESUMED
from helixrt.protocol.step.deal import Deal
from helixrt.record import FlightRecord
from helixrt.replica.store import MemoryRunStore
from helixrt.train.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig
from helixrt.train.data import load_corpus
from helixrt.train.engine import inputs_and_targets, token_loss
from helixrt.train.loop import LoopHooks, train
from helixrt.train.models.build import build_chunk
from helixrt.train.optimizer import adamw, cosine_with_warmup
from tests.job.session_world import LocalHost, session_with
from tests.train.test_data import batch_of


class JobHost(LocalHost):
    def connect_stages(self, device: torch.device) -> StagePlace:
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
    text = load_corpus(data).train
    model = build_chunk(config.model, data.seq_len, 0, 1, seed=config.seed)
    optimizer = adamw(model.parameters(), config.optim)
    scheduler = cosine_with_warmup(optimizer, config.steps, config.optim)
    told: list[dict[str, Any]] = []
    for number in range(config.steps):
        optimizer.zero_grad()
        inputs, targets = inputs_and_targets(batch_of(text, number, data, config.seed))
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


def test_the_loop_reads_what_other_streams_have_not_read(config: TrainConfig, tmp_path: Path) -> None:
    """Two replicas come differently far, and one goes on."""
    words = random.Random(4)
    (tmp_path / "text").write_bytes(bytes(words.randrange(256) for _ in range(1400)))
    read: list[bytes] = []

    def replica(steps: int, **settings: Any) -> MemoryRunStore:
        host = JobHost()
        hooks = LoopHooks(batch=lambda position, tokens: read.extend(row.numpy().tobytes() for row in tokens))
        train(session_with(host, seed=config.seed, **settings), replace(config, steps=steps), hooks)
        return host.store

    replica(4, replicas=2, replica=0)
    agreed = json.loads(replica(2, replicas=2, replica=1).get(LENGTH_KEY) or "")
    assert {key: agreed[key] for key in ("items", "shuffle", "batch")} == {"items": 110, "shuffle": True, "batch": 4}
    replica(21, deals=(Deal((4, 2), 1, 110, True, 4, agreed["batches"]),))
    assert len(read) == len(set(read)) == 27 * 4, "two of 110 windows do not fill a batch"


def test_a_run_whose_windows_were_dealt_in_another_order_is_not_continued(config: TrainConfig) -> None:
    """The built-in job had a loader of its own, whose records have the same positions and other windows."""
    data, host = config.data, JobHost()
    corpus = load_corpus(data)
    content = f"bytes of SHA-256 {corpus.sha256[:16]} in {data.batch} x {data.seq_len}"
    batches = (corpus.train.size - 1) // data.seq_len // data.batch
    before = {"batches": batches, "accumulate": 1, "stream": RESUMED, "content": content}
    host.store.put_if_absent(LENGTH_KEY, json.dumps(before))
    with pytest.raises(MisuseError, match="content_digest=windows of 12 bytes .*, and bytes of .* in the run that is resumed"):
        train(session_with(host, seed=config.seed), config)
