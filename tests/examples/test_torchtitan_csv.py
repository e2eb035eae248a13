"""examples/torchtitan_csv.py: PyTorch's pipeline runtime runs planned orders, with the gradients of one process."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from helixrt.cli import main
from tests import programs
from tests.examples.runs import ROOT

pytestmark = pytest.mark.system


def test_a_planned_file_is_run_by_torchs_runtime(tmp_path: Path) -> None:
    order = tmp_path / "order.csv"
    plan = ["schedule", "--policy", "helix", "--stages", "2", "--microbatches", "6", "--cost", "10,10,10", "--delay", "0:20"]
    assert main([*plan, "--format", "csv", "-o", str(order)]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*torchrun, str(ROOT / "examples" / "torchtitan_csv.py"), str(order)]
    done = programs.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-3000:]
    # Two processes write into one pipe, a line and its end apart.
    assert sorted(re.findall(r"rank \d: gradients equal to those of one process: (?:True|False)", done.stdout)) == [
        f"rank {rank}: gradients equal to those of one process: True" for rank in range(2)
    ]
