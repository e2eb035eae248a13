"""The main job on two rails, one of which is cut in the middle of a step: it loses nothing, saves at once, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.checkpoint import newest_complete, step_folders
from helixrt.lab.net import Network

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]

STEPS, CUT_IN, MENDED_IN = 6, 2, 4
SETTINGS = (
    "+experiment=nano", f"steps={STEPS}", "model.layers=2", "mesh.pp=2", "schedule.name=1f1b", "schedule.microbatches=2",
    "transport.kind=tcp", "transport.heartbeat_s=2", "checkpoint.every=100",
)  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[Network]:
    """One host with two rails. Its ranks reach each other at its own addresses, so a rail is cut by taking its address away."""
    with Network(hosts=1, rails=2) as made:
        yield made


class Job:
    """One run of the job on the host, to its end."""

    def __init__(self, host: Network, folder: Path, *overrides: str) -> None:
        folder.mkdir()
        (folder / "text").write_text("".join(f"{n} times {n} is {n * n}, and so on. " for n in range(3000)))
        rails = f"transport.rails=[{host.address(0, 0)},{host.address(0, 1)}]"
        places = (f"data.path={folder / 'text'}", f"output.root={folder / 'out'}")
        argv = [sys.executable, "-m", "helixrt.train", *SETTINGS, rails, *places, *overrides]
        gloo = {"GLOO_SOCKET_IFNAME": "lo"}  # is not cut; the links between stages are
        driver = host.run(0, argv, gloo, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said = driver.communicate(timeout=180)[0]
        assert driver.returncode == 0, self.said
        self.run = (folder / "out" / "latest").resolve()
        self.report: dict[str, Any] = json.loads((self.run / "report.json").read_text())

    def losses(self) -> dict[tuple[int, int], float]:
        """Exactly as they were computed, by step and replica."""
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {(line["step"], line["replica"]): line["loss_nats"] for line in lines if line["kind"] == "step"}


@pytest.fixture(scope="module")
def cut(host: Network, tmp_path_factory: pytest.TempPathFactory) -> Job:
    address = f"{host.address(0, 0)}/24 dev {host.device(0)}"
    commands = (
        f"{{command: 'ip address del {address}', step: {CUT_IN}, moment: exchange_early}}",
        f"{{command: 'ip address add {address}', step: {MENDED_IN}}}",
        f"{{command: 'sleep 35', step: {STEPS}}}",  # the rail rests between two tries, 30 s at the longest
    )
    return Job(host, tmp_path_factory.mktemp("runs") / "cut", f"chaos.run=[{', '.join(commands)}]")


def test_the_report_tells_of_the_rail_and_of_the_checkpoint_it_caused(cut: Job) -> None:
    report = cut.report
    assert report["failures"] == [], "no replica was lost"
    assert len(cut.losses()) == 2 * STEPS, "both contributed to every step"
    assert len({(r["parameters_digest"], r["state_digest"]) for r in report["replicas"]}) == 1
    assert {way["transport"] for way in report["transports"]} == {"tcp"}

    left = report["rails_left"]
    names = {(f"r{n}.pp{stage}", f"r{1 - n}.pp{stage}") for n in (0, 1) for stage in (0, 1)}
    assert {(each["rank"], each["towards"]) for each in left} == names, cut.said
    for each in left:
        assert (each["rail"], each["usable"]) == (0, 1) and each["step"] >= CUT_IN and each["reason"]
        assert 0 < each["at_s"] < report["seconds"] and each["back_after_s"] is not None, cut.said
        assert each["checkpoint_after_s"] < 30.0, "no link waits for its kernel to give up, which takes it 60 s"
        assert f"{each['rank']} left rail 0 towards {each['towards']}" in cut.said

    saved = report["checkpoints"]
    at_once = [checkpoint["step"] for checkpoint in saved if checkpoint["after_failover"]]
    assert at_once and min(at_once) >= CUT_IN
    assert [checkpoint["step"] for checkpoint in saved if not checkpoint["after_failover"]] == [STEPS], "and the last one"
    assert {each["checkpoint_step"] for each in left} <= {checkpoint["step"] for checkpoint in saved}
    found = newest_complete(cut.run / "checkpoints")
    assert found is not None and found.mesh["pp"] == found.ranks == 2, "both stages wrote their part of the same step"
    assert len(step_folders(cut.run / "checkpoints")) == len(saved), "and of no other"


@pytest.mark.slow
def test_no_bit_differs_from_a_run_in_which_nothing_was_cut(host: Network, cut: Job, tmp_path: Path) -> None:
    calm = Job(host, tmp_path / "calm", "checkpoint.after_failover=false")
    assert calm.report["rails_left"] == [] and [each["step"] for each in calm.report["checkpoints"]] == [STEPS]
    assert calm.losses() == cut.losses()
    ends = [[(r["parameters_digest"], r["state_digest"]) for r in job.report["replicas"]] for job in (calm, cut)]
    assert ends[0] == ends[1]
