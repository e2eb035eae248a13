"""`helixrt bench schedule`: counts add up, gaps follow from bounds, and a loss is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import schedule
from tests.bench.running import run_bench


@pytest.mark.system
def test_a_short_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools", reason="the exact optimum needs OR-tools (extra `exact`)")
    given = ["--instances", "1", "--first-seed", "13", "--exact-limit", "10", "--from-scratch", "1", "--sizes", "3x6"]
    assert run_bench(schedule, *given, "--json", str(tmp_path / "figures.json")) == 0
    written = json.loads((tmp_path / "figures.json").read_text())
    figures = written["random_instances"]
    assert figures["helix_optimal_by_its_own_bound"] <= figures["helix_optimal_proven"] <= figures["exact_optimal_proven"] <= 1
    for row in figures["against"].values():
        assert row["win"] + row["tie"] + row["loss"] == row["fits"] <= 1
    for spread in figures["spreads"].values():
        assert 0 <= spread["median"] <= spread["p95"] <= spread["most"]
    assert [row["exact"]["makespan_ms"] for row in written["known_optima"]][-4:] == [103, 107, 111, 123]
    assert len(written["large"]) == 6
    assert {"device", "python"} <= written["machine"].keys()
    printed = capsys.readouterr().out
    assert "1 random instances, seeds 13 to 13" in printed and "adaptra" in printed


def test_gaps_are_to_the_best_bound_and_a_loss_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = schedule.Settings(instances=1, first_seed=2, exact_limit_s=0.0, from_scratch=0, sizes=())
    one = schedule.measure(2, settings)
    own = one.helix["linear"]
    assert one.exact is None and one.bound_ms == own.lower_bound_ms
    better = schedule.Compared("adaptra", own.makespan_ms - 1, own.makespan_ms, 0.0)
    assert better.outcome == "loss"
    assert schedule.Compared("zb", own.makespan_ms, own.makespan_ms, 0.0).outcome == "tie"
    lost = schedule.Measured(2, one.helix, schedule.Exact(own.makespan_ms, own.makespan_ms, 1.0, True), None, [better])
    assert lost.bound_ms == own.makespan_ms
    assert schedule.summary([lost])["against"]["adaptra"]["loss"] == 1
    monkeypatch.setattr(schedule, "measure", lambda seed, settings: lost)
    assert run_bench(schedule, "--instances", "1", "--exact-limit", "0", "--sizes", "") == 1


def test_percentiles_are_values_of_the_sample() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [schedule.at_share(values, share) for share in (0.0, 0.2, 0.5, 0.95, 1.0)] == [1, 1, 3, 5, 5]
