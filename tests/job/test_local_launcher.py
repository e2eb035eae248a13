"""Local ranks as real, small processes: started once, heard of when they end, and never left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helixrt.job.local_launcher import LocalLauncher
from helixrt.replica.contracts import Coordinate, RankExit, RankSpec
from helixrt.replica.rank_log import describe_code, last_error, log_name

ROOT = Path(__file__).parents[2]

RANK = """
import json, os, sys, time
spec = json.load(sys.stdin)
print(f"pid {os.getpid()} replica {spec['coordinate']['replica']}", flush=True)
what = spec["config"].get("do", "sleep")
if what == "sleep":
    time.sleep(300)
elif what == "raise":
    try:
        raise ConnectionError("link to r0 broke")
    except ConnectionError as broke:
        raise RuntimeError("step 3 failed") from broke
elif what == "fork":
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    print(f"child {child.pid}", flush=True)
    os.kill(os.getpid(), 9)
sys.exit(int(what))
"""


def spec(replica: int, pp: int = 0, incarnation: int = 0, **config: object) -> RankSpec:
    return RankSpec("run", Coordinate(replica, pp), incarnation, "s", "l", "out", "x", 0.0, dict(config))


def until(condition: Callable[[], object], what: str, deadline_s: float = 30) -> object:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen in {deadline_s} s")


def exists(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody has waited for does not)."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc/self").exists() else True
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def rank_program(tmp_path: Path) -> list[str]:
    (tmp_path / "tiny_rank.py").write_text(RANK)
    return [sys.executable, "-m", "helixrt.replica.orphan", "tiny_rank"]


@pytest.fixture
def launcher(tmp_path: Path, rank_program: list[str]) -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(rank_program, tmp_path / "logs", {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    yield launcher
    launcher.close()


def polled(launcher: LocalLauncher, count: int) -> list[RankExit]:
    exits: list[RankExit] = []
    until(lambda: exits.extend(launcher.poll()) or len(exits) >= count, f"{count} exits")
    return exits


def test_start_is_idempotent_and_the_spec_arrives(launcher: LocalLauncher, tmp_path: Path) -> None:
    for _ in range(3):
        launcher.start(spec(4, 1))
    (pid,) = launcher.pids(4)
    log = tmp_path / "logs" / "r4.pp1.inc0.log"
    assert until(lambda: log.read_text().splitlines(), "output") == [f"pid {pid} replica 4"]
    assert launcher.poll() == []


def test_an_exit_is_reported_once_with_its_code(launcher: LocalLauncher) -> None:
    launcher.start(spec(0, do="0"))
    launcher.start(spec(1, do="70"))
    exits = {e.coordinate.replica: e for e in polled(launcher, 2)}
    assert (exits[0].code, exits[1].code) == (0, 70)
    assert launcher.poll() == []
    launcher.start(spec(0, do="0"))  # the same incarnation is not started again after its end either
    assert launcher.pids(0) == []


def test_the_reason_names_the_first_cause_the_rank_and_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(spec(1, 1, incarnation=2, do="raise"))
    (ended,) = polled(launcher, 1)
    log = tmp_path / "logs" / "r1.pp1.inc2.log"
    assert ended.code == 1
    assert ended.reason == (f"ConnectionError: link to r0 broke (exit code 1) at r1.pp1.dp0.cp0.tp0 incarnation 2 (log: {log})")


def test_kill_ends_one_replica_only(launcher: LocalLauncher) -> None:
    for replica in (0, 1):
        for pp in (0, 1):
            launcher.start(spec(replica, pp))
    launcher.kill(1)
    launcher.kill(1)
    exits = polled(launcher, 2)
    assert {(str(e.coordinate)[:6], e.code) for e in exits} == {("r1.pp0", -9), ("r1.pp1", -9)}
    assert exits[0].reason.startswith("killed by SIGKILL at r1.pp")
    assert len(launcher.pids(0)) == 2 and launcher.poll() == []


def test_a_rank_takes_its_own_children_with_it(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(spec(0, do="fork"))
    polled(launcher, 1)
    child = int((tmp_path / "logs" / "r0.pp0.inc0.log").read_text().split("child ")[1])
    until(lambda: not exists(child), "end of the rank's child")


def test_close_waits_until_all_are_gone_and_nothing_starts_after(launcher: LocalLauncher) -> None:
    for pp in range(3):
        launcher.start(spec(0, pp))
    pids = launcher.pids(0)
    launcher.close()
    assert [p for p in pids if exists(p)] == []
    launcher.start(spec(9))
    assert launcher.pids(9) == []
    launcher.close()


DRIVER = """
import sys, time
from pathlib import Path
from helixrt.replica.contracts import Coordinate, RankSpec
from helixrt.job.local_launcher import LocalLauncher
launcher = LocalLauncher([sys.executable, "-m", "helixrt.replica.orphan", "tiny_rank"], Path(sys.argv[1]))
try:
    for replica in range(2):
        for pp in range(2):
            launcher.start(RankSpec("run", Coordinate(replica, pp), 0, "s", "l", "out", "x", 0.0, {}))
    print(*launcher.pids(0), *launcher.pids(1), flush=True)
    if sys.argv[2] == "stay":
        time.sleep(300)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)  # while the ranks are still starting
except KeyboardInterrupt:
    launcher.close()
    print("closed", flush=True)
"""


def driver(tmp_path: Path, what: str) -> tuple[subprocess.Popen[str], list[int]]:
    (tmp_path / "tiny_rank.py").write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path / "logs"), what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4
    return process, pids


def all_running(tmp_path: Path) -> bool:
    return sum(f.read_text().startswith("pid") for f in (tmp_path / "logs").glob("*.log")) == 4


def test_a_killed_driver_leaves_no_rank_behind(tmp_path: Path) -> None:
    process, pids = driver(tmp_path, "stay")
    until(lambda: all_running(tmp_path), "start of four ranks")
    process.kill()
    process.wait(30)
    until(lambda: not any(map(exists, pids)), "end of all ranks")


def test_a_driver_killed_during_the_start_leaves_no_rank_behind(tmp_path: Path) -> None:
    process, pids = driver(tmp_path, "die")
    assert process.wait(30) == -signal.SIGKILL
    until(lambda: not any(map(exists, pids)), "end of all ranks")


def test_ctrl_c_reaches_the_driver_alone_which_ends_the_ranks(tmp_path: Path) -> None:
    process, pids = driver(tmp_path, "stay")
    until(lambda: all_running(tmp_path), "start of four ranks")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    assert process.stdout is not None and process.stdout.readline() == "closed\n"
    assert process.wait(30) == 0
    assert [p for p in pids if exists(p)] == []
    logs = "".join(f.read_text() for f in (tmp_path / "logs").glob("*.log"))
    assert "KeyboardInterrupt" not in logs


def test_where_the_kernel_cannot_watch_a_thread_does(tmp_path: Path) -> None:
    child = "import helixrt.replica.orphan as o, time; o._kernel_watches = lambda: False; o.die_with_parent(); time.sleep(300)"
    parent = textwrap.dedent(f"""
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
        time.sleep(300)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    until(lambda: exists(pid), "start of the child")
    time.sleep(1.0)
    process.kill()
    process.wait(30)
    until(lambda: not exists(pid), "end of the child")


def test_log_names_and_codes() -> None:
    assert log_name(Coordinate(1, 0), 2) == "r1.pp0.inc2.log"
    assert log_name(Coordinate(1, 0, tp=3), 0) == "r1.pp0.tp3.inc0.log"
    assert (describe_code(-11), describe_code(70)) == ("killed by SIGSEGV", "exit code 70")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("step 1\nstep 2\n", "step 2"),
        ("step 1\nhelixrt.errors.Fatal: loss is NaN\nbye\n", "helixrt.errors.Fatal: loss is NaN"),
        ("Traceback (most recent call last):\n  File x\nValueError: old\nrecovered\n" * 2, "ValueError: old"),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_error(tmp_path / "log") == line
    assert last_error(tmp_path / "none") == ""


def test_ranks_that_the_system_has_no_process_for_wait_and_are_started_later(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refusals = subprocess.Popen, [errno.EAGAIN, errno.ENOMEM]

    def start_if_possible(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise OSError(refusals[0], "no resources")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start_if_possible)
    launcher.start(spec(0, do="7"))
    launcher.start(spec(1, do="8"))
    assert launcher.waiting(0) and launcher.waiting(1) and launcher.poll() == []
    launcher.kill(1)
    assert launcher.waiting(0) and not launcher.waiting(1)
    refusals.pop(0)
    assert launcher.poll() == [] and launcher.waiting(0)
    refusals.clear()
    (ended,) = polled(launcher, 1)
    assert (ended.coordinate.replica, ended.code) == (0, 7) and not launcher.waiting(0)


def test_a_rank_that_can_never_be_started_is_an_error(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "no such interpreter")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(FileNotFoundError, match="no such interpreter"):
        launcher.start(spec(0))
