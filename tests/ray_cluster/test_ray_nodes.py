"""A Ray cluster of three nodes, each a host of its own: jobs come from outside of it, nodes are cut off and come back.

One cluster serves all tests of this module.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helixrt.job.lineage_files import read_lineage
from helixrt.lab.net import Network
from helixrt.lab.ray_nodes import RayNodes
from helixrt.protocol.step.lineage import CommitRecord, Log, audit

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.netns, pytest.mark.timeout(480)]

ROOT = Path(__file__).parents[2]
OUTSIDE = 3  # the host that is no node
DEADLINE_S = 240.0


@dataclass(frozen=True)
class Cluster:
    network: Network
    nodes: RayNodes
    private: Path
    """A folder that node 2 does not share."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    private = tmp_path_factory.mktemp("private")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # as in an active virtual environment
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    with Network(4) as network, RayNodes(network, 3, cpus=1, environment=environment, private={2: [private]}) as nodes:
        yield Cluster(network, nodes, private)


@dataclass
class Job:
    """A job that was submitted from outside of the cluster. Its run's lineage is in `storage`."""

    process: subprocess.Popen[str]
    storage: Path
    signs: Path
    output: Path

    def ended(self) -> tuple[int, str]:
        return self.process.wait(DEADLINE_S), self.output.read_text()

    def folder(self) -> Path:
        (found,) = self.storage.glob("*/*/run.json")
        return found.parent

    def records(self) -> list[CommitRecord]:
        entries = read_lineage(self.folder() / "lineage") if list(self.storage.glob("*/*/run.json")) else []
        return Log(entries).chain() if entries else []

    def audited(self) -> list[CommitRecord]:
        """Its records, once it has ended: every batch is in them once."""
        records = self.records()
        found = audit(records)
        assert found.clean and found.batches == sum(len(record.summed) for record in records)
        return records

    def step(self) -> int:
        records = self.records()
        return records[-1].step if records else 0

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}: {self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {what}: {self.output.read_text()}"
            time.sleep(0.1)


def submitted(cluster: Cluster, folder: Path, storage: Path, *arguments: str, **variables: str) -> Job:
    """`ray job submit --working-dir . -- python train.py`, as docs/guides/ray.md has it, on a host that is no node.
    `variables`: of the job's environment."""
    program, signs, output = folder / "program", folder / "signs", folder / "output.txt"
    program.mkdir()
    signs.mkdir()
    storage.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("nodes_script.py"), program / "train.py")
    given = ["--runtime-env-json", json.dumps({"env_vars": variables})] if variables else []
    command = ["job", "submit", "--working-dir", ".", *given, "--", "python", "train.py", str(storage), str(signs), *arguments]
    environment = {**cluster.nodes.environment, "RAY_ADDRESS": cluster.nodes.dashboard}
    with open(output, "w", encoding="utf-8") as log:
        process = cluster.network.run(
            OUTSIDE,
            [sys.executable, "-m", "ray.scripts.scripts", *command],
            environment,
            cwd=program,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return Job(process, storage, signs, output)


def incarnations(records: list[CommitRecord]) -> set[tuple[int, int]]:
    return {contributor for record in records for contributor in record.contributors}


def test_storage_that_a_node_does_not_share_is_named_at_the_start(cluster: Cluster, tmp_path: Path) -> None:
    job = submitted(cluster, tmp_path, cluster.private)
    code, said = job.ended()
    assert code != 0
    rule = "must be a folder that all nodes of the cluster share; on node 10.77.0.3: No such file or directory"
    assert f"storage={cluster.private}: {rule}" in said
    assert list(cluster.private.iterdir()) == [], "nothing was begun"


def test_the_others_go_on_without_a_node_that_is_cut_off_and_its_replica_returns_with_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    job = submitted(cluster, tmp_path, tmp_path / "storage")
    job.until(lambda: job.step() >= 5 and len(list(job.signs.glob("*.on.*"))) == 3, "a step of all replicas")
    where = {sign.name.split(".on.")[1]: int(sign.name[1]) for sign in job.signs.glob("*.on.*")}
    assert sorted(where) == ["10.77.0.1", "10.77.0.2", "10.77.0.3"], "a replica on each node"
    lost = where["10.77.0.3"]

    cluster.network.cut(2)
    job.until(lambda: lost not in job.records()[-1].summed, "a step without the replica")
    without = job.step()
    job.until(lambda: job.step() >= without + 10, "ten more steps")

    cluster.nodes.end(2)
    cluster.network.restore(2)
    cluster.nodes.start(2)
    cluster.nodes.wait(2)
    job.until(lambda: any(r == lost and i > 0 for r, i in incarnations(job.records()[without:])), "the replica's return")
    (job.signs / "stop").touch()
    code, said = job.ended()
    assert code == 0, said
    records = job.audited()
    others = {replica for replica in range(3) if replica != lost}
    assert {r for r, i in incarnations(records) if i == 0} == {0, 1, 2}
    assert {r for r, i in incarnations(records) if i > 0} == {lost}, "the others were not started again"
    assert all(others <= set(record.summed) for record in records[1:]), "the others took part in every step"
    assert f"ended at step {records[-1].step} of {records[-1].hash}" in said


@pytest.mark.slow
def test_a_driver_that_is_killed_is_followed_by_another_and_no_step_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    first = submitted(cluster, tmp_path, tmp_path / "storage")
    first.until(lambda: first.step() >= 5 and len(list(first.signs.glob("*.on.*"))) == 3, "a step of all replicas")
    (driver,) = first.signs.glob("driver.process.*")
    os.kill(int(driver.name.rpartition(".")[2]), signal.SIGKILL)
    code, said = first.ended()
    assert code != 0, said
    alone, deadline = first.step(), time.monotonic() + DEADLINE_S
    while first.step() < alone + 10:
        assert time.monotonic() < deadline, "the ranks do not go on without a driver"
        time.sleep(0.1)

    again = tmp_path / "again"
    again.mkdir()
    second = submitted(cluster, again, tmp_path / "storage", "latest")
    second.until(lambda: "attached to run" in second.output.read_text(), "the second driver")
    (first.signs / "stop").touch()
    code, said = second.ended()
    assert code == 0, said
    told = re.search(
        r"([0-9.]+) s without a driver; the ranks went from step (\d+) to step (\d+), no step is lost; "
        r"longest time without progress ([0-9.]+) s",
        said,
    )
    assert told is not None, said
    away_s, before, after, still_s = map(float, told.groups())
    assert 0 < still_s < away_s and before + 10 <= after
    records = second.audited()
    assert incarnations(records) == {(0, 0), (1, 0), (2, 0)}, "no rank was started again"


@pytest.mark.slow
def test_a_submitter_that_is_cut_off_follows_its_job_to_the_end(cluster: Cluster, tmp_path: Path) -> None:
    """`helixrt.train.submit` on a host that is no node, whose network goes away for a while."""
    output, steps = tmp_path / "output.txt", 300
    command = ["-m", "helixrt.train.submit", "+experiment=solo", f"steps={steps}", f"output.root={tmp_path / 'runs'}"]
    environment = {**cluster.nodes.environment, "RAY_ADDRESS": cluster.nodes.dashboard}
    with open(output, "w", encoding="utf-8") as log:
        process = cluster.network.run(
            OUTSIDE, [sys.executable, *command], environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True
        )
    job = Job(process, tmp_path / "runs", tmp_path, output)
    job.until(lambda: f"/{steps}" in output.read_text(), "a line of the job's output")
    cluster.network.cut(OUTSIDE)
    shown, step = output.read_text(), job.step()
    job.until(lambda: job.step() >= step + 50, "fifty steps meanwhile")
    assert output.read_text() == shown
    cluster.network.restore(OUTSIDE)
    code, said = job.ended()
    assert code == 0, said
    assert f"step {steps}/{steps}" in said and f"data: {steps} batches, 0 gaps, 0 repeats" in said


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("at_once", [True, False])
def test_a_run_whose_head_goes_away_goes_on_from_its_checkpoint_in_the_next_cluster(
    at_once: bool, cluster: Cluster, tmp_path: Path
) -> None:
    """The last test of the cluster: it starts another one. A head that goes down in order may end the run's keeper in the
    middle of ending the run; one without power leaves all that the keeper had."""
    every, storage = 5, tmp_path / "storage"
    first = submitted(cluster, tmp_path, storage, CHECKPOINT_EVERY=str(every))
    first.until(lambda: first.step() >= every + 3, "a checkpoint and a few steps")
    ranks = [int(sign.name.rpartition(".")[2]) for sign in first.signs.glob("r*.process.*")]
    assert len(ranks) == 3

    cluster.nodes.end(0, at_once)
    code, said = first.ended()
    assert code != 0, said
    deadline = time.monotonic() + DEADLINE_S
    while any(map(lives, ranks)):
        assert time.monotonic() < deadline, "ranks of other nodes go on without store, membership and driver"
        time.sleep(0.5)
    reached = first.step()
    for host in (1, 2):
        cluster.nodes.end(host)
    cluster.nodes.start_all()

    again = tmp_path / "again"
    again.mkdir()
    second = submitted(cluster, again, storage, "latest", CHECKPOINT_EVERY=str(every))
    second.until(lambda: not of_before(second.records()[-1]), "a step of ranks of the new cluster")
    second.until(lambda: second.step() >= reached + every, "steps beyond those of before")
    for job in (first, second):  # ranks of a run that was attached to have the arguments of before
        (job.signs / "stop").touch()
    code, said = second.ended()
    assert code == 0, said
    records = second.audited()
    assert [record.step for record in records] == list(range(len(records)))
    kept = max(record.step for record in records if of_before(record))
    assert reached - 2 * every < kept < reached, "what came after the newest checkpoint is done again"
    assert not at_once or "and have ended, so steps after the newest checkpoint may be done again" in said
    assert f"ended at step {records[-1].step} of {records[-1].hash}" in said


def of_before(record: CommitRecord) -> bool:
    """Of the first cluster's ranks, or the beginning."""
    return record.life == 0 and all(incarnation == 0 for _, incarnation in record.contributors)


def lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()
