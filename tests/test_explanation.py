"""explain(): plain data with stable keys, files by their endings, times and a picture also where nothing communicates."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import helixrt
from helixrt.commands.subject import Sizes, of_project
from helixrt.compile.ahead import Links, fake_world, plan_ahead
from helixrt.compile.explanation import FORMS
from helixrt.compile.shapes import Words
from helixrt.errors import ConfigError
from helixrt.passes.operators import COMMUNICATION, Kind
from helixrt.passes.pair import Rules

KEYS = {
    "format",
    "state",
    "reason",
    "seconds",
    "passes",
    "graphs",
    "measured_ms",
    "memory_bytes",
    "supposed",
    "strands",
    "plan",
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def trained(**options: object) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    helixrt.compile(model, loss=F.mse_loss, **options)
    model.train_step(torch.randn(4, 4), target=torch.randn(4, 2))
    return model


def test_times_are_measured_when_they_are_asked_for(tmp_path: Path) -> None:
    model = trained(microbatches=2)
    brief, full = model.explain(), model.explain(times=True)
    assert brief.plan.forward == () and brief.to_dict()["strands"] == {"forward": [], "backward": []}
    with pytest.raises(ConfigError, match="operators were profiled"):
        brief.picture()
    for name in ("forward", "backward"):
        operators = full.to_dict()["strands"][name]
        assert sum(one["class"] == str(Kind.COMPUTE) for one in operators) == full.counts[name][str(Kind.COMPUTE)]
        assert all((one["time_us"] > 0) == (one["class"] == str(Kind.COMPUTE)) for one in operators)
    before, after = full.timings()
    assert before.total_us == pytest.approx(after.total_us) == pytest.approx(full.to_dict()["plan"]["compute_us"])
    assert full.state == brief.state == "woven" and full.code == brief.code


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"microbatches": 1}, {"microbatches": 2, "strands": 1}])
def test_every_explanation_is_plain_data(options: dict[str, int]) -> None:
    explanation = trained(**options).explain(times=True)
    found = json.loads(json.dumps(explanation.to_dict()))
    assert found.keys() == KEYS and found["format"] == "helixrt strands 1"
    assert found["state"] == explanation.state and (found["plan"] is None) == (explanation.plan is None)


def test_a_model_that_has_not_trained_says_so(tmp_path: Path) -> None:
    model = helixrt.compile(nn.Linear(4, 4), loss=F.mse_loss)
    explanation = model.explain(times=True)
    assert explanation.to_dict()["plan"] is None and explanation.to_dict().keys() == KEYS
    assert str(explanation) == explanation.state == "not captured yet: call train_step first"


def test_files_are_written_by_their_endings(tmp_path: Path) -> None:
    explanation = trained(microbatches=2).explain(times=True)
    for form in FORMS:
        explanation.save(tmp_path / f"out.{form}", "a title <of> mine")
    assert (tmp_path / "out.txt").read_text() == f"{explanation}\n"
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(explanation.to_dict()))
    root = ElementTree.fromstring((tmp_path / "out.svg").read_text())
    assert "a title <of> mine" in [words.text for words in root.iter("{http://www.w3.org/2000/svg}text")]
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ConfigError, match="must end in one of .txt, .json, .svg, .png"):
        explanation.save(tmp_path / "out.pdf")


def test_a_supposed_world_needs_that_there_is_none() -> None:
    with fake_world(2):
        assert dist.get_world_size() == 2
        with pytest.raises(ConfigError, match="ranks=3: cannot be supposed"), fake_world(3):
            pass
    assert not dist.is_initialized()


def test_a_world_ends_when_its_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), fake_world(2):
        raise ZeroDivisionError
    assert not dist.is_initialized()


@pytest.mark.system
def test_ranks_of_one_host_talk_inside_it() -> None:
    """Tensor parallelism inside two hosts, experts between them: two all-reduces a layer, two all-to-alls to experts."""
    with fake_world(4):
        made = of_project("moe-tiny", Sizes(layers=2, seq_len=8, batch=1, tp=2, ep=2), 1, torch.device("cpu"))
        links, few = Links(per_host=2), Rules(labels=300)
        found = plan_ahead(made.module, made.args, loss=made.loss, target=made.target, links=links, mode="estimate", rules=few)
    talk = [operator for operator in found.plan.forward if operator.kind in COMMUNICATION]
    kinds = Counter((operator.signature.partition("(")[0], operator.kind) for operator in talk)
    assert kinds == {("all_reduce", Kind.INTRA): 4, ("all_to_all_single", Kind.INTER): 2}
    assert {str(one).partition(",")[0] for one in found.supposed.values()} == {"2 ranks on one host", "2 ranks on 2 hosts"}
    assert {f"network {where}" for where in ("inside the node", "between nodes")} <= {
        shape.text for shape in found.picture().shapes if isinstance(shape, Words)
    }


def test_slower_links_take_longer_and_what_was_said_is_what_is_told() -> None:
    found = []
    for mbit in (1000.0, 10.0):
        with fake_world(2):
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            found.append(
                plan_ahead(model, (torch.randn(4, 16),), loss=F.mse_loss, target=torch.randn(4, 16), links=Links(mbit=mbit))
            )
    for explanation, mbit in zip(found, ("1,000", "10"), strict=True):
        assert f"2 ranks on 2 hosts, {mbit} Mbit/s and 100 us" in str(explanation)
        assert not any(time.measured for name, time in explanation.plan.profile.times.items() if " over " in name)
    assert found[0].plan.pairing.communication_us < found[1].plan.pairing.communication_us


@pytest.mark.parametrize(
    "wrong", [{"mbit": 0.0}, {"inside_mbit": float("inf")}, {"latency_us": -1.0}, {"per_host": 0}, {"processor": 1.5}]
)
def test_links_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"links.{next(iter(wrong))}="):
        Links(**wrong)  # type: ignore[arg-type]
