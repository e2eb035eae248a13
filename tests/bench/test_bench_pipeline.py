"""`helixrt bench pipeline`: both sides train alike, figures are written, wrong settings start nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helixrt.bench import pipeline
from helixrt.bench._figures import Spread
from helixrt.errors import ConfigError


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pipeline.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.system
def test_a_short_run_writes_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    small = ["--layers", "2", "--dim", "32", "--batch", "4", "--seq-len", "16", "--microbatches", "2", "--rounds", "3"]
    assert pipeline.run(arguments(*small, "--json", str(tmp_path / "out" / "figures.json"))) == 0
    written = json.loads((tmp_path / "out" / "figures.json").read_text())
    ratio = written["figures"]["ratio"]
    assert 0 < ratio["p20"] <= ratio["p50"] <= ratio["p80"]
    assert abs(written["losses"]["helixrt"] - written["losses"]["torch"]) < pipeline.LOSS_TOLERANCE
    assert {"device", "torch"} <= written["machine"].keys()
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    "given,message",
    [
        (["--batch", "6", "--microbatches", "4"], "--microbatches=4: must divide --batch=6"),
        (["--microbatches", "1"], "schedule.microbatches=1: 1f1b needs"),
        (["--layers", "1"], "mesh.pp=2: more stages than layers: model.layers=1"),
        (["--rounds", "1"], "--rounds=1: must be at least 2"),
    ],
)
def test_wrong_settings_start_nothing(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "measure", lambda settings: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message):
        pipeline.run(arguments(*given))


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]) == Spread(2.0, 3.5, 5.0)
