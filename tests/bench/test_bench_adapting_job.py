"""The loop in a whole job: what a run has left is read step by step, beside the simulation of the order of each step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import adapting_job
from tests.bench.running import run_bench


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_step_of_a_job_is_beside_its_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WARM", 2), ("SLOW_FROM", 4), ("SLOW_TO", 9), ("STEADY", 1)):
        monkeypatch.setattr(adapting_job, name, value)
    figures = tmp_path / "figures.json"
    small = ("--size", "4x4@10", "--replicas", "1", "--steps", "12")
    assert run_bench(adapting_job, *small, "--folder", str(tmp_path / "runs"), "--json", str(figures)) == 0
    found = json.loads(figures.read_text())
    assert found["runs"].keys() == {"adapting", "zb delegated", "zb direct"}
    for name, run in found["runs"].items():
        steps = {each["step"]: each for each in run["steps"]}
        assert steps.keys() == set(range(2, 13)), "the first has no update before it"
        for each in steps.values():
            assert each["whole_ms"] > 0 and each["work_ms"] >= each["simulated_ms"] - 1.0, (name, each)
        if name != "adapting":
            assert steps[5]["simulated_ms"] > steps[2]["simulated_ms"] == steps[12]["simulated_ms"]
    assert list((tmp_path / "runs" / "adapting").glob("*/*/report.html"))
