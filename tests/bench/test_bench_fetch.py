"""`helixrt bench fetch`: donors serve in their windows and figures are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import fetch
from tests.bench.running import run_bench


@pytest.mark.system
def test_a_short_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--donors", "1", "--megabytes", "2", "--size", "64", "--rounds", "3", "--window", "0.5"]
    assert run_bench(fetch, *small, "--json", str(tmp_path / "figures.json")) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["fetch_megabytes_per_s_paced"]["p50"] > 0 and figures["fetch_megabytes_per_s_unpaced"]["p50"] > 0
    assert figures["step_ms_idle"]["p50"] > 0
    assert {"growth_percent_paced", "cpu_growth_percent_paced", "growth_percent_unpaced"} <= figures.keys()
    assert "growth" in capsys.readouterr().out
