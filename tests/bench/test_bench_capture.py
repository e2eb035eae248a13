"""`helixrt bench capture`: runs are processes that capture and cut; slow ones are a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import capture
from tests.bench.running import run_bench

SMALL = ["--layers", "2", "--dim", "128", "--vocab", "300", "--seq-len", "8", "--stages", "2", "--repeats", "2"]


def made(cpu_s: float) -> capture.Run:
    return capture.Run(cpu_s / 2, cpu_s, cpu_s / 2, cpu_s, grown_bytes=3, kept_bytes=2, parameter_bytes=1, nodes=7)


@pytest.mark.slow
def test_a_short_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert run_bench(capture, *SMALL, "--family", "gpt2", "--most-s", "1000", "--json", str(path)) == 0
    written = json.loads(path.read_text())
    runs, spread = written["runs"]["gpt2"], written["figures"]["gpt2/cpu_s"]
    assert len(runs) == 2 and {one["nodes"] for one in runs} == {runs[0]["nodes"]}
    for one in runs:
        assert one["capture_cpu_s"] > 0 and one["cut_cpu_s"] > 0 and one["nodes"] > 50
        width, ff = 128, 512
        layer = 4 * width * width + 2 * width * ff + 9 * width + ff
        assert one["parameter_bytes"] == 4 * ((300 + 8) * width + 2 * layer + 2 * width)
        assert one["grown_bytes"] >= 0
    assert spread["p20"] <= spread["p80"]
    assert "the parameters would take" in capsys.readouterr().out


def test_a_capture_that_takes_too_long_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 70.0, 61.0, 1.0, 1.0, 1.0, 10.0, 70.0, 59.0])
    monkeypatch.setattr(capture, "measured", lambda shape, stages: made(next(times)))
    assert run_bench(capture) == 1
    assert run_bench(capture, "--family", "llama") == 0
