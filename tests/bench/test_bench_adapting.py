"""The plumbing of the loop's benchmark, at a tiny size: every step is run, measured, and never faster than simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import adapting
from tests.bench.running import run_bench

ROUNDING_MS = 1.0  # of clocks


@pytest.mark.system
def test_every_step_is_run_by_the_order_that_the_loop_has_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SLOW_FROM", 4), ("SLOW_TO", 9), ("SLOW_STEPS", 12), ("FIXED", adapting.FIXED[:1])):
        monkeypatch.setattr(adapting, name, value)
    figures = tmp_path / "adapting.json"
    assert run_bench(adapting, "--size", "4x4@5", "--json", str(figures)) == 0
    assert "helix adapting" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert found["runs"].keys() == {"1f1b direct", "helix adapting"}
    for run in found["runs"].values():
        assert len(run["steps_ms"]) == len(run["simulated_ms"]) == len(run["orders"]) == 12
        for measured_ms, simulated_ms in zip(run["steps_ms"], run["simulated_ms"], strict=True):
            assert measured_ms >= simulated_ms - ROUNDING_MS
    assert len(found["undisturbed_ms"]) == 2 * adapting.CALM_STEPS
    assert min(found["undisturbed_ms"]) >= found["runs"]["helix adapting"]["simulated_ms"][0] - ROUNDING_MS
    fixed = found["runs"]["1f1b direct"]
    assert fixed["simulated_ms"][4] > fixed["simulated_ms"][0] == fixed["simulated_ms"][-1]  # the delay came and went
    loop = found["runs"]["helix adapting"]
    changes = [step for step in range(1, 12) if loop["orders"][step] != loop["orders"][step - 1]]
    decided = [switch[0] + 1 for switch in loop["switches"]]  # by index: taken up two steps after the decision's
    assert changes == [step for step in decided if step < 12]
