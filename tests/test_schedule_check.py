"""`helixrt schedule check`: any torch CSV is proved, timed exactly and held against the bound; a wrong file is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from helixrt import cli
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.exchange import torch_csv
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import linear
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.simulate import Direct, makespan_ms

PROFILE: dict[str, Any] = {"f": [10, 20, 10, 10], "b": [20, 20, 20, 10], "w": [10, 10, 20, 10], "microbatches": 8}
LINKS = {"delay": [[0, 0], [35, 20], [0, 0]]}
Asked = Callable[..., tuple[int, str, str]]


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    """Check this text as a CSV under a profile: exit code, stdout, stderr."""

    def ask(content: str, *options: str, profile: dict[str, Any] | None = None) -> tuple[int, str, str]:
        order, costs = tmp_path / "order.csv", tmp_path / "profile.json"
        order.write_text(content)
        costs.write_text(json.dumps(profile or {**PROFILE, **LINKS}))
        code = cli.main(["schedule", "check", str(order), "--profile", str(costs), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ask


def test_a_csv_that_torch_wrote(asked: Asked, tmp_path: Path) -> None:
    """Torch's interleaved 1F1B has two chunks per stage, which share the times of the profile's stages."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    numbers = {"group_size": 4, "group_rank": 0, "num_stages": 8, "has_backward": True, "submod": None}
    theirs = schedules.ScheduleInterleaved1F1B([Mock(stage_index=index, **numbers) for index in (0, 1)], 8)
    file = tmp_path / "torch.csv"
    theirs._dump_csv(str(file), format="compute_only")
    order = torch_csv.read(file.read_text(), "torch.csv")
    costs = Costs(linear(4), PROFILE["f"], PROFILE["b"], PROFILE["w"], links={(1, 2): Link(35), (2, 1): Link(20)})
    code, out, err = asked(file.read_text(), "--format", "json")
    found = json.loads(out)
    assert (code, err, found["chunks"], found["microbatches"]) == (0, "", 8, 8)
    assert found["times"]["makespan_ms"] == makespan_ms(order, costs.split(order.placement))
    assert [each["peak"] for each in found["memory"]] == list(peak_memory(order, costs.split(order.placement)))


@pytest.mark.parametrize("policy", ["1f1b", "zb", "interleaved", "zbv", "dualpipev"])
def test_findings_are_those_of_simulator_and_bound(policy: str, asked: Asked) -> None:
    even = with_delays(uniform(4, 10, 20, 10), {(1, 2): 35, (2, 1): 20})
    costs = policies.costs_for(policy, even)
    order = policies.build(policy, even, 8)
    profile = {"f": [10] * 4, "b": [20] * 4, "w": [10] * 4, **LINKS}
    for options, comm in (((), None), (("--comm", "direct:2"), Direct(2))):
        code, out, err = asked(torch_csv.write(order), "--format", "json", *options, profile=profile)
        found = json.loads(out)
        took_ms = makespan_ms(order, costs) if comm is None else makespan_ms(order, costs, comm)
        assert (code, err, found["passed"], found["blocked"]) == (0, "", True, None)
        # An overlapped pair costs what its operations do unless the profile says otherwise.
        assert found["times"]["makespan_ms"] == pytest.approx(took_ms)
        assert found["times"]["bound_ms"] == lower_bound(costs, 8) <= took_ms
        assert found["times"]["gap"] == pytest.approx(took_ms / lower_bound(costs, 8) - 1)
        assert found["times"]["send_queue"] >= 1 and found["chunks"] == costs.chunks


def test_for_a_person(asked: Asked) -> None:
    order = torch_csv.write(policies.build("1f1b", uniform(4), 8))
    code, out, _ = asked(order, "--memory", "4", "--prices")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "order.csv: 4 stages, 8 micro-batches"
    assert lines[1].startswith("no deadlock; room for 1 message of a kind")
    assert lines[2] == "memory per stage: 4 3 2 1 of 4 4 4 4, fits"
    assert lines[3].startswith("step ") and lines[4].startswith("proven bound ")
    assert [line.split("  ")[0] for line in lines[7:13]] == ["link 1>2", "link 2>1", *(f"stage {s}" for s in range(4))]
    assert lines[14].startswith("another order saves ") and lines[15].startswith("1 more memory on stage 0 saves ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("0F0,0B0\n1B0,1F0\n", "blocks itself: stage 1 stands at BW(chunk 1, micro-batch 0) and waits for F(chunk 1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "stage 1 lacks B(chunk 1, micro-batch 1)"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "stage 0 has F(chunk 0, micro-batch 0) 2 times"),
    ],
)
def test_an_order_that_cannot_run_fails(content: str, said: str, asked: Asked) -> None:
    profile = {"f": [1, 1], "b": [1, 1], "w": [1, 1]}
    code, out, err = asked(content, profile=profile)
    assert (code, err) == (1, "") and "cannot run: " in out and said in out and "bound" not in out
    code, out, err = asked(content, "--format", "json", profile=profile)
    found = json.loads(out)
    assert code == 1 and said in found["blocked"] and not found["passed"] and found["times"] is None


def test_an_order_that_blocks_small_queues_says_how_much_room_is_enough(asked: Asked) -> None:
    """GPipe's last stage takes in all activations before the first gradient; its neighbour must be able to put them down."""
    backwards = ",".join(f"1B{m}" for m in (3, 2, 1, 0))
    content = f"0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F3,1F2,1F1,1F0,{backwards}\n"
    profile = {"f": [1, 1], "b": [1, 1], "w": [1, 1]}
    code, out, _ = asked(content, "--format", "json", profile=profile)
    assert code == 0 and json.loads(out)["times"]["send_queue"] == 4


def test_an_order_with_micro_batches_out_of_order_is_timed_and_what_it_cannot_do_is_told(asked: Asked) -> None:
    """Torch's looped BFS runs the last micro-batch's backward first."""
    content, profile = "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", {"f": [1, 1], "b": [1, 1], "w": [1, 1]}
    said = "stage 0 runs BW(chunk 0, micro-batch 1) before BW(chunk 0, micro-batch 0)"
    code, out, _ = asked(content, profile=profile)
    assert code == 0 and f"cannot be with adapt: schedule order.csv: {said}" in out and "proven bound" in out
    found = json.loads(asked(content, "--format", "json", profile=profile)[1])
    assert said in found["out_of_order"] and found["passed"] and found["times"]["makespan_ms"] > 0
    in_order = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert json.loads(asked(in_order, "--format", "json", profile=profile)[1])["out_of_order"] == ""


def test_an_order_that_does_not_fit_fails_and_is_timed(asked: Asked) -> None:
    order = torch_csv.write(policies.build("gpipe", uniform(4), 8))
    code, out, _ = asked(order, "--memory", "5")
    assert code == 1 and "does not fit: stage 0 holds 8 of 5" in out and "of orders without caps: gap " in out
    assert asked(order, "--memory", "8")[0] == 0


@pytest.mark.parametrize(
    ("content", "options", "line"),
    [
        ("0F0,0B0\n1F0,1X0\n", (), "order.csv line 2 column 2=1X0: must be chunk, F, I, W or B, micro-batch"),
        ("0F0,0SEND_F0\n1F0\n", (), 'column 2=0SEND_F0: is no computation; write the file with format="compute_only"'),
        ("0F0,1B0\n1F0,0B0\n", (), "order.csv line 2 column 1=1F0: chunk 1 stands on line 1 already"),
        ('"0F0\n', (), "is not CSV"),
        ("", (), "order.csv='': needs one line of operations per stage"),
        ("0F0,0B0\n1F0,1B0\n", (), "order's stages=2: must be as many as have costs, 4"),
        ("0F0,0B0\n1F0,1B0\n", ("--policy", "zb"), "--policy=zb: does not go with check"),
        ("0F0,0B0\n1F0,1B0\n", ("--exact",), "--exact=True: does not go with check"),
        ("0F0,0B0\n1F0,1B0\n", ("--format", "svg"), "--format=svg: must be one of text, json"),
    ],
)
def test_what_is_no_order_is_one_line(content: str, options: tuple[str, ...], line: str, asked: Asked) -> None:
    code, out, err = asked(content, *options)
    assert (code, out) == (2, "") and err.startswith("helixrt: ") and err.count("\n") == 1 and line in err


def test_prices_and_files_go_with_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", "check"]) == 2
    assert "helixrt schedule check='': needs the order's file" in capsys.readouterr().err
    assert cli.main(["schedule", "compare", "x.csv"]) == 2
    assert "FILE=x.csv: goes with check" in capsys.readouterr().err
    assert cli.main(["schedule", "--prices", "--stages", "2", "--microbatches", "2"]) == 2
    assert "--prices=True: goes with check" in capsys.readouterr().err
