"""The only holder of the newest steps is stopped (SIGSTOP) and has not ended: the other replica waits for it until the user
accepts the loss with `helixrt accept-loss`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from helixrt.protocol.step.lineage import audit
from tests.train.jobs import DEADLINE_S, Ended, Job, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(480),
]

STEPS, LOST = 400, 5  # LOST: steps that only the stopped replica holds, at least
COMMAND = (sys.executable, "-c", "import sys; from helixrt.cli import main; sys.exit(main())", "accept-loss")


class Running:
    """A job's driver, its console read line by line while it runs."""

    def __init__(self, job: Job) -> None:
        self.job, self.driver, self.said = job, job.start(), [""]
        self.reader = threading.Thread(target=self._read, name="console", daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            self.said.append(line)

    def console(self) -> str:
        return "".join(self.said)

    def until(self, what: Callable[[], bool], why: str) -> None:
        until(what, why, self.job, self.driver, self.so_far)

    def so_far(self) -> Ended:
        return Ended(self.driver.poll() or 0, self.console(), "")

    def end(self) -> Ended:
        code = self.driver.wait(DEADLINE_S)
        self.reader.join(30)
        assert self.driver.stderr is not None
        return Ended(code, self.console(), self.driver.stderr.read())

    def pid_of(self, rank: str) -> int:
        (flight,) = self.job.folder.glob(f"flight/{rank}.inc0.story.jsonl")
        return int(re.findall(r'"pid":([0-9]+)', flight.read_text())[0])


def test_a_wait_for_a_stopped_holder_ends_when_the_user_accepts_the_loss(make_job: Callable[..., Job]) -> None:
    # A rank that is stopped counts as hung, and is replaced, only after step_timeout_s.
    limits = ("step_timeout_s=200", "heartbeat_s=0.6", "supersede_after_s=3000")
    run = Running(make_job(f"steps={STEPS}", "mesh.pp=1", f"checkpoint.every={STEPS}", *limits))
    job = run.job
    run.until(lambda: bool(list(job.root.glob("[0-9]*/[0-9]*"))) and job.committed_by(0, 1) > 5, "they do not begin")
    holder, other = run.pid_of("r0.pp0"), run.pid_of("r1.pp0")
    os.kill(other, signal.SIGSTOP)
    run.until(lambda: job.committed_by(0) > LOST, "replica 0 does not go on alone")
    os.kill(holder, signal.SIGSTOP)
    os.kill(other, signal.SIGCONT)

    waits = r"waits for replica 0 \(incarnation 0\), which may hold step ([0-9]+) and has not ended, until about [0-9:]+; "
    run.until(lambda: len(re.findall(waits, run.console())) >= 2, "it does not say for whom it waits, again and again")
    assert f"`helixrt accept-loss {job.folder}` goes on without" in run.console()
    head = job.entries()[-1]  # the files have it by now: they are written a little behind the store
    assert {int(step) for step in re.findall(waits, run.console())} == {head.step}
    assert job.entries()[-1] == head, "nothing is committed meanwhile"

    accepted = subprocess.run([*COMMAND, str(job.folder)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert accepted.returncode == 0, accepted.stderr
    run.until(lambda: job.committed_by(1) > LOST, "replica 1 does not go on")
    os.kill(holder, signal.SIGCONT)

    ended = run.end()
    assert ended.code == 0, job.why(ended)
    report, log = job.report(), job.log()
    lost = log.superseded()
    assert len(lost) >= LOST and lost[-1] == head and {r.replicas for r in lost} == {(0,)}
    assert [r.step for r in lost] == list(range(lost[0].step, head.step + 1)), "all that only the stopped replica held"
    found, data = audit(log.chain()), report["data_audit"]
    assert (data["gaps"], data["repeats"], data["batches"]) == (0, 0, found.batches)
    assert log.head.step == STEPS and log.head.replicas == (0, 1), "the holder is back, on the others' lineage"
    assert len({f["parameters_digest"] for f in report["replicas"]}) == 1
    assert data["superseded"] == len(lost)
    assert f"the loss of step {head.step}, " in ended.out and f"{len(lost)} committed records were superseded" in ended.out
    assert f"<th>records superseded</th><td>{len(lost)}</td>" in (job.folder / "report.html").read_text()
