"""A run of a captured model goes on over another mesh: its parameters are then those of one process that goes through all its
batches, by plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from helixrt.job.checkpoint import newest_complete
from tests import programs
from tests.job import recut_script as script
from tests.job.lineage_oracle import chain
from tests.job.test_resharded_run import logged_losses, run_of

FIRST, LAST = 5, 12
CHANGES = {  # pp, cp, tp: before and after
    "from context ranks to stages": ((1, 2, 1), (2, 1, 1)),
    "to context ranks": ((2, 1, 1), (1, 2, 1)),
    "from tensor ranks to stages": ((1, 1, 2), (2, 1, 1)),
    "to tensor ranks": ((2, 1, 1), (1, 1, 2)),
}


def launch(folder: Path, mesh: tuple[int, int, int], steps: int, *resume: str) -> None:
    programs.succeeded("-m", "tests.job.recut_script", folder, *mesh, steps, *resume, timeout=220)


def trained_plainly(steps: int) -> tuple[nn.Module, list[float]]:
    model, losses = script.build(), []
    optimizer = script.optimizer_of(model)
    for step in range(steps):
        tokens = script.batches()[step % 10]
        loss = script.loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), script.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.slow  # two drivers, each with up to two ranks that import torch
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize("change", CHANGES)
def test_a_captured_model_goes_on_over_another_mesh(change: str, tmp_path: Path) -> None:
    before, after = CHANGES[change]
    launch(tmp_path, before, FIRST)
    launch(tmp_path, after, LAST, str(run_of(tmp_path)))
    run = run_of(tmp_path)
    model, losses = trained_plainly(LAST)
    found = newest_complete(run / "checkpoints")
    assert found is not None and found.record.step == LAST
    loaded = dict(script.build().named_parameters())  # a tied one by its first name
    dcp.load({"model": loaded}, checkpoint_id=found.folder, no_dist=True)
    for name, value in model.named_parameters():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert logged_losses(run, chain(run)) == pytest.approx(dict(enumerate(losses, 1)), rel=1e-6)
