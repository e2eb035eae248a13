"""The adaptation benchmark's plumbing, at a tiny size: real ranks keep to the order, the delays and the communication asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import adaptation
from tests.bench.running import run_bench

ROUNDING_MS = 1.0  # of clocks


@pytest.mark.system
def test_no_step_is_faster_than_the_exact_simulation_of_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sleeps and messages are late by some time, and never early: a delay that was left out, or a send that did not block,
    would show as a step that is too short."""
    figures = tmp_path / "adaptation.json"
    sizes, cases = ["4x4@10"], ["--factors", "0", "6", "--places", "middle", "--policies", "zb", "helix", "--steps", "1"]
    assert run_bench(adaptation, "--sizes", *sizes, *cases, "--json", str(figures)) == 0
    assert "measured / simulated" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    (results,) = found["cases"].values()
    assert len(results) == 2 * 2 * 2 and found["summary"].keys() == found["cases"].keys()
    for one in results:
        assert min(one["steps_ms"]) >= one["simulated_ms"] - ROUNDING_MS, one
        assert one["simulated_ms"] >= one["bound_ms"] - ROUNDING_MS or one["policy"] != "helix"
    by_case = {(r["factor"], r["policy"], r["comm"]): r["simulated_ms"] for r in results}
    assert by_case[6, "zb", "direct"] > by_case[6, "zb", "delegated"] > by_case[0, "zb", "delegated"]  # what is asked differs
