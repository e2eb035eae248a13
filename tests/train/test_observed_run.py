"""A whole run of the main job that measures itself: a stage is slowed down on purpose, and the report says so."""

from __future__ import annotations

from typing import Any

import pytest

from helixrt import cli
from helixrt.job.report import read_flight
from helixrt.record import Kind

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
]
SLOW_FROM, STEPS = 8, 16
# Operations sleep, so that what else the machine does hides in the sleep, and each step is measured apart.
LEAST_MS, SLOW_MS = 5, 50
# Two steps in a row confirm a change: a step that another program held up may be the first of them, or hide the true first.
FOUND_IN = range(SLOW_FROM - 1, SLOW_FROM + 3)


def test_a_slow_stage_is_seen_live_and_told_afterwards(make_job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sleeps = [f"{{stage: {stage}, factor: 1, least_ms: {LEAST_MS}}}" for stage in (0, 1)]
    sleeps.append(f"{{stage: 1, factor: 30, least_ms: {SLOW_MS}, steps: [{SLOW_FROM}, 1000]}}")
    slow = f"chaos.slow=[{', '.join(sleeps)}]"
    job = make_job(f"steps={STEPS}", "mesh.replicas=1", "mesh.pp=2", "schedule.microbatches=8", slow)
    ended = job.run()
    assert ended.code == 0, ended.err
    (found,) = job.report()["costs"]
    assert found["placement"] == [0, 1] and found["microbatches"] == 8 and found["step"] == STEPS
    assert {(each["op"], each["stage"]) for each in found["operations"]} == {("F", 0), ("BW", 0), ("F", 1), ("BW", 1)}
    assert {(link["from"], link["to"]) for link in found["links"]} == {(0, 1), (1, 0)}
    assert all(link["clock_offset_ms"] == 0 for link in found["links"]), "one machine has one clock"
    at_the_time = [each for each in found["changes"] if each["step"] in FOUND_IN]
    changes = [each for each in at_the_time if each["after_ms"] > 2 * each["before_ms"]]
    assert {"F of chunk 1", "BW of chunk 1"} <= {each["what"] for each in changes}, found["changes"]
    assert "stage 1" in {each["place"] for each in found["stragglers"] if each["cause"] == "compute"}
    told = [e for e in read_flight(job.folder / "flight") if e.kind is Kind.COSTS_CHANGED]
    live = [e for e in told if e.detail["what"] == "F of chunk 1" and e.detail["since"] in FOUND_IN]
    assert live and live[0].rank == "r0.pp0", "the leader knew it during the run"
    assert live[0].step <= SLOW_FROM + 5
    page = (job.folder / "report.html").read_text(encoding="utf-8")
    assert "Measured costs, replica 0" in page and "Straggler: stage 1" in page

    capsys.readouterr()
    assert cli.main(["observe", str(job.folder)]) == 0
    assert "straggler: stage 1: its operations take" in capsys.readouterr().out
    assert cli.main(["schedule", "--profile", str(job.folder / "profile.json")]) == 0
