"""Whole runs of the main job whose replicas have data-, tensor- and context-parallel ranks, with a replica that is lost."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.train.jobs import assert_consistent, kills, kills_driver, losses

pytestmark = [
    pytest.mark.timeout(300),
]
TP = ("mesh.pp=1", "mesh.tp=2")


def rounding(shape: str) -> float:
    """How far losses may be apart, relatively, where other ranks add up in another order."""
    return 1e-2 if "bfloat16" in shape else 1e-4


@pytest.mark.system
@pytest.mark.parametrize(
    ("shape", "said", "log"),
    [
        ((*TP, "dtype=bfloat16"), "2 replicas x 1 stage x 2 tensor ranks", "r1.pp0.tp1.inc0.log"),
        (("mesh.pp=1", "mesh.dp_shard=2"), "2 replicas x 2 shards", "r1.pp0.dp1.inc0.log"),
    ],
    ids=["tp, bfloat16", "dp_shard"],
)
def test_a_replica_of_two_ranks_is_lost_and_comes_back(
    shape: tuple[str, ...], said: str, log: str, make_job: Any, seed: int
) -> None:
    choice = random.Random(seed)
    replica, step = choice.randrange(2), choice.randint(3, 16)
    run = make_job(kills((replica, step, "exchange_early")), *shape, "steps=40", patient=True)
    report = assert_consistent(run, run.run(), lost=[replica], steps=40)
    (failure,) = report["failures"]
    assert failure["step"] == step and failure["survivors_recomputed"] == 0 and failure["rejoined_after_s"] is not None
    assert run.log().head.replicas == (0, 1)
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert said in page
    logs = {log.name for log in (run.folder / "logs").iterdir()}
    assert {"r0.pp0.inc0.log", log} <= logs


@pytest.mark.slow
def test_the_experiment_of_ci_runs_with_tensor_ranks(tmp_path: Path) -> None:
    """Eight ranks, one replica of which is lost, as the guide says."""
    command = [sys.executable, "-m", "helixrt.train", "+experiment=ci", "mesh.tp=2", f"output.root={tmp_path}"]
    done = programs.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "latest" / "report.json").read_text())
    audit = report["data_audit"]
    assert (audit["gaps"], audit["repeats"]) == (0, 0) and len(report["replicas"]) == 2
    assert len({replica["state_digest"] for replica in report["replicas"]}) == 1
    assert [failure["rejoined_after_s"] is not None for failure in report["failures"]] == [True]


SHAPES = {
    "pp 2 x tp 2": ("mesh.pp=2", "mesh.tp=2", "model.family=llama", "model.tied=true"),
    "pp 2 x tp 2, gpt": ("mesh.pp=2", "mesh.tp=2"),
    "pp 2 x tp 2, bfloat16": ("mesh.pp=2", "mesh.tp=2", "model.family=llama", "schedule.graphs=always", "dtype=bfloat16"),
    "pp 2 x cp 2": ("mesh.pp=2", "mesh.cp=2", "model.tied=true"),
    "pp 2 x cp 2, ring": ("mesh.pp=2", "mesh.cp=2", "model.context=ring"),
    "pp 2 x ep 2": ("mesh.pp=2", "mesh.cp=2", "model.experts=4", "model.capacity=8", "model.auxiliary=0"),
    "cp 2 x tp 2": ("mesh.pp=1", "mesh.cp=2", "mesh.tp=2", "parallel.sequence=false"),
}


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_ranks_train_as_two_do_and_survive_a_kill(shape: str, make_job: Any, tmp_path: Path) -> None:
    """Up to the kill the losses are those of replicas of one rank; then the replica comes back whole."""
    run = make_job(kills((1, 12, "forward")), *SHAPES[shape], "steps=40", patient=True)
    alone = ("mesh.pp=1", "mesh.tp=1", "mesh.cp=1", "parallel.sequence=true", "chaos.kill=[]", "steps=13")
    plain = run.run(f"output.root={tmp_path / 'plain'}", *alone)
    assert plain.code == 0, run.why(plain)
    report = assert_consistent(run, run.run(), lost=[1], steps=40)
    assert report["failures"][0]["rejoined_after_s"] is not None
    assert run.log().head.replicas == (0, 1)
    expected, got = losses(tmp_path / "plain", 12), losses(run.root, 12)
    assert expected.keys() == got.keys() == set(range(1, 12))
    assert got == pytest.approx(expected, rel=rounding(shape))


# One chunk on each stage, and two. Clipping is off: the norm adds up buckets, which are other ones with other chunks.
LINEAR = (("1f1b", "always"), ("zb", "auto"))
FOLDED = (("zbv", "auto"), ("dualpipev", "auto"))


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_graph_schedules_train_alike_over_tensor_parallel_stages(make_job: Any, tmp_path: Path) -> None:
    """W apart from B or not, woven (dualpipev) or not: the same losses, bit for bit; by autograd within rounding."""
    four = ("mesh.replicas=1", "mesh.pp=2", "mesh.tp=2", "model.family=llama", "model.layers=4", "schedule.microbatches=4")
    run = make_job(*four, "optim.clip=0", "schedule.profile=estimate", "checkpoint.every=0", "steps=6", patient=True)
    found = {}
    for name, graphs in (("1f1b", "never"), *LINEAR, *FOLDED):
        root = tmp_path / f"{name}-{graphs}"
        ended = run.run(f"output.root={root}", f"schedule.name={name}", f"schedule.graphs={graphs}")
        assert ended.code == 0, run.why(ended)
        found[name, graphs] = losses(root, 7)
    plain = found["1f1b", "never"]
    assert list(plain) == [1, 2, 3, 4, 5, 6] and len(set(plain.values())) == 6
    for case in (*LINEAR, *FOLDED):
        assert found[case] == found[LINEAR[0]], case
        assert found[case] == pytest.approx(plain, rel=1e-4), case


SHARDED = {
    "pp 2 x dp_shard 2": ("mesh.pp=2", "mesh.dp_shard=2", "model.family=llama", "model.tied=true"),
    "dp_shard 2 x tp 2": ("mesh.pp=1", "mesh.dp_shard=2", "mesh.tp=2"),
    "pp 2 x dp_shard 2, bfloat16": ("mesh.pp=2", "mesh.dp_shard=2", "dtype=bfloat16"),
    "pp 2 x dp_shard 2, experts": (
        "mesh.pp=2", "mesh.dp_shard=2", "model.experts=4", "model.capacity=8", "model.auxiliary=0", "schedule.graphs=never"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("shape", SHARDED)
def test_shards_of_two_replicas_train_as_four_replicas_do_and_survive_a_kill(shape: str, make_job: Any, tmp_path: Path) -> None:
    """Four streams either way: up to the kill the loss of a replica is the mean of those of its shards' streams. Then the
    replica comes back whole, each rank with the shard of its equal rank."""
    run = make_job(kills((1, 12, "forward")), *SHARDED[shape], "steps=40", patient=True)
    alone = ("mesh.replicas=4", "mesh.pp=1", "mesh.dp_shard=1", "mesh.tp=1", "chaos.kill=[]", "steps=13")
    plain = run.run(f"output.root={tmp_path / 'plain'}", *alone)
    assert plain.code == 0, run.why(plain)
    report = assert_consistent(run, run.run(), lost=[1], steps=40)
    assert report["failures"][0]["rejoined_after_s"] is not None
    assert run.log().head.replicas == (0, 1)
    logs = {log.name for log in (run.folder / "logs").iterdir()}
    assert {"r0.pp0.inc0.log", "r0.pp0.dp1.inc0.log"} <= logs
    first, second, got = (losses(*which) for which in ((tmp_path / "plain", 12), (tmp_path / "plain", 12, 1), (run.root, 12)))
    assert first.keys() == second.keys() == got.keys() == set(range(1, 12))
    expected = {step: (first[step] + second[step]) / 2 for step in first}
    assert got == pytest.approx(expected, rel=rounding(shape))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exception", "stop"])
def test_the_rank_that_fails_is_named_and_not_the_one_that_waits_for_it(kind: str, make_job: Any) -> None:
    fault = f"chaos.fault=[{{kind: {kind}, replica: 1, rank: 1, step: 6, moment: forward}}]"
    run = make_job(fault, *TP, "steps=40", "step_timeout_s=20", patient=True)
    report = assert_consistent(run, run.run(), lost=[1], steps=40)
    (failure,) = report["failures"]
    assert "tp1" in failure["seen"], failure


@pytest.mark.slow
def test_a_run_is_resumed_with_fewer_data_streams_and_not_with_other_batches(make_job: Any) -> None:
    run = make_job("mesh.pp=2", "mesh.dp_shard=2", "steps=40", patient=True)
    run.overrides += kills_driver(run, 23)
    died = run.run()
    assert died.code != 0, run.why(died)
    other = run.run("resume=true", "data.batch=8")
    assert other.code == 2 and "data.batch=8: was 16 in the run to resume" in other.err, run.why(other)
    again = run.run("resume=true", "mesh.dp_shard=1", "mesh.tp=2")
    assert again.code == 0, run.why(again)
    head, audited = run.log().head, run.report()["data_audit"]
    assert head.step == 40 and [(deal.shards, deal.streams) for deal in head.deal] == [(2, 4)]
    assert (audited["gaps"], audited["repeats"]) == (0, 0)
