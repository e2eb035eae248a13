"""examples/unfreezing.py: layers are trained from their step on as in one process, over a kill and a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from helixrt.protocol.step.lineage import CommitRecord
from tests.examples.runs import KILLED, ROOT, check_killed_run, check_lineage, dealt, folder_of, imported, run
from tests.job.lineage_oracle import follow, parameters_digest, reported

EXAMPLE, SEED = ROOT / "examples" / "unfreezing.py", 1


def in_one_process(records: list[CommitRecord]) -> nn.Module:
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = module.layers()
    optimizer, number = module.optimizer_of(model), 1

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        model.requires_grad_(True)
        for part in module.not_trained(model, number):
            part.requires_grad_(False)
        return (model(batch[0]) - batch[1]).square().sum(), module.BATCH

    def update() -> None:
        nonlocal number
        frozen = {id(p) for part in module.not_trained(model, number) for p in part.parameters()}
        assert frozen == {id(p) for p in model.parameters() if p.grad is None}
        optimizer.step()
        number += 1

    begin = partial(set_random_state, SEED)
    follow(records, model, dealt(module.data(), module.BATCH, SEED), lambda r, p: begin(r, 0, p), loss, update)
    firsts = [first for part, first in zip(model, module.FROM, strict=True) for _ in part.parameters()]
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [number - first for first in firsts]
    return model


@pytest.mark.system
@pytest.mark.timeout(480)
def test_layers_are_unfrozen_while_a_replica_is_lost_and_after_it_is_back(tmp_path: Path) -> None:
    done = run(KILLED, 40, tmp_path, EXAMPLE)
    folder = folder_of(tmp_path)
    records = check_killed_run(done, folder, 40)
    assert reported(folder) == [parameters_digest(in_one_process(records))] * 2


@pytest.mark.system
@pytest.mark.timeout(480)
def test_a_resumed_run_unfreezes_the_next_layer(tmp_path: Path) -> None:
    for steps, resumed in ((8, ()), (24, ("latest",))):
        done = run(EXAMPLE, steps, tmp_path, *resumed)
        assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(tmp_path)
    assert reported(folder) == [parameters_digest(in_one_process(check_lineage(folder, 24)))] * 2
