"""The main job with gradients that are not finite: nothing of them enters the parameters, and the report names their rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

JOB = Path(__file__).with_name("nonfinite_job.py")
SIZE = (
    "+experiment=tiny", "launcher=local", "chaos.kill=[]", "steps=8", "checkpoint.every=4", "eval.every=0", "eval.batches=1",
    "model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64",
    "data.batch=8", "data.seq_len=32", "schedule.microbatches=2",
)  # fmt: skip


def trained(folder: Path, spoilt: list[tuple[int, int, int]], *overrides: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and report of a run in which (replica, rank, position) have such gradients."""
    argv = [sys.executable, str(JOB), json.dumps(spoilt), *SIZE, f"output.root={folder}", *overrides]
    ended = programs.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False)
    return ended.returncode, ended.stdout, json.loads((folder / "latest" / "report.json").read_text())


@pytest.mark.system
@pytest.mark.timeout(240)
def test_a_gradient_that_is_not_finite_is_excluded_and_named(tmp_path: Path) -> None:
    code, output, report = trained(tmp_path, [(1, 1, 2), (0, 0, 5), (1, 0, 5)], "heartbeat_s=10")  # both in every step
    assert code == 0, output
    audit = report["data_audit"]
    assert (audit["batches"], audit["excluded"], audit["gaps"], audit["repeats"]) == (13, 3, 0, 0)
    assert audit["per_replica"] == {"0": 8, "1": 8}
    one, all_ = report["exclusions"]
    assert one["step"] == 3 and one["applied"]
    assert "replica 1 is excluded: the gradient of its rank 1 is not finite" in one["what"] and one["what"] in output
    assert all_["step"] == 6 and not all_["applied"] and "nothing is updated" in all_["what"]
    assert len({r["parameters_digest"] for r in report["replicas"]}) == 1
