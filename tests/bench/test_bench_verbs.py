"""`helixrt bench verbs`: the committed figures are those of the docs, the picture is that of its data, and it runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helixrt.bench import _verbs_picture
from helixrt.cli import main

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_the_figures_of_the_docs_are_the_committed_ones() -> None:
    figures = json.loads((RESULTS / "verbs.json").read_text())
    rows = re.findall(r"^\| ([\w ]+?)" + r" \| ([\d.]+)" * 4 + r" \|$", verbs_table(), re.MULTILINE)
    assert {row[0] for row in rows} == set(figures["failures"])
    for how, *shown in rows:
        measured = figures["failures"][how]
        for key, text in zip(("noticed_ms", "switched_ms", "moving_ms", "back_ms"), shown, strict=True):
            digits = len(text.partition(".")[2])
            assert float(text) == round(middle(measured[key]), digits or None), (how, key)


def verbs_table() -> str:
    page = (ROOT / "docs/benchmarks/index.md").read_text(encoding="utf-8")
    found = re.search(r"^\| failure \| detected.*?\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found
    return found[1]


def recorded() -> dict[str, Any]:
    return json.loads((RESULTS / "verbs_failover.json").read_text())  # type: ignore[no-any-return]


def test_in_the_committed_picture_traffic_goes_over_the_backup_while_the_nic_is_down() -> None:
    data = recorded()
    assert len(data["panels"]) == 2
    for panel in data["panels"].values():
        default, backup = panel["MB_s"].values()

        def rate(rates: list[float], begin: float, end: float) -> float:
            few = rates[round(begin / data["sample_s"]) : round(end / data["sample_s"])]
            return sum(few) / len(few)

        down, up, back = panel["down_s"], panel["up_s"], panel["back_s"]
        assert 0 < down < up < back < up + 1
        usual = rate(default, 0, down - 0.5)
        assert usual > 0 and rate(backup, 0, down - 0.5) == 0
        assert rate(default, down + 0.5, up) == 0 and rate(backup, down + 0.5, up) > usual / 2
        assert rate(default, back + 0.5, 14.5) > usual / 2 and rate(backup, back + 0.5, 14.5) == 0


def test_the_picture_is_drawn_from_its_data(tmp_path: Path) -> None:
    picture = tmp_path / "one.png"
    _verbs_picture.write(recorded(), picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and json.loads(picture.with_suffix(".json").read_text()) == recorded()


@pytest.mark.slow
@pytest.mark.rdma
def test_it_measures_in_the_lab(tmp_path: Path) -> None:
    path = tmp_path / "verbs.json"
    few = ["--rounds", "2", "--total-mib", "8", "--message-mib", "4", "--failures", "1"]
    assert main(["bench", "verbs", *few, "--json", str(path)]) == 0
    said = json.loads(path.read_text())
    assert said["figures"]["link_over_ring"]["p50"] > 0
    for end in ("sender", "receiver"):
        assert 0 < said["machine_cost"][end]["calls_per_chunk"] < 3
    assert set(said["failures"]) == {"local down", "remote down", "blackhole"}
    for figures in said["failures"].values():
        assert set(figures) == {"noticed_ms", "told_ms", "switched_ms", "moving_ms", "back_ms", "call_ms"}
        assert all(len(values) == 1 and values[0] > 0 for values in figures.values())
        assert figures["moving_ms"] >= figures["switched_ms"]
