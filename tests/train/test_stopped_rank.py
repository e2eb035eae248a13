"""A rank of the main job is stopped (SIGSTOP): for seconds, the other replica goes on without it, and has it back."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from tests.train.jobs import Job, assert_consistent, finish
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(480),
]

STEPS = 500


def pid_of(job: Job, rank: str) -> int:
    """From its flight record."""
    (flight,) = job.folder.glob(f"flight/{rank}.inc0.story.jsonl")
    return int(re.findall(r'"pid":([0-9]+)', flight.read_text())[0])


def contributors(job: Job) -> list[int]:
    """How many replicas contributed to each step on disk."""
    return [len(record.contributors) for record in job.log().chain()] if job.entries() else []


@pytest.mark.grid
@pytest.mark.parametrize("rank", ["r1.pp0", "r1.pp1"])
def test_the_others_go_on_and_it_comes_back(make_job: Any, rank: str) -> None:
    job = make_job(f"steps={STEPS}", "step_timeout_s=30", "transport.kind=tcp", "checkpoint.every=250")
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
