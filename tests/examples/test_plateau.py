"""examples/plateau.py: the rate that the agreed loss gives is that of one process, over a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from tests.examples.runs import KILLED, ROOT, check_killed_run, dealt, folder_of, imported, logged, run
from tests.job.lineage_oracle import follow, parameters_digest, reported

EXAMPLE, STEPS, SEED = ROOT / "examples" / "plateau.py", 40, 1


@pytest.mark.system
@pytest.mark.timeout(480)
def test_the_scheduler_follows_the_loss_of_all_replicas(tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, EXAMPLE)
    folder = folder_of(tmp_path)
    records = check_killed_run(done, folder, STEPS)
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler, smoothed = module.ReduceLROnPlateau(optimizer, factor=0.5, patience=2), module.Smoothed()
    losses, rates = list[float](), list[float]()

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        value = (model(batch[0]) - batch[1]).square().sum()
        losses.append(value.item())
        return value, module.BATCH

    def update() -> None:
        optimizer.step()
        scheduler.step(smoothed.follow(sum(losses) / (len(losses) * module.BATCH)))
        rates.append(optimizer.param_groups[0]["lr"])
        losses.clear()

    torch.set_num_threads(1)
    follow(records, model, dealt(module.data(), module.BATCH, SEED), lambda r, p: set_random_state(SEED, r, 0, p), loss, update)
    assert reported(folder) == [parameters_digest(model)] * 2
    assert logged(folder, "learning_rate") == dict(enumerate(rates, 1)) and len(set(rates)) > 2
