"""The plumbing of the benchmark of uneven stages, at a tiny size: what is slept is what was measured, and nothing is faster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import uneven
from helixrt.bench._chunk_times import chunk_times
from helixrt.train.config import ModelConfig
from tests.bench.running import run_bench

ROUNDING_MS = 1.0  # of clocks


@pytest.mark.system
def test_a_large_vocabulary_makes_the_last_stage_the_longest() -> None:
    for _ in range(8):  # where the machine is busy while the first stage is measured, it seems as long
        first, last = chunk_times(ModelConfig(layers=2, dim=32, heads=1, ffn=32, vocab=20_000), 2, 1, 32, 3)
        for part in ("forward_ms", "backward_ms", "weight_ms"):
            assert getattr(first, part) > 0
        if last.forward_ms + last.weight_ms > 1.3 * (first.forward_ms + first.weight_ms):  # 3 to 5 times on a quiet machine
            return
    pytest.fail(f"{last} is not longer than {first}")


@pytest.mark.system
def test_orders_are_run_for_the_measured_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "uneven.json"
    tiny = ("--dim", "64", "--vocab", "500", "--layers", "4", "--seq-len", "8", "--microbatches", "4", "--samples", "1")
    assert run_bench(uneven, *tiny, "--placements", "linear", "--steps", "1", "--scale", "2", "--json", str(figures)) == 0
    assert "linear" in capsys.readouterr().out
    found = json.loads(figures.read_text())
    assert [len(values) for values in found["measured_ms"]["linear"].values()] == [4, 4, 4]
    assert [case["cap"] for case in found["cases"]] == ["none", "1F1B's"]
    for case in found["cases"]:
        assert case["measured_ms"].keys() == case["simulated_ms"].keys() == {"measured", "equal", "1f1b"}
        assert case["predicted"].keys() == case["gain"].keys() == {"equal", "1f1b"}
        assert min(case["predicted"].values()) >= 1 - 1e-9 and case["saved_per_ms"] > 0
        for name, simulated_ms in case["simulated_ms"].items():
            assert case["bound_ms"] <= simulated_ms * (1 + 1e-9) <= case["measured_ms"][name] + ROUNDING_MS
