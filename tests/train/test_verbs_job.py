"""The main job over RDMA in the lab's VM: its default NIC goes down in the middle of a step, and no loss differs by a bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helixrt.train.checkpoint import newest_complete

CUT_IN, STEPS = 2, 5  # as in lab_runs.py
DEADLINE_S = 1500.0  # about four minutes where the emulation has two cores to itself


def losses(run: Path) -> dict[tuple[int, int], float]:
    """Exactly as they were computed, by step and replica."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], line["replica"]): line["loss_nats"] for line in lines if line["kind"] == "step"}


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_nic_that_goes_down_changes_no_bit_and_is_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{n} times {n} is {n * n}, and so on. " for n in range(3000)))
    program = Path(__file__).with_name("lab_runs.py")
    argv = [sys.executable, "-m", "helixrt.cli", "lab", "run", "--fresh", "--nics", "2", "--memory", "4"]
    argv += ["--share", str(tmp_path), "--", "python", str(program), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)
    said = done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0, said

    calm, cut = ((tmp_path / name / "latest").resolve() for name in ("calm", "cut"))
    reports: list[dict[str, Any]] = [json.loads((run / "report.json").read_text()) for run in (calm, cut)]
    assert len(losses(calm)) == 2 * STEPS and losses(cut) == losses(calm)
    ends = [{(r["parameters_sha256"], r["state_sha256"]) for r in report["replicas"]} for report in reports]
    assert ends[0] == ends[1] and len(ends[0]) == 1
    for report in reports:
        assert report["failures"] == [], "no replica was lost"
        ways = {(way["rank"], way["transport"]) for way in report["transports"]}
        assert ways == {("r0.pp0", "verbs"), ("r1.pp0", "verbs")}
        assert all("2 RDMA rails, the first from 10.88.1." in way["why"] for way in report["transports"])

    undisturbed, disturbed = reports
    assert undisturbed["rails_left"] == [] and undisturbed["checkpoints"] == []
    left = disturbed["rails_left"]
    assert {(each["rank"], each["towards"]) for each in left} == {("r0.pp0", "r1.pp0"), ("r1.pp0", "r0.pp0")}, said
    for each in left:
        # Rail 1 is the other NIC, rail 2 TCP. Whichever end sees it first says why: its own port, or the peer's silence.
        assert (each["rail"], each["usable"], each["step"]) == (0, 2, CUT_IN), said
        assert each["failure"] in ("device", "path") and each["reason"]
        assert each["back_after_s"] is not None and each["at_s"] > 0, said
    assert any(each["failure"] == "device" for each in left)
    assert [saved["after_failover"] for saved in disturbed["checkpoints"]] == [True]
    found = newest_complete(cut / "checkpoints")
    assert found is not None and found.record.step == disturbed["checkpoints"][0]["step"] >= CUT_IN
    print(*(f"{each}" for each in left), *(said.splitlines()[-8:]), sep="\n")
