"""The main job, one replica of which was lost for some steps, goes on with other replicas, stages and shards: every window of
the text enters the parameters once, and the losses are those of one process that reads the same batches, by plain PyTorch."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from helixrt.protocol.step.lineage import audit
from helixrt.train.config import DataConfig, ModelConfig, OptimConfig
from helixrt.train.data import load_corpus, training_windows
from helixrt.train.engine import inputs_and_targets, token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.optimizer import adamw, cosine_with_warmup
from tests import programs
from tests.job.lineage_oracle import chain
from tests.job.test_resharded_run import batches_of, before_the_first_repeat, logged_losses, run_of
from tests.train.jobs import kills

SCRIPT = Path(__file__).with_name("dealt_job.py")
ITEMS, BATCH, SEED = 400, 8, 6
FIRST, SECOND = 20, 30  # steps of the first life; batches of the second one, which come into the next epoch
# Every second layer has experts; no choice is dropped, so an expert's result does not depend on what else is in the batch.
MODEL = ModelConfig(layers=4, dim=16, heads=2, ffn=32, experts=2, moe_every=2, capacity=2.0, auxiliary=0.0)
OPTIM = OptimConfig(min_lr_ratio=1.0, warmup_steps=3, clip=0.5)

pytestmark = [
    pytest.mark.slow,  # two drivers and up to nine ranks that import torch
    pytest.mark.timeout(480),
]


def launch(folder: Path, replicas: int, pp: int, dp_shard: int, steps: int, *more: str) -> None:
    overrides = [
        f"data.path={folder / 'text'}", f"data.batch={BATCH}", "data.seq_len=16", f"output.root={folder}", f"seed={SEED}",
        f"model.layers={MODEL.layers}", f"model.dim={MODEL.dim}", f"model.heads={MODEL.heads}", f"model.ffn={MODEL.ffn}",
        f"model.experts={MODEL.experts}", f"model.moe_every={MODEL.moe_every}", f"model.capacity={MODEL.capacity}",
        f"model.auxiliary={MODEL.auxiliary}",
        f"optim.min_lr_ratio={OPTIM.min_lr_ratio}", f"optim.warmup_steps={OPTIM.warmup_steps}", f"optim.clip={OPTIM.clip}",
        f"mesh.replicas={replicas}", f"mesh.pp={pp}", f"mesh.dp_shard={dp_shard}", f"steps={steps}", "checkpoint.every=10",
        "eval.every=0", "eval.batches=1", "step_timeout_s=300", "launcher=local", *more,
    ]  # fmt: skip
    done = programs.run([sys.executable, str(SCRIPT), *overrides], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr


def losses_of_one_process(text: Path, batches: list[list[list[int]]]) -> list[float]:
    data = DataConfig(str(text), BATCH, 16)
    windows = training_windows(load_corpus(data), data, 1)
    assert len(windows) == ITEMS
    model = build_chunk(MODEL, data.seq_len, 0, 1, seed=SEED, dtype=torch.float64)
    optimizer = adamw(model.parameters(), OPTIM)
    scheduler = cosine_with_warmup(optimizer, 1000, OPTIM)
    found = []
    for step in batches:
        optimizer.zero_grad()
        pairs = [inputs_and_targets(windows.batch(ids)) for ids in step]
        loss = torch.stack([token_loss(model(inputs), targets) for inputs, targets in pairs]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first life: two replicas in two stages, whose streams come differently far."""
    folder = tmp_path_factory.mktemp("first")
    letters = random.Random(3)
    (folder / "text").write_bytes(bytes(letters.randrange(256) for _ in range(round((ITEMS * 16 + 1) / 0.95))))
    launch(folder, 2, 2, 1, FIRST, kills((1, 4, "forward")))
    return folder


@pytest.mark.grid
@pytest.mark.parametrize(("replicas", "pp", "dp_shard"), [(1, 4, 1), (3, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_the_job_goes_on_with_other_replicas_stages_and_shards(
    replicas: int, pp: int, dp_shard: int, first: Path, tmp_path: Path
) -> None:
    folder, streams = tmp_path / "run", replicas * dp_shard
    last = FIRST + SECOND // streams
    shutil.copytree(first, folder, symlinks=True)
    launch(folder, replicas, pp, dp_shard, last, f"data.path={first / 'text'}", "resume=true")
    records = chain(run_of(folder))
    assert [record.step for record in records] == list(range(last + 1)) and audit(records, 1).clean
    assert len(set(records[FIRST].positions.values())) == 2, "the streams of the first life had come differently far"
    batches = batches_of(folder, records)
    assert [len(step) for step in batches[FIRST:]] == [streams] * (last - FIRST)
    entered = [each for step in batches for ids in step for each in ids]
    epoch = before_the_first_repeat(entered)
    assert 0 <= ITEMS - len(epoch) < 2 * streams * BATCH, "every window of the epoch, but for what fills no batches"
    following = entered[len(epoch) :]
    assert following and len(before_the_first_repeat(following)) == len(following), "and so on in the next one"

    losses = losses_of_one_process(first / "text", batches)
    logged = logged_losses(run_of(folder), records, "step", "loss_nats")
    assert set(range(FIRST + 1, last + 1)) <= logged.keys()
    assert {step: losses[step - 1] for step in logged} == pytest.approx(logged, rel=0, abs=1e-9)
