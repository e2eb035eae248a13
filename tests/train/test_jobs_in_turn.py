"""The main job twice in one process: the ranks of both are forks of one forerunner."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.train.jobs import DEADLINE_S

pytestmark = pytest.mark.system

IN_TURN = Path(__file__).with_name("jobs_in_turn.py").resolve()


def test_two_runs_of_a_process_pay_for_the_imports_once(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{n} times {n} is {n * n}. " for n in range(3000)))
    argv = [sys.executable, str(IN_TURN)]
    for name in ("first", "second"):
        argv += [name, "+experiment=nano", f"data.path={text}", f"output.root={tmp_path / name}", "--"]
    done = programs.run(
        argv, capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "HELIXRT_LOG": "helixrt.job=INFO"}
    )
    assert done.returncode == 0, done.stderr
    for name in ("first", "second"):
        assert f"run {name} ended with exit code 0\n" in done.stdout, done.stdout + done.stderr
    assert "is started as a new process" not in done.stderr, done.stderr
    assert "a new forerunner is started" not in done.stderr, done.stderr
    finals = [json.loads((tmp_path / name / "latest" / "report.json").read_text())["replicas"] for name in ("first", "second")]
    assert finals[0][0]["parameters_digest"] == finals[1][0]["parameters_digest"]
