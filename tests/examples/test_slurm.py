"""Replicas under Slurm itself, whose daemons run on this machine: by the script in examples/, by srun alone, put back into the
queue, cancelled, and over several hosts as the guide says it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from helixrt.lab.namespaces import processes
from helixrt.lab.net import Network
from tests.docs.blocks import blocks_of
from tests.examples import test_torchrun_ranks as torchrun
from tests.examples.runs import KILLED, check_lineage
from tests.examples.slurm_cluster import PATH, ROOT, Cluster, lacking
from tests.examples.test_existing_loop import STEPS as LOOP_STEPS
from tests.examples.test_existing_loop import check_loop
from tests.job.hosts_script import EVERY
from tests.job.lineage_oracle import chain, reported

# The daemons, and in each test the server and three to six processes that import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SCRIPT = ROOT / "examples" / "slurm_replicas.sh"
REPLICAS, STEPS, LIMIT_S, STEP_TIMEOUT_S = 2, 400, 400.0, 240  # steps are slow until a test has seen enough of them
OFTEN = f"--checkpoint-every {EVERY}"  # as the program has it
DONE = ("COMPLETED", "0:0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := lacking():
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as made:
        yield made


@contextmanager
def serving(cluster: Cluster, folder: Path, *options: str | int) -> Iterator[subprocess.Popen[str]]:
    """`helixrt serve`; what it prints is in FOLDER/variables."""
    serve = ["helixrt", "serve", "--replicas", REPLICAS, "--storage", folder, "--step-timeout-s", STEP_TIMEOUT_S]
    serve += [*OFTEN.split(), *options]
    server = cluster.start(serve, folder / "variables")
    try:
        cluster.until(lambda: "HELIXRT_REPLICA" in said(folder) or server.poll() is not None, "no server", LIMIT_S)
        yield server
    finally:
        server.terminate()
        server.wait(60)


def said(folder: Path) -> str:
    """By the server."""
    return (folder / "variables").read_text()


def told(folder: Path) -> dict[str, str]:
    """The variables that the server says each replica needs."""
    return dict(re.findall(r"export (HELIXRT_STORE|HELIXRT_SECRET_FILE)=(\S+)", said(folder)))


def contributors(folder: Path) -> list[set[tuple[int, int]]]:
    """(replica, incarnation) of each step so far."""
    latest = folder / "latest"
    begun = next((latest / "lineage").glob("*.json"), None) is not None
    return [set(record.contributors) for record in chain(latest.resolve())[1:]] if begun else []


def check(folder: Path, steps: int, replicas: int = REPLICAS, advance: int = 1) -> None:
    """No step lost, every batch once, all replicas alike."""
    latest = (folder / "latest").resolve()
    check_lineage(latest, steps, advance)
    assert len(reported(latest)) == replicas and len(set(reported(latest))) == 1


# ---------------------------------------------------------------- the script in examples/


def test_the_script_trains_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    with serving(cluster, tmp_path, "--dp-shard", 2) as server:
        job = cluster.submit(SCRIPT, 10, VARIABLES=str(tmp_path / "variables"))
        code = server.wait(LIMIT_S)
        ends = [cluster.ended(f"{job}_{replica}", 60.0) for replica in range(REPLICAS)]
    assert (code, ends) == (0, [DONE] * REPLICAS), said(tmp_path) + cluster.said()
    check(tmp_path, steps=10, advance=torchrun.ACCUMULATE)


def test_the_script_starts_a_replica_again_whose_rank_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """`python` on the path of the job is a program that runs the example's train function by killed.py."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    arguments = [torchrun.STEPS, tmp_path, torchrun.EXAMPLE, "''", REPLICAS, torchrun.RANKS]
    asked = 'test "$1" = examples/hsdp.py || exit 99'
    python.write_text("\n".join(["#!/bin/sh", asked, " ".join(map(str, ["exec", sys.executable, KILLED, *arguments])), ""]))
    python.chmod(0o755)
    with serving(cluster, tmp_path, "--dp-shard", torchrun.RANKS) as server:
        path = os.pathsep.join([str(python.parent), PATH])
        job = cluster.submit(SCRIPT, VARIABLES=str(tmp_path / "variables"), PATH=path)
        code = server.wait(LIMIT_S)
        ends = [cluster.ended(f"{job}_{replica}", 60.0) for replica in range(REPLICAS)]
    assert (code, ends) == (0, [DONE] * REPLICAS), said(tmp_path) + cluster.said()
    assert "replica 1: attempt 1 has ended with an error" in cluster.said()
    torchrun.check_alike((tmp_path / "latest").resolve(), torchrun.STEPS, torchrun.ACCUMULATE)


# ---------------------------------------------------------------- srun


def test_a_replica_that_srun_starts_again_rejoins(cluster: Cluster, tmp_path: Path) -> None:
    """An existing loop; each replica has an allocation of its own."""
    script = Path(__file__).parent / "torchrun_killed.py"
    again = 'for attempt in 1 2 3; do srun --ntasks=1 python "$@" && exit 0; done; exit 1'
    logs = [tmp_path / f"replica{replica}.log" for replica in range(REPLICAS)]
    runs: list[subprocess.Popen[str]] = []
    with serving(cluster, tmp_path) as server:
        try:
            for replica, log in enumerate(logs):
                variables = {**told(tmp_path), "HELIXRT_REPLICA": str(replica)}
                runs.append(cluster.start(["bash", "-c", again, "bash", script, LOOP_STEPS, tmp_path], log, **variables))
            code = server.wait(LIMIT_S)
            codes = [run.wait(60) for run in runs]
        finally:
            for run in runs:
                run.terminate()
                run.wait(60)
    printed = "".join(log.read_text() for log in logs)
    assert (code, codes) == (0, [0] * REPLICAS), said(tmp_path) + printed
    check_loop(tmp_path, said(tmp_path), printed)


def test_one_srun_has_the_ranks_of_all_replicas(cluster: Cluster, tmp_path: Path) -> None:
    """As the guide says it, over two nodes."""
    (tmp_path / "enough").touch()
    each = f"HELIXRT_REPLICA=$((SLURM_PROCID / 2)) exec python -m tests.job.hosts_script {tmp_path} 2 20"
    with serving(cluster, tmp_path, "--dp-shard", 2) as server:
        srun = ["srun", "--nodes=2", "--ntasks=4", "--kill-on-bad-exit=0", "bash", "-c", each]
        run = cluster.start(srun, tmp_path / "srun.log", **told(tmp_path))
        codes = [process.wait(LIMIT_S) for process in (server, run)]
    assert codes == [0, 0], said(tmp_path) + (tmp_path / "srun.log").read_text()
    check(tmp_path, steps=20)


# ---------------------------------------------------------------- what Slurm does to a job


def test_a_job_that_is_requeued_or_cancelled_leaves_at_a_step_boundary(cluster: Cluster, tmp_path: Path) -> None:
    """scancel and scontrol requeue send SIGTERM to the ranks. The replica comes again: by itself from the queue, and in a new
    job."""
    script = tmp_path / "job.sh"
    command = f"srun --kill-on-bad-exit=1 python -m tests.job.hosts_script {tmp_path} 2 {STEPS}"
    script.write_text(f"#!/bin/bash\n#SBATCH --ntasks=2 --requeue --open-mode=append\n{command}\n")

    def submitted(replica: int) -> int:
        return cluster.submit(script, **told(tmp_path), HELIXRT_REPLICA=str(replica))

    def until(*expected: tuple[int, int]) -> None:
        why = f"it does not come to {expected}"
        cluster.until(lambda: contributors(tmp_path)[-3:] == [set(expected)] * 3, why, LIMIT_S)

    with serving(cluster, tmp_path, "--dp-shard", 2) as server:
        jobs = [submitted(replica) for replica in range(REPLICAS)]
        until((0, 0), (1, 0))
        cluster.call("scontrol", "requeue", jobs[1])
        cluster.until(lambda: cluster.state(jobs[1])["JobState"] == "PENDING", "it is not requeued", LIMIT_S)
        cluster.call("scontrol", "update", f"JobId={jobs[1]}", "StartTime=now")  # else Slurm waits for two minutes
        until((0, 0), (1, 1))
        assert cluster.state(jobs[1])["Restarts"] == "1"
        cluster.call("scancel", jobs[1])
        until((0, 0))
        assert cluster.ended(jobs[1], LIMIT_S)[0] == "CANCELLED"
        jobs[1] = submitted(1)
        until((0, 0), (1, 2))
        (tmp_path / "enough").touch()
        code = server.wait(LIMIT_S)
        ends = [cluster.ended(job, 60.0) for job in jobs]
    assert (code, ends) == (0, [DONE] * REPLICAS), said(tmp_path) + cluster.said()
    check(tmp_path, STEPS)
    left = [int(step) for step in re.findall(r"SIGTERM to r1\S*; the replica left after step (\d+)", cluster.said())]
    steps = contributors(tmp_path)
    last = [max(step for step, who in enumerate(steps, 1) if (1, incarnation) in who) for incarnation in (0, 1)]
    assert sorted(set(left)) == last and len(left) == 4, "each of its ranks, and nothing that it did is lost"


# ---------------------------------------------------------------- several hosts


def guide_script(folder: Path, steps: int) -> str:
    """That of the guide, with two replicas over two nodes of one task each."""
    script = next(block.code for block in blocks_of(ROOT / "docs" / "guides" / "hosts.md") if "#SBATCH" in block.code)
    for written, here in (
        ("--nodes=9 --ntasks-per-node=8", "--nodes=5 --ntasks-per-node=1"),
        ("--replicas 4 --dp-shard 16", f"--replicas 2 --dp-shard 2 --step-timeout-s {STEP_TIMEOUT_S} {OFTEN}"),
        ("/shared/runs", str(folder)),
        ("0 1 2 3", "0 1"),
        ("--ntasks=16", "--ntasks=2"),
        ("train.py", f"-m tests.job.hosts_script {folder} 2 {steps}"),
    ):
        assert script.count(written) == 1, f"the guide's script has no {written!r} any more, or several"
        script = script.replace(written, here)
    return script


@pytest.mark.netns
def test_the_job_of_the_guide_has_replicas_over_several_hosts(tmp_path: Path) -> None:
    """A task is killed; its replica is started again whole, by the loop of the script."""
    if why := lacking():
        pytest.skip(why)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "job.sh").write_text(guide_script(tmp_path, STEPS))
    with Network(hosts=5) as network, Cluster(tmp_path / "slurm", 5, network) as cluster:
        job = cluster.submit(tmp_path / "job.sh")

        def until(*expected: tuple[int, int]) -> None:
            why = f"it does not come to {expected}"
            cluster.until(lambda: contributors(tmp_path)[-3:] == [set(expected)] * 3, why, LIMIT_S)

        until((0, 0), (1, 0))
        for process in processes([network.namespace(4)]):
            arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if arguments[1:3] == [b"-m", b"tests.job.hosts_script"]:
                os.kill(process, signal.SIGKILL)
        until((0, 0), (1, 1))
        (tmp_path / "enough").touch()
        end = cluster.ended(job, LIMIT_S)
        assert end == DONE, cluster.said()
        for replica in range(REPLICAS):
            for shard in range(2):
                at = (tmp_path / f"sockets.{replica}.{shard}").read_text().splitlines()
                address = network.address(1 + 2 * replica + shard)
                assert at and {each.rpartition(":")[0] for each in at} == {address}, at
    check(tmp_path, STEPS)
