"""A run over real ranks whose batches have several lengths: it trains as a plain loop does, and its graphs are bounded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.job.sampler import StreamSampler
from helixrt.protocol.step.lineage import CommitRecord
from tests import programs
from tests.job.lineage_oracle import chain, follow, reported

SCRIPT = Path(__file__).parent / "lengths_script.py"


def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("lengths_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "argv", ["lengths_script.py", "nowhere"])  # it reads them
    monkeypatch.setattr("helixrt.pipeline.measured_units.LEAST_STEP_S", 0.0)  # it sets it
    spec.loader.exec_module(module)
    return module


def plain_losses(module: ModuleType, records: list[CommitRecord]) -> tuple[list[float], set[tuple[int, ...]]]:
    """The mean loss of each step of the lineage, and the shapes of all batches."""
    model, items = module.build(), module.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    orders = [StreamSampler(len(items), module.REPLICAS, r, shuffle=True, seed=4).order() for r in range(module.REPLICAS)]
    means, parts, shapes = list[float](), list[float](), set[tuple[int, ...]]()

    def batch_at(replica: int, position: int) -> Any:
        ids = orders[replica][module.BATCH * position : module.BATCH * (position + 1)]
        batch = module.bucketed([items[int(each)] for each in ids])
        shapes.add(tuple(batch[0].shape))
        return batch

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        value = mse_loss(model(batch[0]), batch[1])
        parts.append(float(value.detach()))
        return value, 1.0

    def update() -> None:
        means.append(sum(parts) / len(parts))
        parts.clear()
        optimizer.step()

    follow(records, model, batch_at, lambda replica, position: None, loss, update)
    return means, shapes


@pytest.mark.slow  # four processes that import torch and its compiler, and capture a model several times
@pytest.mark.timeout(480)
def test_a_run_with_more_lengths_than_graphs_trains_as_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script(monkeypatch)
    programs.succeeded(SCRIPT, tmp_path, timeout=440, HELIXRT_CACHE=str(tmp_path / "cache"))
    run = (tmp_path / "latest").resolve()
    records = chain(run)
    assert records[-1].step == module.STEPS and len(set(reported(run))) == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["values"]["loss"] for line in lines if line["what"] == "step" and line["replica"] == 0}
    expected, shapes = plain_losses(module, records)
    assert [losses[step] for step in range(1, module.STEPS + 1)] == pytest.approx(expected, rel=1e-6)
    assert len(shapes) == len(module.LENGTHS) > module.SHAPES  # so graphs were dropped
    (kept,) = run.glob("layer_times_*.json")  # what all ranks were cut by
    assert {"times", "reason", "seconds"} == json.loads(kept.read_text()).keys()
