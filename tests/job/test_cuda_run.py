"""Runs of `helixrt.run` on a GPU: two replicas as processes on one GPU, one of which is killed and rejoins; resumption; memory
and waits of a step. The first case runs on the CPU as well, so that the comparison itself is tried everywhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from helixrt.engines.random_state import set_random_state
from helixrt.job.checkpoint import newest_complete
from helixrt.job.forerunner import Forerunner
from helixrt.job.sampler import StreamSampler
from helixrt.job.warm_up import PROGRAM, rank_environment
from tests.examples.runs import KILLED, check_killed_run, folder_of, run
from tests.job import cuda_script
from tests.job.lineage_oracle import chain, follow, parameters_digest, reported

SCRIPT = Path(cuda_script.__file__)
STEPS = 30
SLACK_BYTES = 4 << 20  # of small tensors, and what the allocator rounds up
pytestmark = pytest.mark.timeout(480)


def one_process(folder: Path, device: str, dtype: torch.dtype, case: str) -> nn.Module:
    """The model after the steps of the lineage, in plain PyTorch on the same device."""
    torch.manual_seed(cuda_script.SEED)
    model = cuda_script.Model().to(device)
    optimizer = cuda_script.optimizer_of(model, case)
    items = cuda_script.data()
    samplers = [StreamSampler(len(items), 2, replica, shuffle=True, seed=cuda_script.SEED) for replica in range(2)]
    batches = -(-len(samplers[0]) // cuda_script.BATCH)

    def batch_at(replica: int, position: int) -> tuple[torch.Tensor, ...]:
        samplers[replica].set_epoch(position // batches)
        first = cuda_script.BATCH * (position % batches)
        ids = samplers[replica].order()[first : first + cuda_script.BATCH]
        return tuple(each.to(device) for each in items[ids])

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
            return cuda_script.loss_of(model, *batch), len(batch[0])

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    follow(chain(folder), model, batch_at, lambda r, p: set_random_state(cuda_script.SEED, r, 0, p), loss, update)
    return model.cpu()


def check_parameters(folder: Path, model: nn.Module) -> None:
    """Both replicas have ended with the model's parameters, bit for bit. What differs is looked for in the last checkpoint."""
    expected, found = parameters_digest(model), reported(folder)
    if found == [expected, expected]:
        return
    saved = newest_complete(folder / "checkpoints")
    assert saved is not None
    loaded = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    dcp.load({"model": loaded}, checkpoint_id=saved.folder, no_dist=True)
    apart = {name: (loaded[name].double() - value.double()).abs().max().item() for name, value in model.state_dict().items()}
    raise AssertionError(
        f"replicas {found}, one process {expected}; of step {saved.record.step}, largest differences: "
        f"{({name: most for name, most in apart.items() if most}) or 'none'}"
    )


@pytest.mark.system
@pytest.mark.parametrize(
    ("device", "dtype", "case"),
    [
        pytest.param("cpu", torch.bfloat16, "adamw", marks=pytest.mark.slow),
        pytest.param("cuda", torch.float32, "adamw", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, "fused", marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, "adamw", marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_a_killed_replica_rejoins_and_the_result_is_that_of_one_process(
    device: str, dtype: torch.dtype, case: str, tmp_path: Path
) -> None:
    given = "--device", device, "--dtype", str(dtype).removeprefix("torch.")
    done = run(KILLED, STEPS, tmp_path, SCRIPT, case, 2, 1, "auto", *given)
    folder = folder_of(tmp_path)
    check_killed_run(done, folder, STEPS)
    check_parameters(folder, one_process(folder, device, dtype, case))


@pytest.mark.gpu
def test_replicas_are_equal_with_a_gradient_scaler_that_overflows_at_first(tmp_path: Path) -> None:
    done = run(KILLED, STEPS, tmp_path, SCRIPT, "scaled", 2, 1, "auto", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = folder_of(tmp_path)
    assert len(set(reported(folder))) == 1 and len(reported(folder)) == 2
    applied = [record.applied for record in chain(folder)[1:]]
    assert not all(applied) and any(applied)


@pytest.mark.system
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_goes_on_from_a_checkpoint(device: str, tmp_path: Path) -> None:
    first = run(SCRIPT, 10, tmp_path, SCRIPT, "adamw", device)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = folder_of(tmp_path)
    second = run(SCRIPT, 16, tmp_path, SCRIPT, "adamw", device, folder)
    assert second.returncode == 0, second.stdout + second.stderr
    records = chain(folder)
    assert [record.step for record in records] == list(range(17))
    check_parameters(folder, one_process(folder, device, torch.float32, "adamw"))


@pytest.mark.gpu
def test_two_gradient_sized_sets_are_on_the_device(tmp_path: Path) -> None:
    """By what a rank says, and by torch's allocator: one more set than a plain loop has, which has its gradients."""
    done = run(SCRIPT, 8, tmp_path, SCRIPT, "memory", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    for replica in range(2):
        figures = json.loads((tmp_path / f"memory{replica}.json").read_text())
        live, one = figures["live"], figures["set"]
        assert one <= live["local"] <= one + SLACK_BYTES and one <= live["sums"] <= one + SLACK_BYTES, figures
        assert live["kept"] == live["served"] == live["snapshots"] == 0, figures
        assert figures["session"] <= figures["plain"] + one + SLACK_BYTES, figures


@pytest.mark.gpu
def test_the_host_waits_for_the_device_at_the_commit_alone(tmp_path: Path) -> None:
    """For whether gradients are finite, for the book (weight and presence), and for what is compared of the parameters. The
    copy for a checkpoint, which the last step has, is awaited by the thread that writes it."""
    done = run(SCRIPT, 10, tmp_path, SCRIPT, "waits", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "waits.json").read_text())
    assert len(steps) == 6
    for places in steps:
        inner = sorted(place.rpartition(" > ")[2].partition(":")[0] for place in places)
        assert inner == ["exchange_book.read", "finite.all_finite", "samples.result"], "\n".join(places)


@pytest.mark.gpu
def test_ranks_are_forks_of_a_process_that_has_not_touched_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports of a rank initialize no driver, else each would be started from nothing."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    forerunner = Forerunner(PROGRAM, {**os.environ, **rank_environment(1)})
    try:
        assert forerunner.is_ready(wait_s=240.0)
    finally:
        forerunner.close()


def test_tensor_parallel_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from helixrt.errors import ConfigError
    from helixrt.job.mesh import Mesh
    from helixrt.job.placement import device_of
    from helixrt.job.session_host import SessionSettings

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="of 2 ranks needs a CUDA device for each, and this host has 1"):
        device_of(SessionSettings(device="cuda", mesh=Mesh(tp=2)))
    assert device_of(SessionSettings(device="cuda", replica=1, replicas=2)) == torch.device("cuda", 0)
