"""The plumbing of the loop's benchmark, at a tiny size: every step is run, measured, and never faster than simulated."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helixrt.bench import adapting
from helixrt.errors import ConfigError

ROUNDING_MS = 1.0  # of clocks


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    adapting.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.system
def test_every_step_is_run_by_the_order_that_the_loop_has_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SLOW_FROM", 4), ("SLOW_TO", 9), ("SLOW_STEPS", 12), ("FIXED", adapting.FIXED[:1])):
        monkeypatch.setattr(adapting, name, value)
    figures = tmp_path / "adapting.json"
    assert adapting.run(arguments("--size", "4x4@5", "--json", str(figures))) == 0
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


def test_a_trace_needs_its_own_number_of_stages() -> None:
    with pytest.raises(ConfigError, match="--size=4x12@10: must have the trace's 8 stages"):
        adapting.run(arguments("--scenario", "table3"))
