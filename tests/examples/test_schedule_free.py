"""examples/schedule_free.py: averaged weights are evaluated and saved, and training is that of one process, over a kill."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from tests.examples.runs import KILLED, ROOT, check_killed_run, dealt, folder_of, imported, logged, run
from tests.job.lineage_oracle import follow, parameters_digest, reported

EXAMPLE, STEPS, SEED = ROOT / "examples" / "schedule_free.py", 40, 1


pytest.importorskip("schedulefree", reason="needs the package schedulefree")


@pytest.mark.system
@pytest.mark.timeout(480)
def test_averaged_weights_are_evaluated_and_saved(tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, EXAMPLE)
    folder = folder_of(tmp_path)
    records = check_killed_run(done, folder, STEPS)
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = nn.Linear(8, 1)
    optimizer = module.AdamWScheduleFree(model.parameters(), lr=module.RATE)
    optimizer.train()
    held_out, figures = [part[:100] for part in module.data().tensors], list[float]()

    def averaged() -> nn.Module:
        """Of copies: `train` does not give the same bits back."""
        both = copy.deepcopy((model, optimizer))
        both[1].eval()
        return both[0]

    def update() -> None:
        optimizer.step()
        with torch.no_grad():
            figures.append(float(module.loss_sum(averaged(), *held_out) / 100))

    batch_at = dealt(module.data(), module.BATCH, SEED)
    begin = lambda replica, position: set_random_state(SEED, replica, 0, position)  # noqa: E731
    follow(records, model, batch_at, begin, lambda m, b: (module.loss_sum(m, *b), module.BATCH), update)
    assert reported(folder) == [parameters_digest(model)] * 2
    saved, expected = torch.load(folder / "model.pt"), averaged().state_dict()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert logged(folder, "value", "validation") == {step: figures[step - 1] for step in range(10, STEPS + 1, 10)}
