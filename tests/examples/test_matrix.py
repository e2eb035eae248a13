"""The matrix of what a session trains, each case with a replica that is killed and rejoins: the result is that of one process.

The process applies the contributors of each commit record in plain PyTorch (`lineage_oracle`), and its parameters must be equal
bit for bit. Two terms have one sum whatever their order; with three replicas the oracle sums in the order of FTAR's plan.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from helixrt.engines.random_state import set_random_state
from helixrt.job.sampler import StreamSampler
from helixrt.protocol.step.lineage import CommitRecord
from tests.examples.matrix import BATCH, CASES, Case, data, summed
from tests.examples.runs import KILLED, check_killed_run, folder_of, run
from tests.job.lineage_oracle import follow, ftar_sum, parameters_digest, reported

SCRIPT = Path(__file__).with_name("matrix.py")
SEED = 1  # of killed.py


def in_one_process(records: list[CommitRecord], case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    model = case.model()
    update = case.updates(model).function(model)
    items = data().tensors
    samplers = [StreamSampler(len(items[0]), case.replicas, r, shuffle=True, seed=SEED) for r in range(case.replicas)]
    usable = -(-len(samplers[0]) // BATCH) // case.accumulate * case.accumulate

    def batch_at(replica: int, position: int) -> list[torch.Tensor]:
        samplers[replica].set_epoch(position // usable)
        first = BATCH * (position % usable)
        chosen = samplers[replica].order()[first : first + BATCH]
        return [part[chosen] for part in items]

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        return summed(model, *batch), len(batch[0])

    seed_at = partial(set_random_state, SEED)
    follow(records, model, batch_at, lambda r, p: seed_at(r, 0, p), loss, update, case.accumulate, ftar_sum)
    return model


def check(name: str, steps: int, root: Path) -> None:
    case = CASES[name]
    done = run(KILLED, steps, root, SCRIPT, name, case.replicas)
    records = check_killed_run(done, folder_of(root), steps, case.accumulate, case.replicas)
    torch.set_num_threads(1)
    expected = parameters_digest(in_one_process(records, case))
    assert reported(folder_of(root)) == [expected] * case.replicas


@pytest.mark.slow  # a driver and four processes that import torch
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", [name for name in CASES if name != "everything"])
def test_a_killed_replica_rejoins_and_the_result_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    check(name, 50, tmp_path)


@pytest.mark.system
@pytest.mark.timeout(480)
def test_everything_at_once(tmp_path: Path) -> None:
    """Two optimizers, schedulers, accumulation, BatchNorm, dropout, an average of the weights, workers of the loader."""
    check("everything", 20, tmp_path)


@pytest.mark.parametrize("elements", [1, 7, 1000, 70_000])
def test_the_oracles_sum_is_that_of_any_order_but_for_rounding(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    parts = [torch.randn(elements, generator=generator) for _ in range(3)]
    total = ftar_sum(parts)
    assert torch.allclose(total, parts[0] + parts[1] + parts[2], atol=1e-5)
    assert torch.equal(ftar_sum(parts[:2]), parts[0] + parts[1]) and torch.equal(ftar_sum(parts[:1]), parts[0])
