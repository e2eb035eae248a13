"""`helixrt strands show`: planned ahead for links that are not there, measured where nothing is supposed; wrong input."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from helixrt import cli
from helixrt.commands import strands as command
from helixrt.commands import subject
from helixrt.passes.operators import COMMUNICATION, Kind
from tests import programs

TALK = {str(kind) for kind in COMMUNICATION}
SMALL = ["--layers", "1", "--seq-len", "16", "--batch", "1"]
SHARED = ["gpt-tiny", *SMALL, "--tp", "2", "--link", "80", "--latency", "30"]
MODULE = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

number = 3

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def alone():
    return net(), torch.randn(4, 8), {"target": torch.randn(4, 8), "loss": nn.functional.mse_loss}

def shared():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)
    return model, torch.randn(4, 8), {"target": torch.randn(4, 8), "loss": nn.functional.mse_loss}

def shared_on_gpus():
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net().cuda(), init_device_mesh("cuda", (2,)), plan)
    return model, torch.randn(4, 8), {"target": torch.randn(4, 8), "loss": nn.functional.mse_loss}

def branching():
    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() if x.sum() > 0 else x.sum()
    return Branching(8, 8), torch.randn(4, 8)

def broken():
    raise OSError("no such disk")

def nothing():
    return net()

def bare():
    return (net(),)

def weighed():
    return net(), torch.randn(4, 8), {"target": torch.zeros(4, dtype=torch.long), "loss": nn.CrossEntropyLoss(torch.ones(8))}
"""


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["strands", "show", *arguments]) == 0
    assert not dist.is_initialized(), "the supposed ranks are gone"
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found = json.loads(said(capsys, *arguments, "--format", "json"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is said of wrong arguments."""
    assert cli.main(["strands", "show", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("helixrt: ") and captured.err.count("\n") == 1
    assert not dist.is_initialized()
    return captured.err


def test_communication_takes_what_the_link_is_said_to_take_and_compute_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = figures(capsys, *SHARED)
    assert found["format"] == "helixrt strands 1" and found["state"] == "woven"
    assert [(one["ranks_per_host"], one["mbit_per_s"]) for one in found["supposed"].values()] == [([1, 1], 80)]
    talk = [one for listed in found["strands"].values() for one in listed if one["class"] in TALK]
    assert len(talk) == 8 // 2, "an all-reduce of attention and one of the network, each way"
    for one in talk:  # 16 x 128 floats; a ring of two sends as many bytes as there are, 10 in a microsecond
        assert one["class"] == str(Kind.INTER) and one["bytes"] == 16 * 128 * 4 and not one["measured"]
        assert one["time_us"] == pytest.approx(30 + 16 * 128 * 4 / 10)
    compute = [one for listed in found["strands"].values() for one in listed if one["class"] == str(Kind.COMPUTE)]
    assert compute and all(one["measured"] and one["time_us"] > 0 for one in compute)
    assert {one["module"] for one in compute} >= {"layers.0.qkv", "layers.0.ffn_in"}


def test_the_plan_in_json_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, *SHARED)
    plan, strands = found["plan"], found["strands"]
    places = sorted((name, index) for name, listed in strands.items() for index in range(len(listed)))
    assert sorted(map(tuple, plan["order"])) == places, "every operator of both strands once"
    collectives = [place for place in places if strands[place[0]][place[1]]["class"] in TALK]
    assert sorted(tuple(pair["collective"]) for pair in plan["pairs"]) == collectives
    assert plan["bound_us"] <= plan["predicted_us"] * 1.000001 <= plan["sequential_us"] * 1.000001
    assert plan["communication_us"] == pytest.approx(sum(strands[s][i]["time_us"] for s, i in collectives))
    for timeline, total in ((plan["timeline"], "predicted_us"), (plan["sequential_timeline"], "sequential_us")):
        for lane in (timeline["processor"], timeline["network"]):
            for (*_, end), (*_, start, _) in zip(lane, lane[1:], strict=False):
                assert end <= start + 1e-6, "one at a time"
        assert sorted((s, i) for s, i, *_ in timeline["network"]) == collectives
        assert max(span[4] for lane in timeline.values() for span in lane) == pytest.approx(plan[total])


def test_text_says_what_was_supposed_and_what_hides_behind_what(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, *SHARED)
    assert text.startswith("gpt-tiny, 1 layer, 1 x 16 tokens, tp 2\nwoven")
    assert "supposed: 2 ranks on 2 hosts, 80 Mbit/s and 30 us; an estimate, only compute is measured" in text
    for line in ("backward strand: ", "forward strand: ", "  f.layers_0_ffn_out_all_reduce: ", "  predicted: "):
        assert f"\n{line}" in text, line


@pytest.mark.system
def test_pictures_show_every_operator_and_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert said(capsys, *SHARED, "-o", "strands.svg") == said(capsys, *SHARED, "-o", "strands.png") == ""
    root = ElementTree.fromstring((tmp_path / "strands.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    wide, high = float(root.get("width", "")), float(root.get("height", ""))
    hints = [title.text or "" for title in root.iterfind(f".//{space}rect/{space}title")]
    drawn = Counter(found.groups() for found in (re.match(r"(\S+?)(?: of \S+)?, (\w+) \(", hint) for hint in hints) if found)
    for name, operators in figures(capsys, *SHARED)["strands"].items():
        for one in operators:
            if one["class"] in (str(Kind.COMPUTE), *TALK):
                assert drawn[one["name"], name] == 2, "before and after"
    for rect in root.iterfind(f".//{space}rect"):
        x, y = float(rect.get("x", 0)), float(rect.get("y", 0))
        assert 0 <= x and x + float(rect.get("width", 0)) <= wide + 0.5 and y + float(rect.get("height", 0)) <= high
    for words in root.iterfind(f".//{space}text"):
        assert 0 < float(words.get("x", 0)) < wide and 0 < float(words.get("y", 0)) < high
    assert (tmp_path / "strands.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.system
@pytest.mark.parametrize("graph", ["forward", "backward", "woven"])
def test_graphs_are_python(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    (defined,) = ast.parse(said(capsys, *SHARED, "--graph", graph)).body
    assert isinstance(defined, ast.ClassDef)
    assert "all_reduce" in ast.unparse(defined)


def test_a_model_that_shares_nothing_is_run_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "llama-tiny", *SMALL)
    assert found["measured_ms"].keys() == {"forward", "backward", "woven"} and min(found["measured_ms"].values()) > 0
    assert found["supposed"] == {} and found["plan"]["pairs"] == [] and found["plan"]["communication_us"] == 0
    assert found["plan"]["predicted_us"] == pytest.approx(found["plan"]["compute_us"])


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "s2_own_models.py").write_text(MODULE)
    monkeypatch.delitem(sys.modules, "s2_own_models", raising=False)
    return "s2_own_models"


def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], own_module: str) -> None:
    alone = figures(capsys, f"{own_module}:alone")
    assert alone["state"] == "woven" and alone["measured_ms"] and alone["plan"]["communication_us"] == 0
    shared = figures(capsys, f"{own_module}:shared", "--ranks", "2", "--link", "10")
    assert [one["class"] for one in shared["strands"]["forward"] if one["class"] in TALK] == [str(Kind.INTER)]
    assert shared["supposed"] and not shared["measured_ms"]


def test_a_loss_with_tensors_is_where_the_model_is(own_module: str) -> None:
    made = subject.of_user(f"{own_module}:weighed", torch.device("meta"))
    assert isinstance(made.loss, torch.nn.CrossEntropyLoss) and made.loss.weight is not None
    assert made.loss.weight.is_meta and made.target.is_meta and next(made.module.parameters()).is_meta


def test_ranks_that_outnumber_the_gpus_of_a_machine_share_them_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for local, ranks, backend in (("3", "4", "gloo"), ("1", "2", "nccl")):
        monkeypatch.setenv("LOCAL_RANK", local)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        device = command._device("cuda")
        assert device == torch.device("cuda", 1) and command._backend(device, int(ranks)) == backend
    assert chosen == [torch.device("cuda", 1)] * 2 and command._backend(torch.device("cpu"), 2) == "gloo"


@pytest.mark.gpu
def test_a_model_on_a_gpu_is_run_and_measured_by_the_gpus_clock(capsys: pytest.CaptureFixture[str], own_module: str) -> None:
    for function in ("alone", "weighed"):
        found = figures(capsys, f"{own_module}:{function}", "--device", "cuda")
        compute = [one for listed in found["strands"].values() for one in listed if one["class"] == str(Kind.COMPUTE)]
        assert found["state"] == "woven" and found["measured_ms"] == {}
        assert compute and all(one["measured"] and one["time_us"] > 0 for one in compute)


@pytest.mark.parametrize(
    ("function", "said_of_it"),
    [
        ("number", "has no function number"),
        ("missing", "has no function missing"),
        ("broken", "raised OSError: no such disk"),
        ("nothing", "must return (model, argument, ...)"),
        ("bare", "must return the arguments of a step after the model"),
        ("branching", "cannot be captured"),
    ],
)
def test_a_function_that_makes_no_model(
    function: str, said_of_it: str, capsys: pytest.CaptureFixture[str], own_module: str
) -> None:
    assert said_of_it in refused(capsys, f"{own_module}:{function}")


@pytest.mark.parametrize(
    ("arguments", "said_of_it"),
    [
        (["gpt"], "MODEL=gpt: must be one of gpt-nano, gpt-small, gpt-tiny"),
        (["no.such:model"], "no.such cannot be imported"),
        (["gpt-tiny", "--tp", "3"], "heads=4: must be a multiple of the 3 ranks"),
        (["gpt-tiny", "--tp", "0"], "--tp=0"),
        (["gpt-tiny", "--tp", "two"], "--tp=two"),
        (["gpt-tiny", "--sequence"], "sequence parallelism needs a group"),
        (["gpt-tiny", "--ep", "2"], "experts=0"),
        (["gpt-tiny", "--layers", "-1"], "--layers=-1"),
        (["gpt-tiny", "--ranks", "2"], "--ranks=2: is for module:function"),
        (["a:b", "--tp", "2"], "--tp=2: is for the project's models"),
        (["gpt-tiny", "--link", "10"], "--link=10: is for links that are not there"),
        (["gpt-tiny", "--tp", "2", "--link", "0"], "--link=0: must be above 0"),
        (["gpt-tiny", "--tp", "2", "--latency", "nan"], "--latency=nan"),
        (["gpt-tiny", "--tp", "2", "--processor", "2"], "--processor=2: must be between 0 and 1"),
        (["gpt-tiny", "--tp", "2", "--per-host", "0"], "--per-host=0"),
        (["gpt-tiny", "--microbatches", "1"], "--microbatches=1"),
        (["gpt-tiny", "--codegen", "c"], "codegen=c: must be one of eager, inductor"),
        (["gpt-tiny", "--device", "tpu"], "--device=tpu: must be cpu or cuda"),
        (["gpt-tiny", "--graph", "all"], "--graph=all: must be one of forward, backward, woven"),
        (["gpt-tiny", "--graph", "woven", "--format", "json"], "--format=json: does not go with --graph"),
        (["gpt-tiny", "--format", "pdf"], "--format=pdf: must be one of text, json, svg, png"),
        (["gpt-tiny", "--format", "png"], "--format=png: is not for the terminal"),
        ([*SHARED, "-o", "no/such/folder.png"], "--output=no/such/folder.png: cannot be written"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said_of_it: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said_of_it in refused(capsys, *arguments)


def figures_of_two_ranks(*arguments: str) -> dict[str, Any]:
    """Of two processes of this machine; the first one answers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    meeting |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-m", "helixrt.cli", "strands", "show", *arguments, "--format", "json"]
    environment = os.environ | meeting | {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        programs.Popen(argv, env=environment | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and outputs[1] == ""
    found = json.loads(outputs[0])
    assert isinstance(found, dict) and found["supposed"] == {}
    talk = [one for one in found["strands"]["forward"] if one["class"] in TALK]
    assert talk and all(one["measured"] and one["time_us"] > 0 for one in talk)
    return found


@pytest.mark.slow
def test_ranks_that_are_there_are_measured() -> None:
    assert figures_of_two_ranks("gpt-tiny", *SMALL, "--tp", "2")["measured_ms"]["woven"] > 0


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_are_measured(own_module: str) -> None:
    found = figures_of_two_ranks(f"{own_module}:shared_on_gpus", "--ranks", "2", "--device", "cuda")
    assert found["state"] == "woven" and found["measured_ms"] == {}
