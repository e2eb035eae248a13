"""The main job, its driver killed, goes on with other stages, tensor ranks and another schedule: losses are those of a job that
nobody interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.jobs import assert_consistent, kills_driver, losses

pytestmark = [
    pytest.mark.slow,  # three drivers each
    pytest.mark.timeout(480),
]
STEPS = 30
CHANGES = {
    "stages to tensor ranks": (
        ("model.tied=true",),
        ("mesh.pp=2", "mesh.tp=1"),
        ("mesh.pp=1", "mesh.tp=2"),
    ),
    "tensor ranks in two stages with two chunks each to one rank": (
        ("model.family=llama", "model.layers=4"),
        ("mesh.pp=2", "mesh.tp=2", "schedule.name=interleaved"),
        ("mesh.pp=1", "mesh.tp=1", "schedule.name=1f1b"),
    ),
    "experts over context ranks to stages": (
        ("model.experts=4", "model.capacity=8", "model.auxiliary=0"),
        ("mesh.pp=1", "mesh.cp=2"),
        ("mesh.pp=2", "mesh.cp=1"),
    ),
}

UNDISTURBED = ("chaos.kill=[]", "chaos.run=[]", "chaos.fault=[]")


@pytest.mark.grid
@pytest.mark.parametrize("change", CHANGES)
def test_the_job_goes_on_with_another_mesh(change: str, make_job: Any, tmp_path: Path) -> None:
    model, before, after = CHANGES[change]
    run = make_job("mesh.replicas=1", f"steps={STEPS}", *model, *before)
    run.overrides += kills_driver(run, 15)  # soon after the checkpoint of step 10
    plain = run.run(*after, f"output.root={tmp_path / 'plain'}", *UNDISTURBED)
    assert plain.code == 0, run.why(plain)
    died = run.run()
    assert died.code != 0 and run.newest_checkpoint().record.step == 10, run.why(died)
    assert_consistent(run, run.run("resume=true", *after), steps=STEPS, replicas=1)
    expected, got = losses(tmp_path / "plain", STEPS), losses(run.root, STEPS)
    assert got.keys() == expected.keys()
    assert got == pytest.approx(expected, rel=1e-4)
