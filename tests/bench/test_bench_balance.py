"""`helixrt bench balance`: ratios are to the best neighbour, a cut that misses is a failure, wrong settings start nothing."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest

from helixrt.bench import balance
from helixrt.errors import ConfigError
from helixrt.pipeline.chunk_times import ChunkTimes
from helixrt.schedule.generators.classic import build

SMALL = ["--layers", "4", "--dim", "128", "--vocab", "300", "--seq-len", "8", "--passes", "1", "--rounds", "2"]


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    balance.add_arguments(parser)
    return parser.parse_args(given)


def test_a_short_run_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    given = [*SMALL, "--family", "llama", "--stages", "3", "--microbatches", "4", "--most", "1000", "--json", str(path)]
    assert balance.run(arguments(*given)) == 0
    written = json.loads(path.read_text())
    assert {"device", "torch"} <= written["machine"].keys() and len(written["load"]) == 3
    found = written["models"]["llama"]
    assert len(found["units"]) == 6 and found["unit_ms"].keys() == set(found["units"])
    assert all(time > 0 for time in found["unit_ms"].values())
    for one in found["cuts"].values():
        limits = (0, *one["starts"], 6)
        assert {f"{begin}:{end}" for begin, end in itertools.pairwise(limits)} <= found["stages_ms"].keys()
        assert one["cases"].keys() == {"1f1b/4", "zb/4"}
        for case in one["cases"].values():
            own = case["makespans_ms"].pop(one["units"])
            assert case["ratio"] == pytest.approx(own / min(case["makespans_ms"].values()))
        assert one["most"] == max(case["ratio"] for case in one["cases"].values())
    assert "chosen / best neighbour" in capsys.readouterr().out


@pytest.mark.slow
def test_two_stages_train_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path = tmp_path / "figures.json"
    given = [*SMALL, "--family", "gpt2", "--stages", "2", "--microbatches", "4", "--most", "1000", "--real", "3"]
    assert balance.run(arguments(*given, "--costs", "estimated", "--json", str(path))) == 0
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


def test_costs_are_of_the_operations_that_the_schedule_has() -> None:
    times = {(0, 2): ChunkTimes(1.0, 2.0, 3.0, 4.5), (2, 3): ChunkTimes(1.0, 2.0, 3.0, 4.0)}
    whole, apart = (balance.costs_of((2,), times, 3, build(name, 2, 4)) for name in ("1f1b", "zb"))
    assert whole.backward == apart.backward == (2.0, 2.0)
    assert whole.weight == (2.5, 2.0) and apart.weight == (3.0, 3.0)


def test_a_cut_that_is_worse_than_a_neighbour_is_a_failure() -> None:
    choice = balance.Choice("estimated", balance.Balanced((1,), (), (), True), {("1f1b", 4): {(1,): 3.0, (2,): 2.0, (3,): 9.0}})
    assert choice.ratio(("1f1b", 4)) == choice.most == 1.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--stages", "13"], "--stages=13: must be at most --layers=12"),
        (["--microbatches", "8", "3"], "--microbatches=3: 1f1b needs one per stage, --stages=4"),
        (["--dim", "100"], "--dim=100: must be a multiple of 128"),
        (["--rounds", "0"], "--rounds=0: must be at least 1"),
        (["--real", "1"], "--real=1: must be 0, or at least 2 steps"),
    ],
)
def test_wrong_settings_start_nothing(given: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "captured", lambda shape: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message):
        balance.run(arguments(*given))
