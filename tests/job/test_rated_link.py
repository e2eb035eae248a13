"""A pipeline over a link of rated speed between two hosts: the rate that a run measures, and the step time that follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from helixrt import cli
from helixrt.lab.net import Network
from helixrt.record import Kind, read_events
from tests.examples.test_existing_loop import ROOT, variables
from tests.job.rated_script import MESSAGE_BYTES, MICROBATCHES

RATE_MBIT, STEPS, PORT = 40.0, 12, 29400


@pytest.mark.netns
@pytest.mark.slow  # two processes that import torch on each of two hosts
@pytest.mark.timeout(300)
def test_a_run_measures_the_rate_of_its_link_and_the_step_takes_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Network(hosts=2, rate_mbit=RATE_MBIT) as network:
        folder = run(network, tmp_path)
    assert cli.main(["observe", str(folder), "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    links = {(each["from"], each["to"]): each for each in found["links"]}
    for way in ((0, 1), (1, 0)):
        assert links[way]["bytes"] == MESSAGE_BYTES
        assert links[way]["rate_mbit"] == pytest.approx(RATE_MBIT, rel=0.1), links[way]

    arguments = ["schedule", "--profile", str(folder / "profile.json"), "--policy", "gpipe", "--format", "json"]
    assert cli.main(arguments) == 0
    simulated_ms = json.loads(capsys.readouterr().out)["makespan_ms"]
    assert simulated_ms > 2 * MICROBATCHES * MESSAGE_BYTES * 8e-3 / RATE_MBIT, "the link bounds it, in both directions"
    assert simulated_ms == pytest.approx(step_ms(folder), rel=0.15)


def run(network: Network, storage: Path) -> Path:
    """The folder of a run with one stage on each host."""
    serve = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "1", "--pp", "2"]
    serve += ["--host", network.address(0), "--storage", str(storage)]
    server = start(network, 0, serve, {}, stdout=subprocess.PIPE)
    told = variables(server)
    ranks = []
    for host in range(2):
        place = {"RANK": str(host), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "HELIXRT_REPLICA": "0"}
        place |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": str(PORT)}
        with open(storage / f"rank{host}.log", "w") as log:
            script = [sys.executable, "-m", "tests.job.rated_script", str(STEPS)]
            ranks.append(start(network, host, script, told | place, stdout=log))
    said, _ = server.communicate(timeout=240)
    codes = [rank.wait(60) for rank in ranks]
    logs = "".join((storage / f"rank{host}.log").read_text() for host in range(2))
    assert (server.returncode, codes) == (0, [0, 0]), said + logs
    return Path(told["HELIXRT_SECRET_FILE"]).parent


def start(network: Network, host: int, argv: list[str], env: dict[str, str], **popen: Any) -> subprocess.Popen[str]:
    argv = ["env", "-u", "GLOO_SOCKET_IFNAME", *argv]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return network.run(host, argv, env, text=True, stderr=subprocess.STDOUT, **popen)


def step_ms(folder: Path) -> float:
    """From the first operation of a step to its last, over both stages; median, without the first step."""
    spans: dict[int, list[float]] = {}
    for stage in range(2):
        for event in read_events(folder / "flight" / f"r0.pp{stage}.inc0.detail.jsonl"):
            if event.kind is Kind.OPERATION:
                spans.setdefault(event.step, []).extend((event.begin_s, event.end_s))
    return 1e3 * median(max(times) - min(times) for step, times in spans.items() if step > 1)
