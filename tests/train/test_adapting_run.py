"""The order of the schedule changes while a model trains: all bits stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helixrt.bench._job_engine import pipeline_engine
from helixrt.engines.pipeline import PipelineEngine
from helixrt.errors import ConfigError
from helixrt.pipeline.graph_stage import GraphStage
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.planner.plan import plan
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.schedules import job_schedule
from tests.train.jobs import losses

MODEL = ModelConfig(layers=2, dim=16, heads=2, kv_heads=2, ffn=24, vocab=32, tied=True)
BATCH, SEQ, STEPS = 12, 8, 6
ADAPTING = ScheduleConfig("1f1b", 6, adapt="on")


def engine_of(schedule: ScheduleConfig, stage: int, group: Any) -> PipelineEngine:
    def batch_at(position: int) -> torch.Tensor:
        return torch.randint(0, MODEL.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(position))

    return pipeline_engine(
        MODEL,
        OptimConfig(lr=1e-2, warmup_steps=2, bucket_bytes=4096),
        schedule,
        batch=BATCH,
        seq_len=SEQ,
        steps=10,
        seed=5,
        stage=stage,
        stages=2,
        group=group,
        batch_at=batch_at,
        validation=batch_at,
        record=FlightRecord(f"pp{stage}"),
    )


def orders() -> list[Schedule]:
    """Of many kinds: whole backwards and split ones, few and all forwards first."""
    slow = with_delays(uniform(2, 1.0, 1.2, 0.8), {(0, 1): 4.0, (1, 0): 5.0})
    return [*(build(name, 2, 6) for name in ("zb", "gpipe", "zb-h2", "adaptra")), plan(slow, 6, effort=0.1).schedule]


@pytest.mark.system
def test_training_that_changes_its_order_every_step_has_the_bits_of_training_that_does_not(
    run_stages: Any, captured_once: None
) -> None:
    def body(stage: int, group: Any) -> list[list[Any]]:
        runs = []
        for changes in (False, True):
            engine = engine_of(ADAPTING, stage, group)
            graphs = engine._executor.stage
            assert isinstance(graphs, GraphStage)  # also for an order that autograd could run
            assert graphs.single.keys() == {(chunk, op) for chunk in engine.modules for op in Op}  # before the first step
            seen: list[Any] = []
            for step, order in zip(range(1, STEPS), orders(), strict=True):
                if changes:
                    made = engine.prepare_schedule(order)
                    assert engine.prepare_schedule(order) is made is not engine.prepare_schedule(order, again=True)
                    assert engine.schedule is not order
                    engine.use_schedule(order)
                    assert engine.schedule is order
                loss = engine.run(step, lambda bucket: None).loss
                grads = [bucket.clone() for bucket in engine.buckets]
                engine.apply(CommitRecord(step, step, "", ((0, 0),), {0: step}, "run"), grads)
                seen.append((loss, grads, [p.detach().clone() for _, p in engine.registered.parameters()]))
            engine.close()
            runs.append(seen)
        return runs

    for fixed, changing in run_stages(2, body):
        for (loss, grads, parameters), (loss_, grads_, parameters_) in zip(fixed, changing, strict=True):
            assert loss == loss_
            assert all(map(torch.equal, [*grads, *parameters], [*grads_, *parameters_]))


def test_the_first_order_is_planned_from_the_costs_of_an_earlier_run(tmp_path: Path) -> None:
    """Of stages of which the last one, with the vocabulary, takes three times as long."""
    profile = {"f": [10, 10, 10, 30], "b": [10, 10, 10, 30], "w": [10, 10, 10, 30], "delay": [[1, 1], [60, 60], [1, 1]]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    settings = ScheduleConfig("helix", 12, costs=str(path))
    made = job_schedule(settings, stages=4, layers=8, batch=24)
    from helixrt.schedule.exchange.profile import read

    costs = read(path.read_text(), "costs", str(path)).costs
    assert order_key(made) == order_key(plan(costs, 12).schedule) != order_key(build("helix", 4, 12))
    with pytest.raises(ConfigError, match=r"schedule.costs=.*profile.json: is of 4 stages, and mesh.pp=2"):
        job_schedule(settings, stages=2, layers=8, batch=24)
    with pytest.raises(ConfigError, match=r"schedule.costs=nowhere.json: cannot be read: No such file"):
        job_schedule(ScheduleConfig("helix", 12, costs="nowhere.json"), stages=4, layers=8, batch=24)
    with pytest.raises(ConfigError, match=r"schedule.adapt=maybe: must be one of off, on"):
        job_schedule(ScheduleConfig("helix", 12, adapt="maybe"), stages=4, layers=8, batch=24)
    with pytest.raises(ConfigError, match=r"schedule.adapt=on: needs mesh.pp above 1"):
        job_schedule(ScheduleConfig("gpipe", 12, adapt="on"), stages=1, layers=8, batch=24)


# gpipe leaves the most to gain, and any gain counts
EAGER = ("schedule.adapt=on", "schedule.name=gpipe", "schedule.microbatches=8", "schedule.adaptation.switch_ms=0")


# Operations that take so long leave the planner time to answer before the run ends, and cost the same in all steps.
SLEEPS = ", ".join(f"{{stage: {stage}, factor: 1, least_ms: 10}}" for stage in (0, 1))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_changes_its_order_has_the_losses_of_one_that_does_not(make_job: Any) -> None:
    shape = ("mesh.replicas=1", "mesh.pp=2", "steps=40", "chaos.kill=[]", "checkpoint.every=0", f"chaos.slow=[{SLEEPS}]")
    changing, fixed = make_job(*shape, *EAGER), make_job(*shape, *EAGER, "schedule.adapt=off", "schedule.graphs=always")
    for each in (changing, fixed):
        ended = each.run()
        assert ended.code == 0, each.why(ended)
    changes = changing.report()["order_changes"]
    assert [change for change in changes if not change["failed"]], changing.report()["costs"]
    assert fixed.report()["order_changes"] == []
    assert changing.log().head.orders == {0: changes[-1]["order"]} or len(changes) > 1
    kept = {order for record in changing.log().chain() for order in record.orders.values()}
    assert kept == {path.stem for path in (changing.folder / "schedules").glob("*.json")} - {order_key(build("gpipe", 2, 8))}
    assert losses(changing.root) == losses(fixed.root) != {}
    same = [each.report()["replicas"][0]["parameters_digest"] for each in (changing, fixed)]
    assert same[0] == same[1]
    assert "Changes of the schedule" in (changing.folder / "report.html").read_text(encoding="utf-8")
