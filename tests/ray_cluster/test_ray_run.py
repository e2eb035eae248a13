"""`helixrt.run` inside a Ray job: the ranks of a user's script are actors and find it in the job's working directory."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helixrt.protocol.step.lineage import audit
from tests import programs
from tests.job.lineage_oracle import chain, reported
from tests.job.test_train_function import MAIN_SCRIPT, check_main_script

pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0  # half a minute on a machine with nothing else to do


def submitted(ray_head: Any, folder: Path, case: str, script: str | Path = "session_script.py") -> tuple[int, str]:
    """Submit the script in a working directory of its own; the job's exit code and output."""
    from ray.job_submission import JobSubmissionClient

    shutil.copy(Path(__file__).parent / script, folder / "train.py")
    client = JobSubmissionClient(ray_head.dashboard)
    environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    job = client.submit_job(
        entrypoint=f"{sys.executable} train.py '{case}' {folder / 'out'}",
        runtime_env={"working_dir": str(folder), "env_vars": environment},
    )
    deadline = time.monotonic() + DEADLINE_S
    while not client.get_job_status(job).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs(job)
        time.sleep(0.2)
    code = client.get_job_info(job).driver_exit_code
    assert code is not None, client.get_job_info(job).message
    return code, client.get_job_logs(job)


@pytest.mark.smoke
def test_a_script_loses_a_replica_and_ends_with_every_batch_once(ray_head: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, said = submitted(ray_head, tmp_path, "killed")
    assert code == 0, said
    folder = (tmp_path / "out" / "latest").resolve()
    records = chain(folder)
    found = audit(records)
    assert found.clean and found.batches == sum(len(record.summed) for record in records)
    assert records[-1].step == 40 and f"ended at step 40 of {records[-1].hash}" in said
    assert any((1, 0) in record.contributors for record in records) and any((1, 1) in r.contributors for r in records[6:])
    assert len(reported(folder)) == 2 and len(set(reported(folder))) == 1
    assert "r1      restarted (incarnation 1)" in said
    assert json.loads((folder / "report.json").read_text())["data_audit"]["repeats"] == 0


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no commit", "the run failed: .*step 1 was not committed; call step.commit\\(\\) at the end of each step"),
        ("lambda", "helixrt.errors.ConfigError: train=<lambda>: is a lambda; ranks import it by its name"),
    ],
)
def test_a_wrong_script_ends_with_its_reason(case: str, reason: str, ray_head: Any, tmp_path: Path) -> None:
    code, said = submitted(ray_head, tmp_path, case)
    assert code == 1 and re.search(reason, said), said
    assert "restarted" not in said


def test_a_rank_has_the_script_as_plain_python_has_it(ray_head: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    programs.succeeded(MAIN_SCRIPT, "write", tmp_path / "out")
    code, said = submitted(ray_head, tmp_path, "run", MAIN_SCRIPT)
    assert code == 0, said
    check_main_script(tmp_path / "out", None)
