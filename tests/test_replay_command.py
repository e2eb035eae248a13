"""`helixrt replay`: totals and ratios are those of the replays; every wrong input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helixrt import cli
from helixrt.schedule.adaptation.replay import STRATEGIES, replay
from helixrt.schedule.adaptation.trace import read
from helixrt.schedule.costs import uniform

SLOW = {"first": 10, "last": 29, "links": [[1, 2]], "delay_ms": 30}
TRACE = {"stages": 3, "iterations": 60, "events": [SLOW, {"iteration": 45, "nic_failure": 1}]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(TRACE))
    return file


def test_figures_are_those_of_the_replays(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "--trace", str(trace), "--microbatches", "6", "--cost", "10,10,10", "--restart", "5"]
    assert cli.main([*arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["policy"] for run in found["runs"]] == [s.name for s in STRATEGIES]
    by_name = {run["policy"]: run for run in found["runs"]}
    for strategy in STRATEGIES:
        run = by_name[strategy.name]
        expected = replay(read(trace.read_text()), uniform(3, 10, 10, 10), 6, strategy)
        restart_ms = 0.0 if strategy.failover else 60e3 - 5e3  # the strategies' own restart takes a minute
        assert sum(run["iteration_ms"]) == pytest.approx(sum(expected.iteration_ms) - restart_ms)
        assert run["total_s"] == pytest.approx(sum(run["iteration_ms"]) / 1e3)
        assert run["faster_than"]["zb"] == pytest.approx(by_name["zb"]["total_s"] / run["total_s"])
    assert by_name["helix"]["faster_than"]["zb"] > 1
    assert by_name["helix"]["total_s"] <= by_name["adaptra"]["total_s"] * (1 + 1e-9)

    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "X a NIC fails" in text and all(strategy.name in text for strategy in STRATEGIES)


def test_policies_say_how_they_communicate(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    policies = "zb:direct:1,zb:delegated,zbv"
    assert cli.main(["replay", "--trace", str(trace), "--policy", policies, "--detection-lag", "0", "-o", str(out)]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["comm"] for run in runs] == ["direct, 1 in flight", "delegated", "direct, 2 in flight"]
    assert runs[0]["total_s"] > runs[1]["total_s"] and capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--trace", "/not/there.json"], "--trace=/not/there.json: cannot be read"),
        (["--policy", "zigzag"], "policy=zigzag: must be one of gpipe"),
        (["--policy", "zb:pigeon"], "--comm=pigeon: must be delegated"),
        (["--stages", "4"], "stages=8: must be as many as have costs, 4"),
        (["--detection-lag", "x"], "--detection-lag=x: must be a whole number, at least 0"),
        (["--switch-cost", "-1"], "--switch-cost=-1: must be a number, at least 0"),
        (["--restart", "inf"], "--restart=inf: must be a number, at least 0"),
        (["--format", "svg"], "--format=svg: must be one of text, json"),
        (["--memory", "0.2"], "memory[0]=0.2: no schedule fits; the smallest that would do is 1"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", *arguments]) == 2
    captured = capsys.readouterr()
    assert line in captured.err and captured.err.count("\n") == 1 and captured.out == ""


ENDLESS = [
    "[" * 100_000,
    '{"stages": 2, "iterations": 3, "events": [' + "9" * 5000 + "]}",
    '{"stages": 2, "iterations": 999999999999, "events": []}',
    '{"stages": 2, "iterations": 3, "events": [{"first": 0, "last": 1, "links": [[0, 1]], "delay_ms": 1' + "0" * 400 + "}]}",
]


@pytest.mark.parametrize("content", ["{", "[]", '{"stages": 2, "iterations": 3, "events": [{"first": 1}]}', *ENDLESS])
def test_a_wrong_trace_is_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(content)
    assert cli.main(["replay", "--trace", str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
