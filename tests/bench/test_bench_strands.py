"""`helixrt bench strands`: all ways train alike over a rated link and figures are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import strands
from helixrt.bench._strand_variants import MODELS
from helixrt.errors import ConfigError
from helixrt.lab import machine
from tests.bench.running import run_bench


@pytest.mark.slow  # two minutes; `02_strands.ipynb` and the other tests here run its parts
@pytest.mark.netns
def test_a_quick_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks compare losses and gradients of all ways themselves, and there are no figures when they differ."""
    path = tmp_path / "out" / "figures.json"
    trace = tmp_path / "trace.json"
    assert run_bench(strands, "--quick", "--shares", "1", "--json", str(path), "--trace", str(trace)) == 0
    assert any("all_reduce" in str(event.get("name")) for event in json.loads(trace.read_text())["traceEvents"])
    written = json.loads(path.read_text())
    at = written["shares"][f"{strands.QUICK['shares'][0]:g}"]
    assert {"intra_batch", "round_robin", "eq2", "helix", "pairing", "pairing+cross"} == at["ways"].keys()
    assert {"eager", "single", "compute", "communication"} <= at["processor_s"].keys()
    assert at["rate_mbit"] > 0 and at["bound_s"] > 0
    for way in at["ways"].values():
        assert {"hidden_share", "predicted_s", "prediction_error", "same_as", "policy"} <= way.keys()
    for spread in written["figures"].values():
        assert 0 < spread["p20"] <= spread["p50"] <= spread["p80"]
    assert "helix_over_single" in capsys.readouterr().out


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_is_counted_of_two_sizes_and_kept_beside_that_of_another_model(tmp_path: Path) -> None:
    path, models, layers = tmp_path / "memory.json", ["gpt-tp"], ["2", "4"]
    path.write_text(json.dumps({"memory": {}}))
    small = ["--memory", "--layers", *layers, "--dim", "64", "--seq-len", "16", "--microbatches", "2"]
    for model in models:
        assert run_bench(strands, *small, "--model", model, "--json", str(path)) == 0
    memory = json.loads(path.read_text())["memory"]
    assert memory.keys() == {*models}
    for rows in memory.values():
        assert rows.keys() == {*layers}
        for count, row in rows.items():
            assert 0 < row["woven_bytes"] <= (1 + 1 / int(count)) * row["single_bytes"]


def test_without_a_gpu_there_are_no_figures_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strands, "gpu_here", lambda: False)
    monkeypatch.setattr(strands, "measure", lambda settings: pytest.fail("started"))
    with pytest.raises(ConfigError, match="--device=cuda: needs a GPU"):
        run_bench(strands, "--device", "cuda")


@pytest.mark.gpu
@pytest.mark.netns
def test_two_ranks_share_a_card(tmp_path: Path) -> None:
    path, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    assert run_bench(strands, "--quick", "--device", "cuda", "--json", str(path), "--trace", str(trace)) == 0
    streams = {
        event["args"]["stream"] for event in json.loads(trace.read_text())["traceEvents"] if "stream" in event.get("args", {})
    }
    assert len(streams) > 1, "transfers have a stream of their own"


def test_a_machine_without_namespaces_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "lacking", lambda: machine.Lack("not root", "run as root to test with rated links"))
    with pytest.raises(ConfigError, match="bench=strands: not root: run as root"):
        run_bench(strands, "--quick")


def test_every_model_offered_can_be_made() -> None:
    assert strands.MODELS == MODELS
