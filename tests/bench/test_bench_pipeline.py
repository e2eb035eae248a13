"""`helixrt bench pipeline`: both sides train alike and figures are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import pipeline
from helixrt.bench._figures import Spread
from tests.bench.running import run_bench


@pytest.mark.system
def test_a_short_run_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    small = ["--layers", "2", "--dim", "32", "--batch", "4", "--seq-len", "16", "--microbatches", "2", "--rounds", "3"]
    assert run_bench(pipeline, *small, "--json", str(tmp_path / "out" / "figures.json")) == 0
    written = json.loads((tmp_path / "out" / "figures.json").read_text())
    ratio = written["figures"]["ratio"]
    assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"]
    assert abs(written["losses"]["helixrt"] - written["losses"]["torch"]) < pipeline.LOSS_TOLERANCE
    assert {"device", "torch"} <= written["machine"].keys()
    assert "ratio" in capsys.readouterr().out


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == Spread(2.0, 3.5, 5.0)
