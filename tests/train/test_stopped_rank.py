"""A rank of the main job is stopped (SIGSTOP): for seconds, the other replica goes on without it, and has it back afterwards;
for good, its replica is started again."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from helixrt.timeouts import derive
from tests.train.jobs import Job, assert_consistent, finish
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(480),
]

STEPS = 500


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, f"steps={STEPS}", "step_timeout_s=30", "transport.kind=tcp", "checkpoint.every=250")
    yield made
    made.end()


def pid_of(job: Job, rank: str) -> int:
    """From its flight record."""
    (flight,) = job.folder.glob(f"flight/{rank}.inc0.story.jsonl")
    return int(re.findall(r'"pid":([0-9]+)', flight.read_text())[0])


def contributors(job: Job) -> list[int]:
    """How many replicas contributed to each step on disk."""
    return [len(record.contributors) for record in job.log().chain()] if job.entries() else []


@pytest.mark.grid
@pytest.mark.parametrize("rank", ["r1.pp0", "r1.pp1"])
def test_the_others_go_on_and_it_comes_back(job: Job, rank: str) -> None:
    driver = job.start()
    until(lambda: bool(list(job.root.glob("[0-9]*/[0-9]*"))) and len(contributors(job)) > 20)
    pid = pid_of(job, rank)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: contributors(job)[-10:] == [1] * 10)
    os.kill(pid, signal.SIGCONT)
    ended = finish(driver)
    report = job.report() if ended.code == 0 else None
    assert report is not None, job.why(ended)
    lost = sorted(failure["replica"] for failure in report["failures"])
    assert lost in ([], [1]), report["failures"]
    assert_consistent(job, ended, lost, STEPS)
    assert contributors(job)[-1] == 2


STEP_TIMEOUT_S = 12.0


@pytest.mark.grid
@pytest.mark.parametrize(("replicas", "stage"), list(itertools.product((1, 2), (0, 1))))
def test_a_stage_that_is_stopped_for_good_has_its_replica_started_again_and_is_named(
    tmp_path: Path, replicas: int, stage: int
) -> None:
    """Its neighbour, which waits for it and keeps the link, is not."""
    shape = (f"mesh.replicas={replicas}", "mesh.pp=2", f"steps={STEPS}", "checkpoint.every=10")
    job = Job(tmp_path, *shape, f"step_timeout_s={STEP_TIMEOUT_S:g}", "transport.kind=tcp")
    try:
        driver = job.start()
        until(lambda: bool(list(job.root.glob("[0-9]*/[0-9]*"))) and len(contributors(job)) > 20)
        os.kill(pid_of(job, f"r0.pp{stage}"), signal.SIGSTOP)
        ended = finish(driver)
        report = assert_consistent(job, ended, [0], STEPS, replicas)
        job.nothing_is_left()
    finally:
        job.end()
    (failure,) = report["failures"]
    said = re.match(rf"r0\.pp{stage}\.\S+ incarnation 0 has not reported for (\d+) s: it is stopped", failure["seen"])
    assert said is not None, failure["seen"]
    looks = 2 * derive(STEP_TIMEOUT_S).progress_period_s
    assert STEP_TIMEOUT_S <= int(said[1]) <= STEP_TIMEOUT_S + looks + 1.0, "by time that was observed"
    assert failure["rejoined_after_s"] is not None
