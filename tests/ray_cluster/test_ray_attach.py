"""A Ray job whose driver is killed: its ranks train on, and the same script, submitted again, attaches to them. A
run whose keeper is killed goes on from its checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.keeper_start import kept_run
from helixrt.job.lineage_files import read_lineage
from helixrt.protocol.step.lineage import CommitRecord, Log, audit

pytest.importorskip("ray", reason="the extra ray is not installed")

pytestmark = [pytest.mark.ray, pytest.mark.timeout(480)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 220.0  # half a minute on a machine with nothing else to do


class Job:
    """`python train.py STORAGE SIGNS ...` in a working directory of its own."""

    def __init__(self, ray_head: Any, folder: Path, *arguments: str, **environment: str) -> None:
        from ray.job_submission import JobSubmissionClient

        self.folder = folder
        program = folder / "program"
        program.mkdir(exist_ok=True)
        (folder / "signs").mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("nodes_script.py"), program / "train.py")
        self.client = JobSubmissionClient(ray_head.dashboard)
        words = [sys.executable, "train.py", str(folder / "storage"), str(folder / "signs"), *arguments]
        environment |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        env = {"working_dir": str(program), "env_vars": environment}
        self.id = self.client.submit_job(entrypoint=" ".join(words), runtime_env=env)

    def said(self) -> str:
        return str(self.client.get_job_logs(self.id))

    def ended(self) -> bool:
        return bool(self.client.get_job_status(self.id).is_terminal())

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen: {self.said()}"
            time.sleep(0.1)

    def processes(self, of: str) -> list[int]:
        return sorted(int(file.name.rpartition(".")[2]) for file in (self.folder / "signs").glob(f"{of}.process.*"))

    def records(self) -> list[CommitRecord]:
        entries = read_lineage(self.folder / "storage" / "latest" / "lineage")
        return Log(entries).chain() if entries else []

    def step(self) -> int:
        return max((record.step for record in self.records()), default=0)


def test_the_driver_of_a_job_is_killed_and_the_next_job_attaches_to_its_ranks(ray_head: Any, tmp_path: Path) -> None:
    first = Job(ray_head, tmp_path)
    first.until(lambda: first.step() >= 5, "a few steps")
    (driver,) = first.processes("driver")
    os.kill(driver, signal.SIGKILL)
    first.until(first.ended, "the end of the job")
    alone = first.step()
    first.until(lambda: first.step() >= alone + 10, "ten steps without a driver")

    second = Job(ray_head, tmp_path, "latest")
    second.until(lambda: "attached to run" in second.said() or second.ended(), "the second driver")
    assert "no step is lost; longest time without progress" in second.said()
    (tmp_path / "signs" / "stop").touch()
    second.until(second.ended, "the end of the run")
    assert second.client.get_job_info(second.id).driver_exit_code == 0, second.said()
    records = second.records()
    found = audit(records)
    assert found.clean and found.batches == sum(len(record.summed) for record in records)
    assert {contributor for record in records for contributor in record.contributors} == {(0, 0), (1, 0), (2, 0)}
    assert all(len(second.processes(f"r{replica}")) == 1 for replica in range(3)), "no rank was started again"
    assert f"ended at step {records[-1].step} of {records[-1].hash}" in second.said()

    second.until(all_given_back, "the return of what the run had reserved")


@pytest.mark.parametrize("how", ["the stop of the job", "SIGTERM", "SIGTERM twice", "the stop of the job, without a keeper"])
def test_what_ends_the_driver_of_a_job_ends_the_run_with_its_state_saved(how: str, ray_head: Any, tmp_path: Path) -> None:
    """Its actors get no signal. Ray tells no exit code of a job that it has stopped."""
    away = {"AWAY_S": "0"} if "without" in how else {}
    job = Job(ray_head, tmp_path, CHECKPOINT_EVERY="100000", RAY_JOB_STOP_WAIT_TIME_S="120", **away)
    job.until(lambda: job.step() >= 5, "a few steps")
    (driver,) = job.processes("driver")
    if how.startswith("the stop"):
        job.client.stop_job(job.id)
    else:
        os.kill(driver, signal.SIGTERM)
    if how.endswith("twice"):
        job.until(lambda: "SIGTERM to the driver" in job.said(), "the departure")
        with suppress(ProcessLookupError):
            os.kill(driver, signal.SIGTERM)
    job.until(job.ended, "the end of the job")
    assert job.client.get_job_info(job.id).driver_exit_code == (None if how.startswith("the stop") else 143), job.said()
    assert "the run was ended by SIGTERM after step " in job.said()
    if not how.endswith("twice"):
        assert f"after step {job.step()}; its newest checkpoint is of step {job.step()}\n" in job.said()
        assert (tmp_path / "storage" / "latest" / "report.json").exists()
    job.until(all_given_back, "the return of what the run had reserved")
    assert kept_run(tmp_path / "storage" / "latest") is None, "the keeper has ended"


def all_given_back() -> bool:
    import ray

    return all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_when_its_keeper_is_killed(ray_head: Any, tmp_path: Path) -> None:
    job = Job(ray_head, tmp_path, CHECKPOINT_EVERY="10")
    folder = tmp_path / "storage" / "latest"
    job.until(lambda: job.step() >= 15, "a checkpoint")
    before = kept_run(folder)
    assert before is not None
    os.kill(int(before.where.split()[1]), signal.SIGKILL)
    job.until(lambda: job.ended() or "was lost; now it is" in job.said(), "another keeper")
    job.until(lambda: any(life == 1 for r in job.records() for _, life in r.contributors), "the replicas' return")
    job.until(lambda: job.step() >= 20, "another checkpoint")
    (tmp_path / "signs" / "stop").touch()
    job.until(job.ended, "the end of the run")
    assert job.client.get_job_info(job.id).driver_exit_code == 0, job.said()
    records = job.records()
    assert audit(records).clean
    returned = [record.step for record in records if {i for _, i in record.contributors} == {1}]
    assert returned and returned[0] > 10, "from the checkpoint, not from the beginning"
    job.until(all_given_back, "the return of what the run had reserved")
