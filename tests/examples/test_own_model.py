"""examples/own_model.py: a replica is killed and rejoins; nothing is lost, nothing comes twice, and the result is exact."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from helixrt.compile.materialize import materialize
from helixrt.engines.random_state import set_random_state
from helixrt.job.sampler import StreamSampler
from tests.examples.runs import KILLED, ROOT, check_killed_run, check_ranks, folder_of, imported, run
from tests.job.drawn import Divided, Drawn, nowhere, over_positions
from tests.job.lineage_oracle import chain, follow, parameters_digest, reported

EXAMPLE = ROOT / "examples" / "own_model.py"
STEPS, SEED, MICROBATCHES = 50, 1, 4


def one_process(folder: Path, captured: Divided | None = None) -> tuple[nn.Module, list[float]]:
    """The example's model after the steps of the lineage, in plain PyTorch, and the mean loss of each step. `captured`: of a
    captured model, with its weights, its micro-batches, and what its ranks drop."""
    module = imported(EXAMPLE)
    torch.manual_seed(SEED)
    model = module.GPT2LMHeadModel(module.CONFIG)
    if captured is not None:
        start_as_captured(model, module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = module.DATA.tensors[0]
    samplers = [StreamSampler(len(windows), 2, replica, shuffle=True, seed=SEED) for replica in range(2)]
    batches = -(-len(samplers[0]) // 4) if captured is None else len(samplers[0]) // 4
    means, parts = [], []
    at = (0, 0)

    def batch_at(replica: int, position: int) -> torch.Tensor:
        samplers[replica].set_epoch(position // batches)
        first = 4 * (position % batches)
        return windows[samplers[replica].order()[first : first + 4]]

    def begin(replica: int, position: int) -> None:
        nonlocal at
        at = replica, position
        set_random_state(SEED, replica, 0, position)

    def loss(model: nn.Module, tokens: Any) -> tuple[torch.Tensor, float]:
        if captured is None:
            value, weight = model(tokens, labels=tokens).loss * tokens.numel(), tokens.numel()
        else:
            rows, (replica, position) = tokens.chunk(MICROBATCHES), at
            found = []
            for number, row in enumerate(rows):
                with Drawn(SEED, position, number, captured, replica):
                    found.append(cross_entropy(model(row).logits.mT, row.roll(-1, 1)))
            value, weight = torch.stack(found).mean(), 1
        parts.append((float(value.detach()), weight))
        return value, weight

    def update() -> None:
        means.append(sum(value for value, _ in parts) / sum(weight for _, weight in parts))
        parts.clear()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    follow(chain(folder), model, batch_at, begin, loss, update)
    return model, means


def start_as_captured(model: nn.Module, module: ModuleType) -> None:
    """Give the model the weights that a captured one begins with."""
    with torch.device("meta"):
        twin = module.GPT2LMHeadModel(module.CONFIG)
    made = materialize(twin, [name for name, _ in twin.named_parameters()], seed=SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(made.parameters[name])


def check_losses(folder: Path, expected: list[float]) -> None:
    """Replica 0 has logged those of one process, but for rounding in float32."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["values"]["loss"] for line in logged if line["replica"] == 0}
    assert set(losses) == set(range(1, STEPS + 1))
    for step, mean in enumerate(expected, 1):
        assert abs(losses[step] - mean) < 1e-3 * mean, f"step {step}: {losses[step]}, one process {mean}"


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.system
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "membership", [pytest.param("auto", marks=pytest.mark.smoke), pytest.param("store", marks=pytest.mark.slow)]
)
def test_a_killed_replica_rejoins_and_the_result_is_that_of_one_process(membership: str, tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, EXAMPLE, "", 2, 1, membership)
    folder = folder_of(tmp_path)
    check_killed_run(done, folder, STEPS)
    expected = parameters_digest(one_process(folder)[0])
    assert reported(folder) == [expected, expected]

    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in logged if line["replica"] == 0} == set(range(1, STEPS + 1))
    assert all(0 < line["values"]["loss"] < 6 for line in logged)


@pytest.mark.slow  # four or eight processes that import torch and transformers and capture the model, a half of them twice
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("axes", "ranks", "divided"),
    [
        (("--pp", 2), ("pp0", "pp1"), nowhere),
        (("--pp", 2, "--tp", 2), ("pp0", "pp1", "pp0.tp1", "pp1.tp1"), nowhere),
        (("--cp", 2), ("pp0", "pp0.cp1"), over_positions(2)),
        (("--tp", 2), ("pp0", "pp0.tp1"), None),
    ],
    ids=["pp2", "pp2-tp2", "cp2", "tp2"],
)
def test_a_replica_of_several_ranks_of_an_unmodified_model_is_killed_and_rejoins(
    axes: tuple[str, int], ranks: tuple[str, ...], divided: Divided | None, tmp_path: Path
) -> None:
    """Each rank fetches its own part of the state; losses are those of one process, but for rounding."""
    done = run(KILLED, STEPS, tmp_path, EXAMPLE, "", 2, 1, "auto", *axes)
    folder = folder_of(tmp_path)
    check_killed_run(done, folder, STEPS)
    check_ranks(folder, STEPS, ranks=ranks)
    assert len(reported(folder)) == 2 and len(set(reported(folder))) == 1
    check_losses(folder, one_process(folder, divided)[1])
