"""examples/deepspeed_zero.py: one rank of a replica is killed; each rank fetches its partition, and the losses are those of one
process with plain PyTorch, within rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from helixrt.job.sampler import StreamSampler
from tests.examples.runs import KILLED, ROOT, check_killed_run, check_ranks, folder_of, imported, run
from tests.job.lineage_oracle import chain, follow, reported

pytest.importorskip("deepspeed")
EXAMPLE = ROOT / "examples" / "deepspeed_zero.py"
SEED, STREAMS, RANKS, ROWS, ACCUMULATE, STEPS = 1, 4, 2, 4, 2, 24


def losses_of_one_process(folder: Path) -> list[float]:
    """The mean loss of each step, over all ranks of its contributors."""
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    model = module.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=module.CONFIG["optimizer"]["params"]["lr"])
    windows = module.text().tensors[0]
    samplers = [StreamSampler(len(windows), STREAMS, stream, shuffle=True, seed=SEED) for stream in range(STREAMS)]
    usable = -(-len(samplers[0]) // ROWS) // ACCUMULATE * ACCUMULATE
    found: list[float] = []
    parts: list[float] = []

    def rows(replica: int, rank: int, position: int) -> torch.Tensor:
        sampler = samplers[replica * RANKS + rank]
        sampler.set_epoch(position // usable)
        first = ROWS * (position % usable)
        return windows[sampler.order()[first : first + ROWS]]

    def loss(model: nn.Module, at: tuple[int, int]) -> tuple[torch.Tensor, float]:
        each = []
        for rank in range(RANKS):
            replica, position = at
            set_random_state(SEED, replica, rank, position)
            tokens = rows(replica, rank, position)
            each.append(model(tokens, labels=tokens).loss)
        parts.extend(value.item() for value in each)
        return torch.stack(each).sum(), RANKS

    def update() -> None:
        found.append(sum(parts) / len(parts))
        parts.clear()
        nn.utils.clip_grad_norm_(model.parameters(), module.CONFIG["gradient_clipping"])
        optimizer.step()

    follow(chain(folder), model, lambda r, p: (r, p), lambda r, p: None, loss, update, ACCUMULATE)
    return found


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 75


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize("stage", [2, *(pytest.param(other, marks=[pytest.mark.slow, pytest.mark.grid]) for other in (1, 3))])
def test_a_replica_that_loses_a_rank_returns_whole(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_STAGE", str(stage))
    done = run(KILLED, STEPS, tmp_path, EXAMPLE, "", 2, RANKS)
    folder = folder_of(tmp_path)
    check_killed_run(done, folder, STEPS, ACCUMULATE)
    check_ranks(folder, STEPS, ACCUMULATE, ("pp0", "pp0.dp1"))
    assert len(set(reported(folder))) == 1
    assert len({r["state_digest"] for r in json.loads((folder / "report.json").read_text())["replicas"]}) == 1
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["values"]["loss"] for line in logged if line["replica"] == 0}
    expected = losses_of_one_process(folder)
    assert [losses[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-5)
