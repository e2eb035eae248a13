"""`helixrt bench faults` end to end: the table, the figures, the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt.bench import faults
from helixrt.bench.fault_matrix.cells import Cell, Fault, Finding, Phase
from helixrt.cli import main


@pytest.mark.slow
def test_the_table_its_figures_and_a_living_peer_is_not_declared_dead(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.json"
    few = ["--faults", "kill", "slow", "--phases", "idle", "reduce-scatter", "--minutes", "0.1", "--loaded"]
    main(["bench", "faults", *few, "--json", str(path)])  # the verdict includes times, which are not a test's
    said, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "SIGKILL" in said and "reduce-scatter" in said and said.count("no running peer was reported as lost") == 2
    rows = {(row["fault"], row["phase"], row["transport"]): row for row in written["table"]}
    phases = ("idle", "reduce-scatter")
    killed = {("SIGKILL", phase, transport) for phase in phases for transport in ("tcp", "shared_memory")}
    assert rows.keys() == killed | {("slow peer", phase, "tcp") for phase in phases}
    assert not any(row["problems"] for row in rows.values())
    assert len(rows["SIGKILL", "idle", "tcp"]["unblocked_ms"]) == 2 and rows["slow peer", "idle", "tcp"]["shows"] == "fine"
    assert written["tails"]["unblocked_after_gone_ms"]["times"] == sum(len(rows[name]["unblocked_ms"]) for name in killed)
    assert written["endured"]["tcp"]["sums"] > 0 and not written["endured"]["tcp"]["problems"]


def test_what_a_cell_of_the_table_says() -> None:
    cell = Cell(Fault.KILL, Phase.IDLE)
    assert faults._entry([Finding(cell, (), (0.012, 0.003), ())]) == "12 ms"
    assert faults._entry([Finding(cell, (), (0.012,), ()), Finding(cell, (), (0.3,), ())]) == "300 ms LATE"
    assert faults._entry([Finding(cell, ("it hung",), (0.012,), ())]) == "FAILED"
    assert faults._entry([Finding(Cell(Fault.SLOW, Phase.IDLE), (), (), ())]) == "fine"


def test_percentiles() -> None:
    assert faults.percentile([float(n) for n in range(100)], 0.99) == 98 and faults.percentile([5.0], 0.99) == 5


@pytest.mark.parametrize("wrong", [["--rounds", "-1"], ["--minutes", "-1"], ["--minutes", "inf"]])
def test_settings_that_cannot_work(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "faults", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
