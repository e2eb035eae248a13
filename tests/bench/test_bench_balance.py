"""`helixrt bench balance`: ratios are to the best neighbour and a cut that misses is a failure."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import pytest

from helixrt.bench import balance
from helixrt.passes.units import Units
from helixrt.pipeline import measured_units
from tests.bench.running import run_bench

SMALL = ["--layers", "4", "--dim", "128", "--vocab", "300", "--seq-len", "8", "--passes", "1", "--rounds", "2"]


@pytest.mark.system
def test_a_short_run_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_units, "APART", float("inf"))  # however busy this machine is
    monkeypatch.setattr(balance, "measure_units", functools.partial(measured_units.measure_units, budget_s=1e6))
    path = tmp_path / "figures.json"
    given = [*SMALL, "--family", "llama", "--stages", "3", "--microbatches", "4", "--most", "1000", "--json", str(path)]
    assert run_bench(balance, *given) == 0
    written = json.loads(path.read_text())
    assert {"device", "torch"} <= written["machine"].keys() and len(written["load"]) == 3
    found = written["models"]["llama"]
    assert len(found["units"]) == 6 and found["units_ms"].keys() == set(found["units"])
    assert all(time["forward_ms"] > 0 and time["whole_ms"] > 0 for time in found["units_ms"].values())
    made = [(one["costs"], one["schedule"], one["microbatches"]) for one in found["cuts"]]
    assert made == [(by, name, 4) for by in ("estimated", "measured") for name in ("1f1b", "zb")]
    for one in found["cuts"]:
        limits = (0, *one["starts"], 6)
        assert {f"{begin}:{end}" for begin, end in itertools.pairwise(limits)} <= found["stages_ms"].keys()
        own = one["makespans_ms"].pop(one["units"])
        assert one["ratio"] == pytest.approx(own / min(one["makespans_ms"].values()))
    assert "chosen / best neighbour" in capsys.readouterr().out


@pytest.mark.slow
def test_two_stages_train_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "figures.json"
    given = [*SMALL, "--family", "gpt2", "--stages", "2", "--microbatches", "4", "--most", "1000", "--real", "3"]
    assert run_bench(balance, *given, "--costs", "estimated", "--json", str(path)) == 0
    written = json.loads(path.read_text())
    real, spread = written["models"]["gpt2"]["real"], written["figures"]["gpt2/real_step_ms"]
    assert len(real["steps_ms"]) == 3 and min(real["steps_ms"]) <= spread["p20"] <= spread["p80"] <= max(real["steps_ms"])
    assert real["alone_ms"] > 0 and real["busy_ms"] > 0


def test_neighbours_have_one_boundary_moved_by_one() -> None:
    assert balance.neighbours((2, 3), 5) == [(1, 3), (2, 4)]
    for starts in itertools.combinations(range(1, 7), 3):
        found = balance.neighbours(starts, 7)
        every = itertools.combinations(range(1, 7), 3)
        assert sorted(found) == [one for one in every if sum(abs(a - b) for a, b in zip(one, starts, strict=True)) == 1]


def test_the_ratio_is_to_the_best_neighbour() -> None:
    choice = balance.Choice("estimated", ("1f1b", 4), (1,), {(1,): 3.0, (2,): 2.0, (3,): 9.0})
    assert choice.best == (2,) and choice.ratio == 1.5


def test_a_ratio_above_the_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Units("layers", ("", "layers.0", "layers.1", "head"), (0, 1), {}, frozenset(), {}, frozenset())
    good, bad = (
        balance.Choice("estimated", (name, 4), (1,), {(1,): ms, (2,): 2.0}) for name, ms in (("1f1b", 1.0), ("zb", 2.1))
    )
    monkeypatch.setattr(balance, "captured", lambda shape: None)
    for choices, code in (((good,), 0), ((good, bad), 1)):
        monkeypatch.setattr(balance, "measure", lambda settings, joint, made=choices: balance.Measured(found, {}, made, {}))
        assert run_bench(balance, *SMALL, "--family", "gpt2", "--stages", "2") == code


def test_the_cut_by_measured_times_decides_where_both_are_there() -> None:
    by_estimates = balance.Choice("estimated", ("zb", 4), (1,), {(1,): 9.0, (2,): 2.0})
    measured = balance.Choice("measured", ("zb", 4), (1,), {(1,): 1.0, (2,): 2.0})
    assert balance.decisive([by_estimates, measured]) == [measured]
    assert balance.decisive([by_estimates]) == [by_estimates]
