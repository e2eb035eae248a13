"""`helixrt bench hsdp`: both sides train alike, and figures are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import hsdp
from tests.bench.running import run_bench


@pytest.mark.slow  # eight processes
@pytest.mark.timeout(480)
def test_a_short_run_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    file = tmp_path / "out" / "figures.json"
    small = ["--layers", "2", "--dim", "32", "--batch", "2", "--seq-len", "16", "--rounds", "3", "--block", "3"]
    assert run_bench(hsdp, *small, "--json", str(file)) == 0
    ratio = json.loads(file.read_text())["figures"]["ratio"]
    assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"]
    assert "ratio" in capsys.readouterr().out
