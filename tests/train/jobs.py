"""Whole runs of the main job in local processes, for tests: a job's command line, its processes, and what it leaves.

A run is found among the machine's processes by a mark in its environment, which its ranks inherit.
"""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.checkpoint import Checkpoint, newest_complete
from helixrt.job.lineage_files import read_lineage
from helixrt.protocol.step.lineage import CommitRecord, Log, audit
from tests import programs

MARK = "HELIXRT_TEST_RUN"
DEADLINE_S = 240.0
EVERY = 10  # steps between checkpoints
STEPS = 80
JOB, PATIENT_JOB = ("-m", "helixrt.train"), (str(Path(__file__).with_name("patient_job.py")),)
HASTY_JOB = (str(Path(__file__).with_name("hasty_job.py")),)
SIZE = (
    "model.layers=2", "model.dim=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64",
    "data.batch=16", "data.seq_len=64", "schedule.microbatches=2", "optim.bucket_bytes=16384",
    f"checkpoint.every={EVERY}", "eval.every=0", "eval.batches=1",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a driver's process ended, and what it said."""

    code: int
    out: str
    err: str


class Job:
    """The command line of one job, to be started once or again with `resume=true`, and what it leaves in its folders.

    A `patient` one waits for its lost replicas (see patient_job.py), so they are back long before the last step.
    """

    def __init__(self, folder: Path, *overrides: str, patient: bool = False) -> None:
        self.program = PATIENT_JOB if patient else JOB
        text, self.root = folder / "text", folder / "out"
        text.mkdir()
        words = "the a replica of step ring in quorum and commit to data by gradient".split()
        speaker = random.Random(0)
        for name in "abcdef":
            (text / name).write_text(" ".join(speaker.choice(words) for _ in range(4000)))
        self.overrides = (f"data.path={text}", f"output.root={self.root}", f"steps={STEPS}", *SIZE, *overrides)
        self.mark = secrets.token_hex(8)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return programs.Popen(
            [sys.executable, *self.program, *self.overrides, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1", "HELIXRT_NATIVE_STACKS": "1"},
        )

    def run(self, *overrides: str, deadline_s: float = DEADLINE_S) -> Ended:
        """Start it, and wait until it has ended. What it leaves fails the test (tests/leaks.py)."""
        return finish(self.start(*overrides), deadline_s)

    def processes(self) -> list[int]:
        """The living processes of this job."""
        mark, found = f"{MARK}={self.mark}".encode(), []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    found.append(int(environ.parent.name))
            except OSError:
                continue  # another's, or gone
        return found

    def end(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    @property
    def folder(self) -> Path:
        """The run's folder: resuming goes on in the same one."""
        (found,) = self.root.glob("[0-9]*/[0-9]*")
        return found

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return found

    def log(self) -> Log:
        """The run's log as the replicas wrote it to disk."""
        return Log(read_lineage(self.folder / "lineage"))

    def entries(self) -> list[CommitRecord]:
        """The run's log while it runs; empty before the first record."""
        try:
            return list(self.log().entries)
        except (ValueError, IndexError, OSError):
            return []

    def committed_by(self, *replicas: int) -> int:
        """How many of the newest records in a row have exactly these contributors."""
        entries = self.entries()
        others = (count for count, record in enumerate(reversed(entries)) if record.replicas != replicas)
        return next(others, len(entries))

    def newest_checkpoint(self) -> Checkpoint:
        found = newest_complete(self.folder / "checkpoints")
        assert found is not None
        return found

    def why(self, ended: Ended) -> str:
        """For the message of a failed test: what everybody said last."""
        logs = sorted(self.root.glob("*/*/logs/*.log"))
        said = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs]
        return "\n".join([f"exit {ended.code}", ended.out[-3000:], ended.err[-3000:], *said])


def finish(driver: subprocess.Popen[str], deadline_s: float = DEADLINE_S) -> Ended:
    try:
        out, err = driver.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        driver.kill()
        out, err = driver.communicate(timeout=30)
        pytest.fail(f"the run did not end in {deadline_s:g} s\n{out[-3000:]}\n{err[-3000:]}")
    return Ended(driver.returncode, out, err)


def until(what: Callable[[], bool], why: str, job: Job, driver: subprocess.Popen[str], so_far: Callable[[], Ended]) -> None:
    """Wait for `what` while the driver runs; `why` and all that was said are the message if it does not come."""
    limit = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < limit and driver.poll() is None, f"{why}\n{job.why(so_far())}"
        time.sleep(0.05)


def losses(root: Path, until: int | None = None, replica: int = 0) -> dict[int, float]:
    """This replica's loss of every step below `until`, exactly as it was computed, of the only run under `root`."""
    (metrics,) = root.glob("[0-9]*/[0-9]*/metrics.jsonl")
    entries = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    found = {e["step"]: e["loss_nats"] for e in entries if e.get("participants") and e["replica"] == replica}
    return {step: loss for step, loss in found.items() if until is None or step < until}


def kills(*chosen: tuple[int, int, str]) -> str:
    """The override for these kills: (replica, step, moment)."""
    return "chaos.kill=[" + ", ".join(f"{{replica: {r}, step: {s}, moment: {m}}}" for r, s, m in chosen) + "]"


def waits_for_checkpoint(job: Job, step: int, saved: int = EVERY) -> str:
    """The override for a run that waits in this step, uncommitted, until the checkpoint of step `saved` is complete."""
    wait = job.root.parent / "wait_for_checkpoint.sh"
    complete = f"ls {job.root}/latest/checkpoints/step_{saved:08d}*/complete.json"
    wait.write_text(f"for i in $(seq 500); do {complete} && exit; sleep 0.1; done\n")
    return f"chaos.run=[{{command: 'sh {wait}', replica: 0, step: {step}, moment: forward}}]"


def kills_driver(job: Job, step: int) -> tuple[str, ...]:
    """The overrides for a driver that is killed when it sees this step, however slow it is, or the disk: the run waits
    before the step for its first checkpoint, and soon after it for the kill."""
    hold = f"chaos.fault=[{{kind: slow, replica: 0, rank: 0, step: {step + 5}, moment: forward, seconds: 40}}]"
    return kills((-1, step, "driver")), waits_for_checkpoint(job, step - 1), hold


def assert_consistent(job: Job, ended: Ended, lost: Sequence[int] = (), steps: int = STEPS, replicas: int = 2) -> Any:
    """The run ended well: equal replicas, every batch once, exactly these replicas lost. Gives the report."""
    assert ended.code == 0, job.why(ended)
    report = job.report()
    finals = report["replicas"]
    assert [f["replica"] for f in finals] == list(range(replicas))
    assert len({(f["step"], f["lineage"], f["parameters_digest"], f["state_digest"]) for f in finals}) == 1, finals
    assert finals[0]["step"] == report["steps"] == steps

    log = job.log()
    assert log.head.hash == finals[0]["lineage"], "what is on disk is the lineage of the final parameters"
    found = audit(log.chain())
    data = report["data_audit"]
    assert (data["gaps"], data["repeats"]) == (found.gaps, found.repeats) == (0, 0)
    assert data["batches"] == found.batches == sum(len(r.contributors) for r in log.chain())
    assert log.head.positions == {r: sum(r in c.replicas for c in log.chain()) for r in range(replicas)}

    assert sorted(f["replica"] for f in report["failures"]) == sorted(lost), report["failures"]
    print(*(f"{job.overrides[-1]}: {f}" for f in report["failures"]), sep="\n")
    return report
