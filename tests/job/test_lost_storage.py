"""Runs whose storage or server fails: a full disk, a server that is killed. Each says so, and nothing that counts is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint import newest_complete
from helixrt.job.lineage_files import read_log
from helixrt.protocol.step.lineage import audit
from tests import programs
from tests.examples.test_existing_loop import environment, variables
from tests.job.lineage_oracle import chain
from tests.job.test_hosts import DEADLINE_S
from tests.job.test_run_lock import past_run

SCRIPT = [sys.executable, "-u", "-m", "tests.job.hosts_script"]
DISK_BYTES, STEPS = 6 << 20, 60


class Program:
    """A process whose output is in a file."""

    def __init__(self, argv: list[str], folder: Path, **env: str) -> None:
        self._said = folder / "said"
        with open(self._said, "w") as said:
            self.process = programs.Popen(argv, stdout=said, stderr=subprocess.STDOUT, env=environment(**env), text=True)

    def said(self) -> str:
        return self._said.read_text()

    def until(self, what: Callable[[], bool], why: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline and self.process.poll() is None, f"{why}:\n{self.said()[-3000:]}"
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    at = tmp_path / "disk"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(at)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs a file system of its own, for which root may mount: {mounted.stderr.strip()}")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


def fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.slow  # two processes that import torch, and a minute of steps
@pytest.mark.timeout(400)
def test_a_full_disk_is_said_and_costs_nothing_once_there_is_room(disk: Path, tmp_path: Path) -> None:
    """Training goes on meanwhile; what could not be written is written later: lineage and checkpoints are whole."""
    program = Program([*SCRIPT, str(tmp_path), "1", str(STEPS), str(disk / "runs")], tmp_path, TMPDIR=str(tmp_path))
    try:
        program.until(lambda: list(disk.glob("runs/*/*/checkpoints/*/complete.json")) != [], "no checkpoint is written")
        fill(disk / "ballast")
        full = len(program.said())
        program.until(lambda: "could not be written" in program.said()[full:], "it does not say that the disk is full")
        told = program.said()[full:]
        assert "No space left on device" in told, told
        steps = told.count("loss")
        program.until(lambda: program.said()[full:].count("loss") >= steps + 8, "training does not go on")
        (disk / "ballast").unlink()
        program.until(lambda: "was written, after" in program.said()[full:], "nothing is written again")
        (tmp_path / "enough").touch()
        assert program.process.wait(DEADLINE_S) == 0, program.said()
    finally:
        program.end()
    (folder,) = disk.glob("runs/[0-9]*/[0-9]*")
    records = chain(folder)
    assert [record.step for record in records] == list(range(STEPS + 1)), "every record is on disk"
    assert audit(records).clean
    newest = newest_complete(folder / "checkpoints")
    assert newest is not None and newest.record.step == STEPS


@pytest.mark.slow  # two processes that import torch
@pytest.mark.timeout(400)
def test_a_server_that_is_killed_is_said_and_everything_committed_is_on_disk(tmp_path: Path) -> None:
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "1", "--storage", str(tmp_path / "runs")]
    serve += ["--step-timeout-s", "6", "--checkpoint-every", "5"]
    server = programs.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    program = None
    try:
        told = variables(server)
        folder = Path(told["HELIXRT_SECRET_FILE"]).parent
        program = Program([*SCRIPT, str(tmp_path), "1", "100000"], tmp_path, **{**told, "HELIXRT_REPLICA": "0"})
        program.until(lambda: list(folder.glob("checkpoints/*/complete.json")) != [], "no checkpoint is written")
        server.send_signal(signal.SIGKILL)
        server.wait(30)
        assert program.process.wait(DEADLINE_S) != 0
        said = program.said()
    finally:
        for process in (server, *([program.process] if program is not None else [])):
            process.kill()
            process.wait(30)
    address = told["HELIXRT_STORE"]
    assert f"the run's store at {address} cannot be reached" in said, said
    log = read_log(folder / "lineage")
    newest = newest_complete(folder / "checkpoints")
    assert newest is not None and log.on_chain(newest.record.hash) and audit(log.chain()).clean
    assert newest.record.step >= log.head.step - 5 - 1, "at most what came since the last checkpoint is computed again"


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_as_if_it_had_never_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = past_run(tmp_path)
    read, looked = checkpoints.read_manifest, list[Path]()

    def deleted_meanwhile(folder: Path) -> checkpoints.Checkpoint:
        looked.append(folder)
        os.unlink(folder / checkpoints.MANIFEST)
        return read(folder)

    monkeypatch.setattr(checkpoints, "read_manifest", deleted_meanwhile)
    assert newest_complete(tmp_path / "checkpoints") is None, "deleted, and not damaged"
    assert looked == [checkpoint.folder]
