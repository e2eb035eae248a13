"""A run of two replicas in two stages, one of them killed, goes on with other replicas, stages and shards: every item enters
the parameters once, and they are those of one process that reads the same batches, by plain PyTorch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from helixrt.job.checkpoint import newest_complete
from helixrt.protocol.step.lineage import CommitRecord, audit
from tests import programs
from tests.job.lineage_oracle import chain

SCRIPT = Path(__file__).with_name("resharded_script.py")
FIRST = 20
SECOND = 44  # batches that the second life sums: it comes into the next epoch, and not to the end of that one


def launch(folder: Path, replicas: int, pp: int, dp_shard: int, steps: int, *resume: str) -> None:
    programs.succeeded(SCRIPT, folder, replicas, pp, dp_shard, steps, *resume, timeout=220)


def run_of(folder: Path) -> Path:
    (run,) = folder.glob("2*/*")
    return run


def batches_of(folder: Path, records: list[CommitRecord]) -> list[list[list[int]]]:
    """For each update the ids of the batches that were summed in it."""
    read: dict[tuple[int, int, int, int], list[int]] = {}  # (deals, replica, shard, position); stages read the same
    for path in folder.glob("ids.*.jsonl"):
        replica, shard = map(int, path.name.split(".")[1:3])
        for line in path.read_text().splitlines():
            lives, position, ids = json.loads(line)
            assert read.setdefault((lives, replica, shard, position), ids) == ids
    found = []
    for before, record in zip(records, records[1:], strict=False):
        step = []
        for replica in record.summed:
            position = before.positions.get(replica, 0) if before.deal == record.deal else 0
            keys = sorted(key for key in read if (key[0], key[1], key[3]) == (len(record.deal), replica, position))
            step += [read[key] for key in keys]
        found.append(step)
    return found


def before_the_first_repeat(ids: list[int]) -> list[int]:
    seen: set[int] = set()
    for count, each in enumerate(ids):
        if each in seen:
            return ids[:count]
        seen.add(each)
    return ids


def trained_plainly(script: Any, batches: list[list[list[int]]]) -> tuple[nn.Module, list[float]]:
    model = script.Model()
    optimizer, scheduler = script.optimizer_of(model.parameters())
    x, y = script.examples()
    losses = []
    for step in batches:
        optimizer.zero_grad()
        terms = [nn.functional.mse_loss(model(x[ids]), y[ids]) for ids in step]
        loss = torch.stack(terms).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), script.CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model, losses


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path), "1", "1", "1", "1"])
    monkeypatch.delitem(sys.modules, "tests.job.resharded_script", raising=False)
    from tests.job import resharded_script

    return resharded_script


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first life: two replicas in two stages, whose streams come differently far."""
    folder = tmp_path_factory.mktemp("first")
    launch(folder, 2, 2, 1, FIRST)
    return folder


@pytest.mark.slow  # two drivers and up to nine ranks that import torch
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("replicas", "pp", "dp_shard"), [(1, 4, 1), (3, 1, 1), (1, 1, 2), (1, 2, 2)])
def test_a_run_goes_on_with_other_replicas_stages_and_shards(
    replicas: int, pp: int, dp_shard: int, first: Path, tmp_path: Path, script: Any
) -> None:
    folder, last = tmp_path / "run", FIRST + SECOND // (replicas * dp_shard)
    shutil.copytree(first, folder, symlinks=True)
    launch(folder, replicas, pp, dp_shard, last, str(run_of(folder)))
    records = chain(run_of(folder))
    assert [record.step for record in records] == list(range(last + 1)) and audit(records, 1).clean
    assert len(set(records[FIRST].positions.values())) == 2, "the streams of the first life had come differently far"
    batches = batches_of(folder, records)
    assert [len(step) for step in batches[FIRST:]] == [replicas * dp_shard] * (last - FIRST)
    entered = [each for step in batches for ids in step for each in ids]
    epoch = before_the_first_repeat(entered)
    left_out = script.ITEMS - len(epoch)
    assert 0 <= left_out < 2 * replicas * dp_shard * script.BATCH, "every item of the epoch, but for what fills no batches"
    following = entered[len(epoch) :]
    assert following and len(before_the_first_repeat(following)) == len(following), "and so on in the next one"

    model, losses = trained_plainly(script, batches)
    found = newest_complete(run_of(folder) / "checkpoints")
    assert found is not None and found.record.step == last and found.mesh["pp"] == pp
    loaded = script.Model().state_dict()
    dcp.load({"model": loaded}, checkpoint_id=found.folder, no_dist=True)
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert (loaded[name] - value).abs().max() < 1e-9, name
    logged = logged_losses(run_of(folder), records)
    assert set(range(FIRST + 1, last + 1)) <= logged.keys()
    assert {step: losses[step - 1] for step in logged} == pytest.approx(logged, rel=0, abs=1e-9)


def logged_losses(run: Path, records: list[CommitRecord], kind: str = "logged", name: str = "loss") -> dict[int, float]:
    """Of each step whose contributors have all logged it, the mean over them; one that was killed has not always."""
    found: dict[int, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == kind:
            found.setdefault(entry["step"], {})[entry["replica"]] = entry.get("values", entry)[name]
    by_step = {record.step: [found.get(record.step, {}).get(replica) for replica in record.summed] for record in records[1:]}
    return {step: sum(losses) / len(losses) for step, losses in by_step.items() if losses and None not in losses}  # type: ignore[arg-type]
