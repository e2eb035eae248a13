"""The main job over RDMA in the lab's VM: its default NIC goes down in the middle of a step, and no loss differs by a bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.checkpoint import newest_complete
from helixrt.lab import vm

DEADLINE_S = 470.0  # of the imports, or of one run
pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 20)]

LAB = (sys.executable, "-m", "helixrt.cli", "lab")
IN_TURN = Path(__file__).with_name("jobs_in_turn.py").resolve()
CUT_IN, MENDED_IN, STEPS = 2, 3, 5
COMMANDS = (
    f"{{command: 'ip link set a1 down', step: {CUT_IN}, moment: exchange_early}}",  # one bucket is exchanged, others are not
    f"{{command: 'python -m helixrt.lab.nics heal 1', step: {MENDED_IN}, moment: exchange_late}}",
    f"{{command: 'sleep 10', step: {STEPS}}}",  # time to come back
)
SETTINGS = (
    "+experiment=nano", f"steps={STEPS}", "transport.kind=verbs", "transport.rails=[rxe_a1|rxe_b1,rxe_a2|rxe_b2]",
    "checkpoint.every=100",
)  # fmt: skip


class Runs:
    """Of the job, in one VM: one process makes both in turn, from when the first is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.vm = folder, f"job-{os.getpid()}"
        (folder / "text").write_text("".join(f"{n} times {n} is {n * n}, and so on. " for n in range(3000)))
        for name in ("calm", "cut"):
            (folder / name).mkdir()
        self._output = folder / "output"

    @property
    def calm(self) -> Path:
        return self._ended("calm")

    @property
    def cut(self) -> Path:
        return self._ended("cut")

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]

    @cached_property
    def _process(self) -> subprocess.Popen[bytes]:
        settings = (*SETTINGS, f"data.path={self.folder / 'text'}")
        calm = ["calm", *settings, f"output.root={self.folder / 'calm'}"]
        cut = ["cut", *settings, f"output.root={self.folder / 'cut'}", f"chaos.run=[{', '.join(COMMANDS)}]"]
        shared = [word for name in ("calm", "cut") for word in ("--share", str(self.folder / name))]
        argv = [*LAB, "run", "--name", self.vm, "--nics", "2", "--memory", "4", *shared, "--", "python", str(IN_TURN)]
        argv += [*calm, "--", *cut]
        with open(self._output, "wb") as output:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def until(self, said: str) -> None:
        """The process has said this."""
        process, deadline = self._process, time.monotonic() + DEADLINE_S
        while said not in self._output.read_text(errors="replace"):
            assert process.poll() is None or said in self.said, f"the process has ended before {said!r}\n{self.said}"
            assert time.monotonic() < deadline, f"{said!r} takes longer than {DEADLINE_S:g} s\n{self.said}"
            time.sleep(0.5)

    def _ended(self, name: str) -> Path:
        """The run's folder, when it is over."""
        ended = f"run {name} ended with exit code "
        self.until(ended)
        assert f"{ended}0\n" in self._output.read_text(errors="replace"), self.said
        return (self.folder / name / "latest").resolve()

    def close(self) -> None:
        if "_process" in self.__dict__:
            subprocess.run([*LAB, "stop", "--name", self.vm], timeout=DEADLINE_S, capture_output=True)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(vm.folder_of(self.vm), ignore_errors=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.close()


def losses(run: Path) -> dict[tuple[int, int], float]:
    """Exactly as they were computed, by step and replica."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line["replica"]): line["loss_nats"] for line in lines if line["kind"] == "step"}


def report_of(run: Path) -> dict[str, Any]:
    """The report of a run in which nobody was lost and gradients went over two NICs each."""
    report: dict[str, Any] = json.loads((run / "report.json").read_text())
    assert report["failures"] == [] and len({r["state_digest"] for r in report["replicas"]}) == 1
    assert len(losses(run)) == 2 * STEPS, "both replicas contributed to every step"
    ways = report["transports"]
    assert {(way["rank"], way["transport"]) for way in ways} == {("r0.pp0", "verbs"), ("r1.pp0", "verbs")}
    assert all("2 RDMA rails, the first from 10.88.1." in way["why"] for way in ways)
    return report


def test_ranks_start_in_the_machine(runs: Runs) -> None:
    """Its driver and its ranks import torch, which takes minutes there: a test of its own, since each has one limit."""
    runs.until("r0-r1  step 1/")


def test_gradients_go_over_the_named_nics(runs: Runs) -> None:
    report_of(runs.calm)


def test_a_nic_that_goes_down_in_a_step_changes_no_bit_and_is_in_the_report(runs: Runs) -> None:
    calm, cut = report_of(runs.calm), report_of(runs.cut)
    assert losses(runs.cut) == losses(runs.calm)
    assert cut["replicas"][0]["parameters_digest"] == calm["replicas"][0]["parameters_digest"]
    # Rail 0 is the NIC, rail 1 its backup, rail 2 TCP. Whichever end is first says why: its own port, or the peer's word.
    left = [each for each in cut["rails_left"] if (each["rail"], each["step"]) == (0, CUT_IN)]
    assert {(each["rank"], each["towards"]) for each in left} == {("r0.pp0", "r1.pp0"), ("r1.pp0", "r0.pp0")}, runs.said
    own = re.compile(r"network interface \w+ is down|PORT_ERR")
    assert any(each["failure"] == "device" and own.search(each["reason"]) for each in left), runs.said
    for each in left:
        assert each["usable"] >= 1 and each["at_s"] > 0 and each["back_after_s"] is not None, runs.said
        assert each["checkpoint_step"] >= CUT_IN
    *at_once, last = cut["checkpoints"]
    assert at_once and all(saved["after_failover"] for saved in at_once) and not last["after_failover"]
    found = newest_complete(runs.cut / "checkpoints")
    assert found is not None and found.record.step == cut["checkpoints"][-1]["step"]
    print(*left, runs.said, sep="\n")
