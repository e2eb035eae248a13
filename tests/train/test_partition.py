"""Three replicas on hosts of their own, whose network fails in part: real ranks, real links, the real membership.

The driver, with the run's store and the lighthouse, is on a fourth host that everybody reaches; so is the keeper of a run that
has one, and then the store and the lighthouse are its.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.keeper import FILE
from helixrt.lab.net import Network
from helixrt.protocol.step.blame import BlameRules, pause_generations
from helixrt.record import ROUTINE, Event, Kind
from tests.train.jobs import DEADLINE_S, MARK, Ended, Job, assert_consistent, until
from tests.train.lab_hosts import HOSTS, LAUNCHER
from tests.train.lab_job import ENOUGH

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(480)]

REPLICAS, DRIVER = 3, 3  # the replicas' hosts are 0 to 2
CONTROL_RAIL, DATA_RAIL = 0, 1
STEPS = 150
KEEPER = "driver_away_s=60"  # as on a Ray cluster by default
ROOT = Path(__file__).parents[2]
LAB_JOB = (str(Path(__file__).with_name("lab_job.py")),)


class LabJob(Job):
    """A job on the hosts of a network, its driver started at once."""

    def __init__(self, network: Network, folder: Path, *overrides: str) -> None:
        shape = ("mesh.replicas=3", "mesh.pp=1", f"launcher={LAUNCHER}")
        settings = (*shape, "transport.kind=tcp", "step_timeout_s=12", "checkpoint.every=0")
        super().__init__(folder, f"host={network.address(DRIVER)}", f"steps={STEPS}", *settings, *overrides)
        hosts = ",".join(network.namespace(host) for host in range(REPLICAS))
        argv = [sys.executable, *LAB_JOB, *self.overrides]
        self.console = folder / "console"
        with open(self.console, "w") as said:
            path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
            variables = {HOSTS: hosts, MARK: self.mark, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
            self.driver = network.run(DRIVER, argv, variables, stdout=said, stderr=subprocess.STDOUT)

    def so_far(self) -> Ended:
        return Ended(self.driver.poll() or 0, self.console.read_text(), "")

    def until(self, what: Callable[[], bool], why: str) -> None:
        until(what, why, self, self.driver, self.so_far)

    def to_the_end(self) -> Ended:
        """Let it go on as fast as it can, to its end."""
        (self.root / ENOUGH).touch()
        self.driver.wait(DEADLINE_S)
        return self.so_far()

    def events(self, replica: int, kind: Kind) -> list[Event]:
        """Of the first incarnation's flight record; the last line may be cut while it runs."""
        page = f"r{replica}.pp0.inc0.jsonl" if kind in ROUTINE else f"r{replica}.pp0.inc0.story.jsonl"
        try:
            text = (self.folder / "flight" / page).read_text()
        except (OSError, ValueError):
            return []
        found = [Event.from_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in found if event.kind is kind]

    def broken(self, replica: int) -> list[int]:
        """The generations of the exchanges that broke for a replica."""
        return [int(event.detail["generation"]) for event in self.events(replica, Kind.EXCHANGE_FAILED)]

    def pauses(self, replica: int) -> list[int]:
        """How many generations passed from a broken exchange to the next, where that is a pause and not another attempt."""
        broken = self.broken(replica)
        return [b - a for a, b in zip(broken, broken[1:], strict=False) if b - a >= pause_generations(1, BlameRules())]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(hosts=REPLICAS + 1, rails=2) as made:
        yield made


@pytest.fixture
def job(network: Network, tmp_path: Path) -> Iterator[Callable[..., LabJob]]:
    made: list[LabJob] = []

    def make(*overrides: str) -> LabJob:
        made.append(LabJob(network, tmp_path, *overrides))
        return made[-1]

    yield make
    for one in made:
        one.end()
        one.driver.wait(30)


def both_ways(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return [*pairs, *((b, a) for a, b in pairs)]


PARTITIONS: dict[str, tuple[Sequence[tuple[int, int]], tuple[str, ...]]] = {
    "replicas 1 and 2 do not reach each other": (both_ways((1, 2)), (KEEPER,)),
    "what replica 1 sends to replica 2 is lost": ([(1, 2)], ()),
    "what replica 2 sends to replica 1 is lost": ([(2, 1)], (KEEPER,)),
    "replica 2 reaches no other replica": (both_ways((0, 2), (1, 2)), ()),
}
PAUSES = 2


@pytest.mark.grid
@pytest.mark.parametrize(("blocked", "settings"), PARTITIONS.values(), ids=PARTITIONS.keys())
def test_in_a_partial_partition_one_replica_sits_out_until_it_heals(
    network: Network, job: Callable[..., LabJob], blocked: Sequence[tuple[int, int]], settings: Sequence[str]
) -> None:
    run = job(*settings)
    run.until(lambda: run.committed_by(0, 1, 2) > 5, "they do not begin")
    assert (run.folder / FILE).exists() is (KEEPER in settings)
    before = len(run.entries())
    for source, target in blocked:
        network.block(source, target)

    run.until(lambda: run.committed_by(0, 1) > 2, "the others do not go on without replica 2")
    run.until(lambda: len(run.pauses(2)) >= PAUSES, "replica 2 does not try again")
    for number, pause in enumerate(run.pauses(2), start=1):
        assert pause >= pause_generations(number, BlameRules()), (number, run.broken(2))
    run.until(lambda: run.committed_by(0, 1) > 2, "the others do not go on after another attempt")
    assert all(2 not in record.replicas for record in run.entries()[before + 3 :])

    for source, target in blocked:
        network.unblock(source, target)
    run.until(lambda: run.committed_by(0, 1, 2) > 5, "replica 2 does not come back")
    report = assert_consistent(run, run.to_the_end(), steps=STEPS, replicas=REPLICAS)
    assert report["failures"] == [], "nobody was started again"
    assert run.log().head.contributors == ((0, 0), (1, 0), (2, 0))


def test_a_rank_whose_own_network_device_is_down_ends_and_says_so(network: Network, job: Callable[..., LabJob]) -> None:
    """It reaches the run's store by another rail. The device stays down, so no new process of its replica can contribute."""
    run = job(f"transport.rails=[{network.device(DATA_RAIL)}]")
    run.until(lambda: run.committed_by(0, 1, 2) > 5, "they do not begin")
    network.cut(2, DATA_RAIL)
    run.until(lambda: run.committed_by(0, 1) > 10, "the others do not go on")
    ended = run.to_the_end()
    assert ended.code == 0, run.why(ended)
    log = (run.folder / "logs" / "r2.pp0.inc0.log").read_text()
    device = f"network interface {network.device(DATA_RAIL)} is down"
    assert "Fatal: " in log and device in log and "this rank's own network device failed" in log, log
    report: dict[str, Any] = run.report()
    assert {failure["replica"] for failure in report["failures"]} == {2}, report["failures"]
    assert device in report["failures"][0]["seen"]
    after = [record for record in run.log().chain() if record.replicas != (0, 1, 2)]
    assert all(record.replicas == (0, 1) for record in after[1:]) and run.log().head.replicas == (0, 1), "never again"
    assert {0, 1} <= {f["replica"] for f in report["replicas"]}, "replica 2 may have fetched the last state, by the other rail"
