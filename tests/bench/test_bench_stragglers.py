"""The straggler benchmark's figures, which are simulated and so the same everywhere: what the README claims of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helixrt.bench import stragglers


def test_the_trace_and_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "stragglers.json"
    assert stragglers.run(argparse.Namespace(json=figures)) == 0
    assert "Table 3 of ADAPTRA replayed" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    helix = found["trace"]["helix"]
    assert helix["times_faster_than"]["zb"] >= 1.41
    assert helix["times_faster_than"]["1f1b"] >= 1.37
    assert helix["slowdown"] <= 1.05
    at_60 = {(row["place"], row["policy"], row["comm"]): row["slowdown"] for row in found["table"] if row["delay_ms"] == 60}
    for place in ("first", "middle", "last"):
        assert at_60[place, "helix", "delegated"] <= 1.07
        assert at_60[place, "zb", "direct"] > at_60[place, "1f1b", "direct"] > at_60[place, "zb", "delegated"] > 1.5
