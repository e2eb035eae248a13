"""examples/gan.py: each model is trained in its turn as in one process, over a kill."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from tests.examples.runs import KILLED, ROOT, check_killed_run, dealt, folder_of, imported, logged, run
from tests.job.lineage_oracle import follow, parameters_digest, reported

EXAMPLE, STEPS, SEED = ROOT / "examples" / "gan.py", 40, 1


@pytest.mark.system
@pytest.mark.timeout(480)
def test_models_are_trained_by_turns(tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, EXAMPLE)
    folder = folder_of(tmp_path)
    records = check_killed_run(done, folder, STEPS)
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    both = module.models()
    steppers, number = module.optimizers(both), 1

    def update() -> None:
        nonlocal number
        steppers[module.turn(number)].step()
        number += 1

    def loss(_: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        return module.loss_sum(both, number, *batch), module.BATCH

    begin = partial(set_random_state, SEED)
    whole = nn.ModuleDict(both)
    follow(records, whole, dealt(module.data(), module.BATCH, SEED), lambda r, p: begin(r, 0, p), loss, update)
    assert reported(folder) == [parameters_digest(whole)] * 2
    for first, name in ((1, "discriminator"), (2, "generator")):
        assert list(logged(folder, name)) == list(range(first, STEPS + 1, 2))
