"""The straggler benchmark's figures, which are simulated: how policies compare, and what the paper reaches as a bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helixrt.bench import stragglers

PAPER = {"zb": 1.41, "1f1b": 1.37}  # ADAPTRA, Table 3: how much faster it is than these


@pytest.mark.system
def test_the_trace_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "stragglers.json"
    assert stragglers.run(argparse.Namespace(json=figures)) == 0
    assert "Table 3 of ADAPTRA replayed" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    trace = found["trace"]
    helix = trace["helix"]
    assert helix["times_faster_than"]["zb"] >= PAPER["zb"] and helix["times_faster_than"]["1f1b"] >= PAPER["1f1b"]
    assert 1 <= helix["slowdown"] == min(run["slowdown"] for run in trace.values())
    assert helix["total_s"] == min(run["total_s"] for run in trace.values())
    assert helix["switches"] > 0 == trace["zb"]["switches"]

    table = {(row["place"], row["delay_ms"], row["policy"], row["comm"]): row for row in found["table"]}
    for (place, delay_ms, policy, comm), row in table.items():
        alone = table[place, 0.0, policy, comm]
        assert alone["slowdown"] == 1 and row["makespan_ms"] == pytest.approx(row["slowdown"] * alone["makespan_ms"])
        if delay_ms == 60:
            assert table[place, delay_ms, policy, "delegated"]["makespan_ms"] <= row["makespan_ms"]
            assert table[place, delay_ms, "helix", "delegated"]["makespan_ms"] <= row["makespan_ms"]
    for place in ("first", "middle", "last"):
        # The first forward and the last backward cross the slow link with nothing to hide behind: at most one delay each.
        healthy_ms = table[place, 0.0, "helix", "delegated"]["makespan_ms"]
        assert table[place, 60.0, "helix", "delegated"]["makespan_ms"] <= healthy_ms + 2 * 60.0
