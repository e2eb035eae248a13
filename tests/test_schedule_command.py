"""`helixrt schedule`: planned under one set of delays, replayed under another; every wrong input is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from helixrt import cli
from helixrt.schedule.check import check
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange import as_json, torch_csv
from helixrt.schedule.generators import policies
from helixrt.schedule.simulate import Direct, simulate

PAPER = ["--stages", "4", "--microbatches", "12", "--cost", "10,10,10"]
PROFILE = {"f": [1, 2, 1, 1], "b": [2, 2, 2, 1], "w": [1, 1, 2, 1]}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["schedule", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found = json.loads(said(capsys, *arguments, "--format", "json"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is said of wrong arguments."""
    assert cli.main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("helixrt: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(PROFILE))
    return file


def test_the_papers_figure_4_from_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for delay, makespan_ms in (("0", 390), ("10", 400), ("20", 440)):
        found = figures(capsys, "--policy", "zb", *PAPER, "--run-delay", f"0:{delay}")
        assert (found["makespan_ms"], found["policy"]) == (makespan_ms, "zb")


@pytest.mark.parametrize("policy", sorted(policies.POLICIES))
def test_every_policy_is_planned_under_delay_and_replayed_under_run_delay(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, "--policy", policy, *PAPER, "--delay", "1:5", "--run-delay", "1>2:30", "--comm", "direct:3")
    assert found["policy"] == policy
    costs = policies.costs_for(policy, uniform(4, 10, 10, 10))
    planned = policies.build(policy, with_delays(costs, {(1, 2): 5, (2, 1): 5}), 12)
    timeline = simulate(planned, with_delays(costs, {(1, 2): 30}), Direct(3))
    assert found["makespan_ms"] == timeline.makespan_ms
    assert found["order"] == [[planned.label(entry) for entry in entries] for entries in planned.entries]
    assert found["warmup"] == list(planned.warmup()) and found["peak_memory"] == list(timeline.peak_memory)
    assert found["gap"] == pytest.approx(found["makespan_ms"] / found["lower_bound_ms"] - 1) and found["gap"] >= 0
    assert found["bubble_rate"] == timeline.bubble_rate and found["solve_ms"] >= 0


def test_a_profile_gives_every_stage_its_own_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    links = {"delay": [[3, 1], [0, 0], [0, 2]], "wire": [[1, 1], [0, 0], [0, 0]]}
    more = {"stages": 4, "microbatches": 6, "memory": [12, 12, None, 4], "activation": [2, 2, 2, 1]}
    file.write_text(json.dumps({**PROFILE, **links, **more}))
    found = figures(capsys, "--profile", str(file), "--policy", "1f1b")
    assert found["peak_memory"] == [8, 6, 4, 1] and len(found["order"][0]) == 12
    slower = figures(capsys, "--profile", str(file), "--policy", "1f1b", "--run-delay", "0:30")
    assert slower["makespan_ms"] > found["makespan_ms"] and slower["order"] == found["order"]
    fewer = figures(capsys, "--profile", str(file), "--policy", "1f1b", "--microbatches", "5")
    assert fewer["makespan_ms"] < found["makespan_ms"]


def test_two_chunks_and_a_cap_and_a_proven_optimum(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--stages", "3", "--microbatches", "6", "--delay", "0:1", "--memory", "4"]
    two = figures(capsys, *small, "--chunks", "2")
    assert two["placement"] == [0, 1, 2, 2, 1, 0] and max(two["peak_memory"]) <= 4
    one = figures(capsys, *small)
    assert one["placement"] == [0, 1, 2] and max(one["peak_memory"]) <= 4
    pytest.importorskip("ortools", reason="the extra `exact` is not installed")
    best = figures(capsys, *small, "--exact", "--time-limit", "5")
    assert best["lower_bound_ms"] <= best["makespan_ms"] <= one["makespan_ms"]
    assert best["lower_bound_ms"] >= one["lower_bound_ms"] and max(best["peak_memory"]) <= 4


def test_an_order_that_was_written_is_read_checked_and_timed_the_same(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in ("1f1b", "zbv", "dualpipev", "helix"):
        for form in ("csv", "json"):
            file = tmp_path / f"{policy}.{form}"
            made = figures(capsys, "--policy", policy, "--profile", str(profile), "--microbatches", "8", "--delay", "0:2")
            said(
                capsys,
                "--policy",
                policy,
                "--profile",
                str(profile),
                *("--microbatches", "8", "--delay", "0:2"),
                "-o",
                str(file),
            )
            read = figures(capsys, "--order", str(file), "--profile", str(profile), "--delay", "0:2")
            for key in ("makespan_ms", "lower_bound_ms", "bubble_rate", "peak_memory", "order", "placement", "policy"):
                assert read[key] == made[key], key


def test_every_format_is_chosen_by_name_or_by_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *PAPER)
    assert text.startswith("helix: 4 stages, 12 micro-batches\nmakespan 390 ms") and "\x1b" not in text
    schedule = torch_csv.read(said(capsys, *PAPER, "--format", "csv"), "helix")
    check(schedule)
    assert ElementTree.fromstring(said(capsys, *PAPER, "--format", "svg")).tag.endswith("svg")
    assert json.loads(said(capsys, *PAPER, "--format", "chrome"))["traceEvents"]
    for suffix in ("csv", "json", "svg", "txt"):
        assert said(capsys, *PAPER, "--output", str(tmp_path / f"out.{suffix}")) == ""
    assert torch_csv.read((tmp_path / "out.csv").read_text(), "helix") == schedule
    assert as_json.read((tmp_path / "out.json").read_text(), "helix") == schedule
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
    assert (tmp_path / "out.txt").read_text().splitlines()[0] == text.splitlines()[0]


def test_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(said(capsys, "compare", *PAPER, "--delay", "0:10", "--memory", "8", "--format", "json"))
    by_name = {row["policy"]: row for row in rows}
    assert list(by_name) == [*policies.POLICIES, "helix, 2 chunks"]
    assert not by_name["gpipe"]["fits"] and by_name["gpipe"]["peak_memory"] == [12] * 4
    best = min(row["makespan_ms"] for row in rows if row["fits"] and "chunks" not in row["policy"] and row["policy"] != "helix")
    assert by_name["helix"]["fits"] and by_name["helix"]["makespan_ms"] <= best
    table = said(capsys, "compare", *PAPER, "--delay", "0:10", "--memory", "8").splitlines()
    assert [line.split("  ")[0] for line in table] == ["policy", *by_name]


COUNT = ["--microbatches", "4"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--stages", "2"], "--microbatches='': is needed"),
        (COUNT, "--stages='': is needed, or a --profile"),
        (["--stages", "two", *COUNT], "--stages=two: must be a whole number, at least 1"),
        (["--stages", "0", *COUNT], "--stages=0: must be a whole number, at least 1"),
        (["--stages", "2", *COUNT, "--cost", "-1,2,3"], "--cost=-1,2,3: must be numbers, at least 0"),
        (["--stages", "2", *COUNT, "--cost", "1,2"], "--cost=1,2: must be three times in ms"),
        (["--stages", "2", *COUNT, "--cost", "1,2,nan"], "--cost=1,2,nan: must be numbers"),
        (["--stages", "2", *COUNT, "--cost", "1,2,inf"], "must be a number, at least 0"),
        (["--stages", "2", *COUNT, "--delay", "1:4"], "--delay=1:4: must join two different stages below 2"),
        (["--stages", "2", *COUNT, "--delay", "0>0:4"], "--delay=0>0:4: must join two different stages"),
        (["--stages", "2", *COUNT, "--delay", "-1:4"], "--delay=-1:4: must be I:MS, both ways"),
        (["--stages", "2", *COUNT, "--run-delay", "0:-4"], "--run-delay=0:-4: must be numbers, at least 0"),
        (["--stages", "2", *COUNT, "--run-delay", "0:inf"], "--run-delay=0:inf: must be a number of ms"),
        (["--stages", "2", *COUNT, "--memory", "-3"], "--memory=-3: must be a number, at least 0"),
        (["--stages", "2", *COUNT, "--memory", "0.5"], "memory[0]=0.5: no schedule fits; the smallest that would do is 1"),
        (["--stages", "4", *COUNT, "--memory", "3", "--policy", "1f1b"], "schedule.memory=3: 1f1b needs 4 on stage 0"),
        (["--stages", "4", *COUNT, "--policy", "zigzag"], "policy=zigzag: must be one of gpipe, 1f1b"),
        (["--stages", "4", *COUNT, "--policy", "zb", "--chunks", "2"], "--chunks=2: goes with --policy helix"),
        (["--stages", "4", *COUNT, "--chunks", "3"], "--chunks=3: must be 1 or 2"),
        (["--stages", "4", *COUNT, "--policy", "zb", "--exact"], "--exact=zb: goes with --policy helix"),
        (["--stages", "4", *COUNT, "--exact", "--time-limit", "-1"], "--time-limit=-1: must be a number of seconds"),
        (["--stages", "4", *COUNT, "--time-limit", "1"], "--time-limit=1: goes with --exact"),
        (["--stages", "4", *COUNT, "--comm", "pigeon"], "--comm=pigeon: must be delegated, direct"),
        (["--stages", "4", *COUNT, "--comm", "direct:0"], "=0: must be a whole number, at least 1"),
        (["--stages", "4", *COUNT, "--format", "png"], "--format=png: must be one of text, json, csv, svg, chrome"),
        (["--stages", "4", *COUNT, "-o", "/not/there/x.svg"], "--output=/not/there/x.svg: cannot be written"),
        (["compar", "--stages", "4", *COUNT], "helixrt schedule=compar: must be compare or nothing"),
        (["compare", "--stages", "4", *COUNT, "--policy", "zb"], "--policy=zb: does not go with compare"),
        (["compare", "--stages", "4", *COUNT, "--format", "svg"], "--format=svg: must be one of text, json"),
        (["--order", "/not/there.csv"], "--order=/not/there.csv: cannot be read"),
        (["--profile", "/not/there.json"], "--profile=/not/there.json: cannot be read"),
        (["--stages", "2", *COUNT, "--cost", ""], "--cost=: must be three times in ms"),
        (["--stages", "2", *COUNT, "--cost", "1e300,1,1"], "costs.forward=1e+300: must be at most 1e+15"),
        (["--stages", "2", *COUNT, "--delay", "0:1e300"], "delay_ms=1e+300: must be a number, 0 to 1e+15"),
        (["--stages", "2", *COUNT, "--memory", "1e300"], "costs.memory=1e+300: must be at most 1e+15"),
        (["--stages", "4", *COUNT, "--policy", ""], "policy=: must be one of gpipe, 1f1b"),
        (["--stages", "4", *COUNT, "--comm", "direct:"], "='': must be a whole number, at least 1"),
        (["--stages", "1234567", *COUNT], "--stages=1234567: must be a whole number, at least 1 and below 1000000"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ({**PROFILE, "f": [1, 2]}, " b=4 values: must be one number per stage, 2 in all"),
        ({**PROFILE, "stages": 5}, " f=4 values: must be one number per stage, 5 in all"),
        ({**PROFILE, "w": [1, 1, 1, -1]}, " w[3]=-1: must be a number, at least 0"),
        ({**PROFILE, "w": [1, 1, 1, "1"]}, ' w[3]="1": must be a number, at least 0'),
        ({**PROFILE, "delay": [[1, 1]]}, " delay=1 values: must be one [forward, backward] per link, 3 in all"),
        ({**PROFILE, "delay": [[1, 1], 3, [1, 1]]}, " delay[1]=3: must be [forward, backward]"),
        ({**PROFILE, "delay": [[1, 1], [1, -2], [1, 1]]}, " delay[1][1]=-2: must be a number, at least 0"),
        ({**PROFILE, "memory": [1, 1]}, " memory=2 values: must be one number per stage, 4 in all"),
        ({**PROFILE, "activation": 2}, " activation=no list: must be one number per stage"),
        (
            {**PROFILE, "activation": [3, 1, 1, 1], "memory": [2, 9, 9, 9], "microbatches": 4},
            "memory[0]=2.0: no schedule fits; the smallest",
        ),
        ({**PROFILE, "microbatches": 0}, " microbatches=0: must be a whole number"),
        ({**PROFILE, "pair_factor": 0}, " pair_factor=0: must be a number above 0"),
        ({**PROFILE, "pair_factor": [0.8]}, " pair_factor=[0.8]: must be a number above 0"),
        ({**PROFILE, "f": [1, 1, 1, 10**400]}, " f[3]=10000000000000000000...: must be at most 1e+15"),
        ({**PROFILE, "speed": 1}, "has 'speed'; it may have f, b, w"),
        ({"f": [1], "b": [1]}, "lacks 'w'"),
        (PROFILE, "--microbatches='': is needed"),
    ],
)
def test_a_wrong_profile_is_one_line(content: object, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert line in refused(capsys, "--profile", str(file))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("0F0,0B0\n1F0,1X0\n", "order.csv line 2 column 2=1X0: must be chunk, F, I, W or B"),
        ("0F0,0B0\n1B0,1F0\n", "blocks itself"),
        ("0F0,0B0\n1F0\n", "stage 1 lacks"),
    ],
)
def test_a_wrong_order_is_one_line(content: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "order.csv"
    file.write_text(content)
    assert line in refused(capsys, "--order", str(file), "--cost", "1,1,1")


def test_the_bound_of_an_order_without_backward_is_of_forwards_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0F1,0F2\n1F0,1F1,1F2\n")
    found = figures(capsys, "--order", str(file), "--cost", "5,7,9")
    assert (found["makespan_ms"], found["lower_bound_ms"], found["gap"]) == (20, 20, 0)
    slow = figures(capsys, "--order", str(file), "--cost", "5,7,9", "--delay", "0:100")
    assert slow["makespan_ms"] == 120 and slow["lower_bound_ms"] <= 120


def test_an_order_and_its_costs_must_agree(tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "order.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    assert figures(capsys, "--order", str(file), "--cost", "1,2,3")["makespan_ms"] == 12
    assert "stages=2: must be as many as have costs, 4" in refused(capsys, "--order", str(file), "--profile", str(profile))
    assert "micro-batches=1: must be as many" in refused(capsys, "--order", str(file), "--microbatches", "2")
    assert "schedule.memory=0.5" not in figures(capsys, "--order", str(file), "--memory", "1")
    assert "--policy=zb: does not go with --order" in refused(capsys, "--order", str(file), "--policy", "zb")


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from helixrt import cli; assert cli.main(sys.argv[1:]) == 0; "
        "sys.exit(bool({'torch', 'ortools', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, "schedule", *PAPER], capture_output=True, timeout=150)
    assert done.returncode == 0, done.stderr
