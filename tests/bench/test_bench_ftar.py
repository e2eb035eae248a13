"""`helixrt bench ftar` end to end: sums are checked inside, the figures are there for every side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.cli import main


@pytest.mark.slow
def test_figures_of_every_side_reconfiguration_and_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ftar.json"
    few = ["--ranks", "3", "--kib", "4", "512", "--rounds", "2", "--generations", "2", "--kills", "1", "--cost-kib", "64"]
    assert main(["bench", "ftar", *few, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    figures = written["figures"]
    for side in ("gloo", "tcp", "shared_memory", "sockets"):
        for kib in (4, 512):
            for condition in ("", "_after_compute", "_from_idle"):
                assert figures[f"3_ranks_{side}_{kib}_kib{condition}_us"]["p50"] > 0
    assert figures["3_ranks_gloo_4_kib_ratio"]["p50"] == 1
    assert figures["reconfigure_3_to_2_ms"]["p50"] > 0 and figures["killed_process_noticed_ms"]["p50"] > 0
    cost = written["cost_of_fault_tolerance"]["3_ranks_64_kib_in_place"]
    assert cost["low"] <= cost["median"] <= cost["high"] and cost["pairs"] >= 60
    assert "cost of fault tolerance" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--rounds", "1"], ["--kib", "0"], ["--cost-kib", "0"]])
def test_settings_that_cannot_work(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ftar", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
