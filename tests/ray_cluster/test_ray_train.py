"""Ray Train's TorchTrainer with TorchftConfig on `ProcessGroupHelix`: a worker that fails joins the others again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip(
    "ray.train.v2.torch.torchft_config", reason="Ray without ray[train], or without TorchftConfig", exc_type=ImportError
)


@pytest.mark.ray
@pytest.mark.slow  # a Ray cluster of its own, two workers, one of them twice
@pytest.mark.timeout(480)
def test_a_worker_that_fails_takes_part_again(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(Path(__file__).with_name("train_torchft.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=450)
    assert done.returncode == 0 and "fitted" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "raised").exists()
    first, second = (json.loads((tmp_path / f"worker.{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"], "the worker that joined has other weights"
    alone = [int(step) for step, participants in first["participants"].items() if participants == 1]
    together = [int(step) for step, participants in first["participants"].items() if participants == 2]
    assert alone and max(together) > max(alone), "it has not taken part again"
