"""Ranks as Ray actors, and jobs submitted to a head of our own: seen to their end, and nothing left behind.

The ranks are small functions, so that a test costs a process and no training.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixrt.replica.contracts import Coordinate, RankExit, RankSpec
from helixrt.train import submit

ray = pytest.importorskip("ray", reason="the extra ray is not installed")
from helixrt.ray_cluster.head import MARK_VARIABLE, marked  # noqa: E402
from helixrt.ray_cluster.launcher import RayLauncher  # noqa: E402
from tests.waiting import until  # noqa: E402

pytestmark = pytest.mark.ray

RANKS = """
import os, sys, time
from helixrt.ray_cluster.actors import serve_transport

class Echo:
    def say(self, text):
        return f"{os.getpid()} {text}"

def sleep(spec):
    serve_transport(Echo())
    print("pid", os.getpid(), os.environ["GREETING"], flush=True)
    time.sleep(300)

def end(spec):
    what = spec.config["do"]
    if what == "raise":
        raise ConnectionError("link to r0 broke")
    if what == "leave":
        sys.exit(3)
    return int(what)
"""

# A job's driver: starts four ranks, tells their process ids, then waits, or dies without a word.
DRIVER = """
import os, signal, sys, time
from pathlib import Path
from helixrt.ray_cluster.launcher import RayLauncher
from helixrt.replica.contracts import Coordinate, RankSpec
launcher = RayLauncher(Path(sys.argv[1]), "tiny_ranks:sleep", {"GREETING": "hello"}, num_cpus=0.01, ranks=2)
for replica in range(2):
    for pp in range(2):
        launcher.start(RankSpec(f"job{os.getpid()}", Coordinate(replica, pp), 0, "s", "l", "out", "x", 0.0, {}))
while len(pids := launcher.pids(0) + launcher.pids(1)) < 4:
    launcher.poll()
    time.sleep(0.02)
print("ranks", *pids, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""


def exists(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return not Path("/proc/self").exists() or "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def spec(replica: int, pp: int = 0, incarnation: int = 0, **config: object) -> RankSpec:
    return RankSpec(f"run{os.getpid()}", Coordinate(replica, pp), incarnation, "s", "l", "out", "x", 0.0, dict(config))


def write_programs(folder: Path) -> None:
    (folder / "tiny_ranks.py").write_text(RANKS)
    (folder / "tiny_driver.py").write_text(DRIVER)


@pytest.fixture(scope="module")
def head(ray_head: Any) -> str:
    """The dashboard of the tests' Ray head."""
    write_programs(ray_head.programs)
    return str(ray_head.dashboard)


@pytest.fixture
def launcher(head: str, tmp_path: Path) -> Iterator[RayLauncher]:
    launcher = RayLauncher(tmp_path, "tiny_ranks:sleep", {"GREETING": "hello"}, num_cpus=0.01)
    yield launcher
    launcher.close()


@pytest.fixture
def pairs(head: str, tmp_path: Path) -> Iterator[RayLauncher]:
    """Replicas of two ranks."""
    launcher = RayLauncher(tmp_path, "tiny_ranks:sleep", {"GREETING": "hello"}, num_cpus=0.01, ranks=2)
    yield launcher
    launcher.close()


@pytest.fixture
def greedy(head: str, tmp_path: Path) -> Iterator[RayLauncher]:
    """Wants more for each rank than the cluster has."""
    launcher = RayLauncher(tmp_path, "tiny_ranks:sleep", {"GREETING": "hello"}, num_cpus=1000.0)
    yield launcher
    launcher.close()


@pytest.fixture
def ending(head: str, tmp_path: Path) -> Iterator[RayLauncher]:
    launcher = RayLauncher(tmp_path, "tiny_ranks:end")
    yield launcher
    launcher.close()


def polled(launcher: RayLauncher, count: int) -> list[RankExit]:
    exits: list[RankExit] = []
    until(lambda: exits.extend(launcher.poll()) or len(exits) >= count, f"{count} exits")
    return exits


def test_a_life_of_two_replicas(pairs: RayLauncher, tmp_path: Path) -> None:
    """Started once; answers while it runs; a kill is noticed, spares the other, and a new life begins; close ends all."""
    for _ in range(2):
        for replica in (0, 1):
            for pp in (0, 1):
                pairs.start(spec(replica, pp))
    until(lambda: all(len(pairs.pids(r)) == 2 for r in (0, 1)), "four processes")
    first = [*pairs.pids(0), *pairs.pids(1)]
    assert len(set(first)) == 4
    log = tmp_path / "r1.pp0.inc0.log"
    until(lambda: log.exists() and "pid" in log.read_text(), "the rank's first words")
    victim = pairs.pids(1)[0]
    assert log.read_text() == f"pid {victim} hello\n"

    peer = ray.get_actor(f"run{os.getpid()}/{Coordinate(1, 0)}.inc0")
    answer = peer.call_transport.options(concurrency_group="control").remote("say", "while it runs")
    assert ray.get(answer, timeout=150) == f"{victim} while it runs"

    os.kill(victim, signal.SIGKILL)
    (ended,) = polled(pairs, 1)
    assert (ended.coordinate, ended.incarnation, ended.code) == (Coordinate(1, 0), 0, -9)
    assert "r1.pp0.dp0.cp0.tp0 incarnation 0" in ended.reason and str(log) in ended.reason
    pairs.kill(1)
    pairs.kill(1)
    assert [(e.coordinate, e.code) for e in polled(pairs, 1)] == [(Coordinate(1, 1), -9)]
    assert pairs.poll() == [] and len(pairs.pids(0)) == 2

    pairs.start(spec(1, 0, incarnation=1))
    assert pairs.waiting(1), "a replica starts whole"
    pairs.start(spec(1, 1, incarnation=1))
    until(lambda: pairs.poll() or len(pairs.pids(1)) == 2, "the new incarnation")
    stopped = pairs.pids(0)[0]
    os.kill(stopped, signal.SIGSTOP)  # does not answer Ray; must be ended all the same
    second = [*pairs.pids(0), *pairs.pids(1)]
    pairs.close()
    assert [pid for pid in first + second if exists(pid)] == []
    pairs.start(spec(0, 0, incarnation=7))
    assert pairs.pids(0) == []


def test_how_ranks_end_by_themselves(ending: RayLauncher) -> None:
    for replica, what in enumerate(["0", "70", "raise", "leave"]):
        ending.start(spec(replica, do=what))
    exits = {e.coordinate.replica: e for e in polled(ending, 4)}
    assert [exits[r].code for r in range(4)] == [0, 70, 1, 3]
    assert exits[2].reason.startswith("ConnectionError: link to r0 broke (exit code 1) at r2.pp0")
    assert ending.poll() == []


def test_close_before_the_processes_have_started(head: str, tmp_path: Path) -> None:
    launcher = RayLauncher(tmp_path, "tiny_ranks:sleep", {"GREETING": "hello"})
    launcher.start(spec(5))
    launcher.close()
    time.sleep(0.5)
    assert ray.is_initialized(), "a connection that the launcher found is not its to close"
    assert [f for f in tmp_path.glob("r5*") if any(map(exists, _pids_in(f.read_text())))] == []


def _pids_in(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("pid ")]


def test_a_wrong_setting_of_a_job_is_its_exit_code_and_one_line(head: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert submit.submit(head, ["mesh.replicas=0"]) == 2
    out = capfd.readouterr().out.splitlines()
    assert out == ["mesh.replicas=0: must be at least 1"]


def test_a_killed_driver_takes_its_ranks_with_it(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "entrypoint", lambda overrides: f"exec {sys.executable} -m tiny_driver {tmp_path} die")
    assert submit.submit(head, []) not in (0, None)
    ranks = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("ranks "))
    pids = [int(pid) for pid in ranks.split()[1:]]
    until(lambda: not any(map(exists, pids)), "end of the ranks")


SUBMIT = """
import os, sys
from helixrt.train import submit
from helixrt.train.config import TrainConfig
submit.entrypoint = lambda overrides: f"exec {sys.executable} -m tiny_driver {sys.argv[1]} stay"
submit.check = lambda config: None
sys.exit(submit.run(TrainConfig(), []))
"""


def submitted(folder: Path) -> tuple[subprocess.Popen[str], list[int], str]:
    """`submit` with a head of its own, once its job's ranks run: the process, the ranks, the head's token."""
    programs = folder / "programs"
    programs.mkdir()
    write_programs(programs)
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", MARK_VARIABLE)}
    process = subprocess.Popen(
        [sys.executable, "-c", SUBMIT, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": str(programs)},
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ranks "):
            pids = [int(pid) for pid in line.split()[1:]]
            environ = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
            mark = next(v for v in environ if v.startswith(MARK_VARIABLE.encode()))
            return process, pids, mark.decode().partition("=")[2]
    raise AssertionError(f"the job did not start: exit code {process.wait(30)}")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_end_of_submit_is_the_end_of_everything_it_started(tmp_path: Path, number: signal.Signals) -> None:
    process, pids, token = submitted(tmp_path)
    assert len(marked(token)) > len(pids) == 4
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
        assert process.wait(150) == 130
    else:
        process.kill()
        process.wait(60)
    # A process that is ending has lost its mark before it is gone.
    until(lambda: not marked(token) and not any(map(exists, pids)), "end of the head, of the job and of its ranks")


def test_ranks_without_resources_wait_and_those_with_a_process_do_not(launcher: RayLauncher, greedy: RayLauncher) -> None:
    greedy.start(spec(5))
    launcher.start(spec(6))
    until(lambda: len(launcher.pids(6)) == 1, "a process")
    assert not launcher.waiting(6) and greedy.waiting(5) and not greedy.waiting(6)
    assert greedy.poll() == [] == launcher.poll()
