"""One process drives a run: a second one is told which, and changes nothing in the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.driver import new_run, reopened_run
from helixrt.job.keeper import FILE as KEEPER
from helixrt.job.keeper import LOCK_FILE, KeptRun
from helixrt.job.lineage_files import LineageWriter
from helixrt.job.run_lock import FILE, RunLock
from helixrt.protocol.step.lineage import CommitRecord, genesis
from tests.job.test_resume import config_of

HOLD = """
import sys
from pathlib import Path
from helixrt.job.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "run-1", 3)
print("held", flush=True)
sys.stdin.read()
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def past_run(folder: Path) -> checkpoints.Checkpoint:
    """With a lineage that has a gap, which a resumption cuts off, and a checkpoint."""
    log = [genesis("run-1", 1)]
    for step in range(1, 5):
        log.append(CommitRecord(step, step, log[-1].hash, ((0, 0),), {0: step}, "run-1"))
    (folder / "run.json").write_text(json.dumps({"run": "run-1", "epoch_s": 0.0, "life": 2}))
    writer = LineageWriter(folder / "lineage")
    for index, entry in enumerate(log[:3]):
        writer.append(index, entry)
    writer.close()
    (folder / "lineage" / "00000004.json").write_text(log[4].to_json())
    at = folder / "checkpoints" / checkpoints.folder_name(log[2])
    at.mkdir(parents=True)
    (at / checkpoints.MANIFEST).write_text("{}")
    return checkpoints.Checkpoint(at, log[2], {"pp": 1})


def test_a_second_driver_is_told_who_has_the_run_and_changes_nothing(tmp_path: Path) -> None:
    checkpoint = past_run(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        before = files_of(tmp_path)
        with pytest.raises(ConfigError, match=rf"is written by process {holder.pid} on .* since .* \(run run-1, life 3\)"):
            reopened_run(tmp_path, checkpoint, 1)
        assert files_of(tmp_path) == before
    finally:
        holder.kill()  # a driver that is lost holds nothing
        holder.communicate()
    run = reopened_run(tmp_path, checkpoint, 1)
    assert run.life == 3 and [entry.step for entry in run.log.entries] == [0, 1, 2]
    assert not (tmp_path / "lineage" / "00000004.json").exists(), "what came behind the gap is cut off, now that it is ours"
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    with pytest.raises(ConfigError, match="one process drives a run"):
        RunLock(tmp_path, "run-1", 4)
    assert run.lock is not None
    run.lock.close()
    RunLock(tmp_path, "run-1", 4).close()


def test_a_run_that_is_resumed_is_the_latest(tmp_path: Path) -> None:
    """From its begin; a folder that was moved to another place gets no such link beside it."""
    folder = tmp_path / "runs" / "2026-03-04" / "05-06-07"
    folder.mkdir(parents=True)
    latest, checkpoint = tmp_path / "runs" / "latest", past_run(folder)
    for begun in (False, True):
        if begun:
            latest.symlink_to("2026-03-04/another")
        run = reopened_run(folder, checkpoint, 1)
        assert run.lock is not None
        run.lock.close()
        assert latest.exists() == begun
    assert latest.resolve() == folder


def test_a_checkpoint_that_is_gone_when_the_run_is_ours_is_not_begun_from(tmp_path: Path) -> None:
    checkpoint = past_run(tmp_path)
    (checkpoint.folder / checkpoints.MANIFEST).unlink()
    with pytest.raises(ConfigError, match="was deleted meanwhile; resume again"):
        reopened_run(tmp_path, checkpoint, 1)
    assert (tmp_path / "lineage" / "00000004.json").exists()


def test_a_run_whose_keeper_lives_is_not_begun_again(tmp_path: Path) -> None:
    """Though its driver is gone, and nothing answers at the address in keeper.json."""
    checkpoint = past_run(tmp_path)
    kept = KeptRun("h:1", "h:2", "", "process 7 on h", "run-1", 2, {"launcher": "local"}, "m", {}, 600.0, 10.0, "", 0)
    (tmp_path / KEEPER).write_text(json.dumps(asdict(kept)))
    keeper = RunLock(tmp_path, "run-1", 2, LOCK_FILE)
    before = files_of(tmp_path)
    with pytest.raises(ConfigError, match=r"its keeper \(process 7 on h\) has not ended"):
        reopened_run(tmp_path, checkpoint, 1)
    assert {name: text for name, text in files_of(tmp_path).items() if name != FILE} == before
    keeper.close()
    run = reopened_run(tmp_path, checkpoint, 1)
    assert run.life == 3 and run.lock is not None
    run.lock.close()


def test_a_new_run_holds_its_folder(tmp_path: Path) -> None:
    run = new_run(config_of(tmp_path))
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        RunLock(run.folder, run.name, 1)
    assert run.lock is not None
    run.lock.close()
