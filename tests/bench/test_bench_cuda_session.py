"""`helixrt bench cuda_session`: end to end on a GPU and, tiny, on the CPU; its figures from what ranks have left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helixrt.bench import cuda_session
from helixrt.bench._cuda_session_rank import Commit
from helixrt.cli import main
from helixrt.errors import Fatal
from helixrt.record import Event, Kind

TINY = ("--layers", "2", "--dim", "64", "--batch", "2", "--seq-len", "32", "--blocks", "1", "--steps", "6", "--steps-one", "6")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)], ids=str
)
@pytest.mark.timeout(480)
def test_a_killed_replica_is_measured_until_it_is_back(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    few = ("--kill-at", "8", "--after", "8", "--limit-s", "300")
    assert main(["bench", "cuda_session", "--device", device, *TINY, *few, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    for name in ("before", "after", "plain", "ddp", "one", "one_plain"):
        assert written["figures"][f"step_{name}_ms"]["p50"] > 0
    assert 0 <= written["figures"]["hidden_share"]["p50"] <= 1
    loss = written["loss"]
    assert 0 < loss["next_commit_s"] <= loss["rejoined_s"] and loss["fetched_bytes"] > 0 and loss["fetch_s"] > 0
    assert (written["peak_bytes"]["session"] > 0) == (device == "cuda")
    assert "kill to first contribution" in capsys.readouterr().out


def commits(*replicas: int) -> list[Commit]:
    """One each second; backward ends half a second before."""
    return [Commit(step, count, step - 0.5, float(step)) for step, count in enumerate(replicas, 1)]


def event(kind: Kind, step: int, begin_s: float, end_s: float, nbytes: int) -> Event:
    return Event(kind, "r0", step, begin_s, end_s, {"bytes": nbytes})


def test_steps_are_told_apart_by_who_contributed() -> None:
    found = cuda_session.phases(commits(*[2] * 8, *[1] * 6, *[2] * 7), kill_at=8, behind={1, 13, 14})
    assert [c.step for c in found["before"]] == [4, 5, 6, 7, 8]
    assert [c.step for c in found["alone"]] == [12] and [c.step for c in found["catching_up"]] == [13, 14]
    assert [c.step for c in found["after"]] == [18, 19, 20, 21]
    assert cuda_session.step_ms(found["after"]) == [1000.0] * 3
    assert cuda_session.step_ms([*commits(2, 2), Commit(4, 2, 7.0, 9.0)]) == [1000.0], "a step is missing in between"


def test_what_a_loss_took() -> None:
    made = commits(2, 2, 2, 1, 1, 2)
    snapshots = [event(Kind.SNAPSHOT, 4, 4.0, 4.25, 8), event(Kind.APPLY, 4, 0.0, 9.0, 0)]
    fetches = [event(Kind.FETCH_END, 5, 4.0, 4.5, 600), event(Kind.FETCH_END, 5, 4.5, 5.0, 400)]
    found = cuda_session.loss_of(made, 3.25, 3, snapshots, fetches)
    assert (found.next_commit_s, found.rejoined_s, found.steps_alone) == (0.75, 2.75, 2)
    assert (found.snapshot_s, found.fetched_bytes, found.fetch_s) == (0.25, 1000, 1.0)
    assert cuda_session.loss_of(made[:5], 3.25, 3, [], []).rejoined_s is None
    with pytest.raises(Fatal, match="made no update"):
        cuda_session.loss_of(made[:3], 3.25, 3, [], [])


def test_gradients_are_hidden_whose_exchange_ended_before_backward() -> None:
    """A step that no bucket is known of has no share."""
    buckets = [event(Kind.EXCHANGE_BUCKET, 1, 0.1, 0.4, 30), event(Kind.EXCHANGE_BUCKET, 1, 0.4, 0.6, 10)]
    assert cuda_session.hidden_shares(commits(2, 2), buckets) == [0.75]


def test_sides_that_train_apart_give_no_figure() -> None:
    cuda_session.check_alike([5.0, 4.0, 3.0], [5.0001, 4.0], "float32")
    with pytest.raises(Fatal, match="losses of step 2 are 4.0 and 4.02"):
        cuda_session.check_alike([5.0, 4.0, 3.0], [5.0, 4.02, 3.0], "float32")
    cuda_session.check_alike([5.0, 4.0], [5.0, 4.02], "bfloat16")


@pytest.mark.parametrize("wrong", [["--kill-at", "5"], ["--after", "5"], ["--steps", "5"], ["--steps-one", "5"]])
def test_settings_that_cannot_work(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cuda_session", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cuda_session"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
