"""`helixrt bench hopping`: what it makes of flows, and the whole of it on a small network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench.hopping import FAST, SENDERS, SLOW, Flow, Result, results, sizes
from helixrt.cli import main


def test_flows_have_gpt3s_sizes_in_their_proportion() -> None:
    found = sizes(51, 12.5)
    assert {chunks: found.count(chunks) for chunks in set(found)} == {4: 40, 36: 10, 12: 1}
    assert sizes(5, 12.5).count(4) == 4 and sizes(5, 12.5).count(36) == 1
    assert min(sizes(51, 1e9)) == 1, "a flow has a chunk at least"


def flow(side: str, number: int, begin: float, end: float, slow: int = 0) -> Flow:
    return Flow(side, 0, number, 2, begin, end, (100 - slow, *[0] * (FAST + SLOW - 2), slow), 1, 2)


def test_results_are_those_of_the_flows() -> None:
    flows = [flow("helix", number, 10.0 * number, 10.0 * number + 1 + (number == 99), 3) for number in range(100)]
    late = flow("helix", 0, 0.5, 4.5, 3)
    result = Result.of([*flows, late], {2: 0.5})
    assert result.mean == pytest.approx((99 * 2 + 4 + 8) / 101) and (result.p95, result.p99) == (2.0, 4.0)
    assert result.slow_share == pytest.approx(0.03) and (result.hops, result.probes) == (1, 2)
    assert result.total_s == pytest.approx(4.5 + 98 * 1 + 2), "a round ends with its last flow"
    assert set(results([late, flow("ecmp", 0, 0, 1)], {2: 1.0})) == {"helix", "ecmp"}


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--slow-mbit", "300"], ["--scale", "0"], ["--alpha", "2"]])
def test_settings_that_cannot_be(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hopping", *wrong]) == 2
    assert wrong[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


@pytest.mark.slow
@pytest.mark.netns
def test_figures_of_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hopping.json"
    few = ["--rounds", "5", "--repetitions", "2", "--scale", "25", "--sides", "helix", "flowbender"]
    assert main(["bench", "hopping", *few, "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert said["settings"]["rounds"] == 5 and said["measured"]["senders"] == SENDERS
    for side in ("helix", "flowbender"):
        assert said["measured"]["all_flows"][side]["mean"] >= 0.9
        assert 0 <= said["figures"][f"{side}_slow_share"]["p50"] <= 1
    assert said["figures"]["helix_to_flowbender_mean"]["p50"] > 0
    assert "to FlowBender" in capsys.readouterr().out
