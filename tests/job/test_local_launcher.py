"""Local ranks as real, small processes: started once, heard of when they end, and never left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixrt.job import forerunner, forerunner_process
from helixrt.job.forerunner import ForerunnerLost
from helixrt.job.inherited import Inherited, difference, inherited
from helixrt.job.local_launcher import LocalLauncher
from helixrt.replica.adoption import AdoptedProcess
from helixrt.replica.contracts import Coordinate, RankExit, RankSpec
from helixrt.replica.orphan import command
from helixrt.replica.rank_log import describe_code, last_error, log_name
from helixrt.replica.work_page import NOT_WORKING
from tests.leaks import parent_of
from tests.waiting import until

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0  # only what hangs takes so long, also on a machine that has no time for this process
COLD = "is started as a new process"  # in the log, of a rank that was to be a fork

RANK = """
import json, multiprocessing, os, random, signal, subprocess, sys, time

def seen():
    umask = os.umask(0o77)
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}  # torch._dynamo sets it
    return {
        "parent": os.getppid(), "leads its session": os.getsid(0) == os.getpid() == os.getpgid(0), "environment": environment,
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "main": sys.modules["__main__"].__spec__.name,
        "imported": "tiny_rank" in sys.modules, "folder": os.getcwd(), "umask": umask, "rest of stdin": sys.stdin.read(),
        "files": [os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)], "open": len(os.listdir("/proc/self/fd")),
        "signals": [str(signal.getsignal(n)) for n in range(1, 32)],
        "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": [(f.encoding, f.errors, f.line_buffering) for f in (sys.stdin, sys.stdout, sys.stderr)],
    }

def drawn():
    return [numpy.random.random(), random.random(), torch.initial_seed(), torch.rand(()).item(),
            multiprocessing.current_process().authkey.hex()]

def main():
    spec = json.load(sys.stdin)
    what = spec["config"].get("do", "sleep")
    if what in ("seen", "drawn"):
        print(json.dumps(globals()[what]()), flush=True)
        return
    print(f"pid {os.getpid()} replica {spec['coordinate']['replica']}", flush=True)
    if what == "sleep":
        time.sleep(300)
    elif what == "raise":
        try:
            raise ConnectionError("link to r0 broke")
        except ConnectionError as broke:
            raise RuntimeError("step 3 failed") from broke
    elif what == "share":
        from multiprocessing.shared_memory import SharedMemory
        print(f"memory {SharedMemory(create=True, size=8).name}", flush=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        os.kill(os.getpid(), 9)
    elif what in ("fork", "parent"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        print(f"child {child.pid}", flush=True)
        if what == "parent":
            time.sleep(300)
        os.kill(os.getpid(), 9)
    sys.exit(int(what))

if __name__ == "__main__":
    main()
"""
UNFIT = {
    "broken_rank": "raise RuntimeError('not to be imported')",
    "threaded_rank": "import threading, time; threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
    "crowded_rank": """
import errno, os
fork, calls = os.fork, []
def fork_if_possible():
    calls.append(1)
    if len(calls) in (2, 4):  # the first is for nothing; then the forerunner's, and that of the process between
        raise OSError(errno.EAGAIN, "no resources")
    return fork()
os.fork = fork_if_possible
""",
    "lingering_rank": "import _thread, time; _thread.start_new_thread(time.sleep, (0.3,))",
}  # what they do when they are imported
GATE = """
import os, time
while __name__ != "__main__" and not os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
"""  # the forerunner that imports it is ready when there is a file of that name
WORKING_RANK = """
import json, os, sys
from helixrt.replica.work_page import word_if_possible

spec = json.load(sys.stdin)
word = word_if_possible(spec["work_page"])
for position in (3, None, 4) if spec["incarnation"] else (3, 4, None):
    word.say(position)
os.kill(os.getpid(), 9)
"""
STARTS = ["cold", "warm"]


def spec(replica: int, pp: int = 0, incarnation: int = 0, **config: object) -> RankSpec:
    return RankSpec("run", Coordinate(replica, pp), incarnation, "s", "l", "out", "x", 0.0, dict(config))


def exists(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody has waited for does not)."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc/self").exists() else True
    except (ProcessLookupError, FileNotFoundError):
        return False


def children() -> set[int]:
    """Those of this process, also those that have ended and that nobody has waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if parent_of(int(stat.parent.name)) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the modules that ranks run; the same for all tests, which share a forerunner."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "tiny_rank.py").write_text(RANK)
    (folder / "drawing_rank.py").write_text(f"import numpy\nimport torch\n{RANK}")
    (folder / "working_rank.py").write_text(WORKING_RANK)
    (folder / "gated_rank.py").write_text(f"{GATE}\n{RANK}")
    for name, imported in UNFIT.items():
        (folder / f"{name}.py").write_text(f"if __name__ == '__main__':\n    raise SystemExit(5)\n{imported}\n")
    return folder


Launchers = Callable[..., LocalLauncher]


@pytest.fixture
def launchers(tmp_path: Path, programs: Path) -> Iterator[Launchers]:
    """Makes launchers of a program's ranks, cold or warm; each has a folder of its own for logs, or the one that is named."""
    made: list[LocalLauncher] = []

    def make(
        start: str, program: str = "tiny_rank", logs: str = "logs", pages: bool = False, **environment: str
    ) -> LocalLauncher:
        variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{programs}", "OMP_NUM_THREADS": "1", **environment}
        made.append(LocalLauncher(command(program), tmp_path / logs, variables, warm=start == "warm", pages=pages))
        return made[-1]

    yield make
    for launcher in made:
        launcher.close()


@pytest.fixture(params=STARTS)
def launcher(request: pytest.FixtureRequest, launchers: Launchers, caplog: pytest.LogCaptureFixture) -> Iterator[LocalLauncher]:
    yield launchers(request.param)
    assert COLD not in caplog.text


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


@pytest.mark.parametrize("start", STARTS)
def test_what_a_rank_was_working_on_when_it_was_killed_is_known(launchers: Launchers, start: str) -> None:
    launcher = launchers(start, "working_rank", pages=True)
    name = str(spec(0).coordinate)
    assert launcher.working_on(name, 0) is None
    for incarnation, said in enumerate((NOT_WORKING, "4")):
        launcher.start(spec(0, incarnation=incarnation))
        assert [each.code for each in polled(launcher, 1)] == [-9]
        assert launcher.working_on(name, incarnation) == said
        assert launcher.working_on(name, incarnation + 1) is None
    assert launcher.working_on(name, 0) is None, "a later one was started"
    assert launcher.working_on(str(spec(1).coordinate), 0) is None


def test_without_pages_ranks_are_told_of_none(launchers: Launchers) -> None:
    launcher = launchers("cold")
    launcher.start(spec(0, do="0"))
    assert [each.code for each in polled(launcher, 1)] == [0] and launcher.working_on(str(spec(0).coordinate), 0) is None


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


def test_the_shared_memory_of_a_killed_rank_is_removed(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(spec(0, do="share"))
    polled(launcher, 1)
    memory = (tmp_path / "logs" / "r0.pp0.inc0.log").read_text().split("memory ")[1].split()[0]
    until(lambda: not Path("/dev/shm", memory).exists(), "end of the rank's resource tracker")


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
from helixrt.replica.orphan import command
launcher = LocalLauncher(command("tiny_rank"), Path(sys.argv[1]), warm=sys.argv[3] == "warm")
try:
    for replica in range(2):
        for pp in range(2):
            launcher.start(RankSpec("run", Coordinate(replica, pp), 0, "s", "l", "out", "x", 0.0, {}))
    ahead = [launcher._forerunner().pid] if sys.argv[3] == "warm" else []
    print(*launcher.pids(0), *launcher.pids(1), *ahead, flush=True)
    if sys.argv[2] == "stay":
        time.sleep(300)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)  # while the ranks are still starting
except KeyboardInterrupt:
    launcher.close()
    print("closed", flush=True)
"""


def driver(tmp_path: Path, what: str, start: str = "cold") -> tuple[subprocess.Popen[str], list[int]]:
    """Its process, and those of its four ranks, and of its forerunner if they start warm."""
    (tmp_path / "tiny_rank.py").write_text(RANK)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), str(tmp_path / "logs"), what, start],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == (5 if start == "warm" else 4)
    return process, pids


def all_running(tmp_path: Path) -> bool:
    return sum(f.read_text().startswith("pid") for f in (tmp_path / "logs").glob("*.log")) == 4


@pytest.mark.parametrize("start", STARTS)
def test_a_killed_driver_leaves_no_rank_behind(tmp_path: Path, start: str) -> None:
    process, pids = driver(tmp_path, "stay", start)
    until(lambda: all_running(tmp_path), "start of four ranks")
    process.kill()
    process.wait(PATIENCE_S)
    until(lambda: not any(map(exists, pids)), "end of all ranks")


@pytest.mark.parametrize("start", STARTS)
def test_a_driver_killed_during_the_start_leaves_no_rank_behind(tmp_path: Path, start: str) -> None:
    process, pids = driver(tmp_path, "die", start)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: not any(map(exists, pids)), "end of all ranks")


@pytest.mark.parametrize("start", STARTS)
def test_ctrl_c_reaches_the_driver_alone_which_ends_the_ranks(tmp_path: Path, start: str) -> None:
    process, pids = driver(tmp_path, "stay", start)
    until(lambda: all_running(tmp_path), "start of four ranks")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    assert process.stdout is not None and process.stdout.readline() == "closed\n"
    assert process.wait(PATIENCE_S) == 0
    assert [p for p in pids if exists(p)] == []
    logs = "".join(f.read_text() for f in (tmp_path / "logs").glob("*.log"))
    assert "KeyboardInterrupt" not in logs


def test_where_the_kernel_cannot_watch_a_thread_does(tmp_path: Path) -> None:
    child = (
        "import helixrt.replica.orphan as o, time; o._kernel_watches = lambda: False; o.die_with_parent()\n"
        "print('watches', flush=True); time.sleep(300)"
    )
    parent = textwrap.dedent(f"""
        import subprocess, sys, time
        print(subprocess.Popen([sys.executable, "-c", {child!r}]).pid, flush=True)
        time.sleep(300)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    said = {process.stdout.readline().strip() for _ in range(2)}
    assert "watches" in said
    pid = int((said - {"watches"}).pop())
    assert exists(pid)
    process.kill()
    process.wait(PATIENCE_S)
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
        ("step 1\nr1.pp0: skips 80 batches\n", "step 1"),
        (
            "r1.pp0: skips 80 batches\nr1.pp0.dp0.cp0.tp0: no orders; compute hangs\n",
            "r1.pp0.dp0.cp0.tp0: no orders; compute hangs",
        ),
        ("step 1\nhelixrt.errors.Fatal: loss is NaN\nbye\n", "helixrt.errors.Fatal: loss is NaN"),
        ("Traceback (most recent call last):\n  File x\nValueError: old\nrecovered\n" * 2, "ValueError: old"),
        (
            "Traceback (most recent call last):\n  File x\nRuntimeError: Caught RuntimeError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n  File y\nRuntimeError: unable to allocate shared memory(shm) for "
            "file </torch_1>: No space left on device (28)\n\n",
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28) (DataLoader "
            "worker process 0): /dev/shm is full; give it more (docker run --shm-size), or take fewer workers",
        ),
    ],
)
def test_the_line_that_says_why(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "r1.pp0.inc2.log").write_text(text)
    assert last_error(tmp_path / "r1.pp0.inc2.log") == line
    assert last_error(tmp_path / "none") == ""


def test_ranks_that_the_system_has_no_process_for_wait_and_are_started_later(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launchers("cold")
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
    assert [ended.coordinate.replica for ended in launcher.poll()] == [1] and launcher.waiting(0)
    refusals.clear()
    (ended,) = polled(launcher, 1)
    assert (ended.coordinate.replica, ended.code) == (0, 7) and not launcher.waiting(0)


def test_a_rank_that_can_never_be_started_is_an_error(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launchers("cold")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "no such interpreter")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(FileNotFoundError, match="no such interpreter"):
        launcher.start(spec(0))


def told(launcher: LocalLauncher, log: Path, replica: int, what: str) -> Any:
    """What a rank prints that is asked for `what`."""
    launcher.start(spec(replica, do=what))
    (ended,) = polled(launcher, 1)
    assert ended.code == 0, ended.reason
    return json.loads(log.read_text())


def test_a_fork_sees_what_a_new_process_sees(launchers: Launchers, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "r0.pp0.inc0.log"
    cold = told(launchers("cold", HELIXRT_LOG="ERROR"), log, 0, "seen")
    log.unlink()
    warm = told(launchers("warm", HELIXRT_LOG="ERROR"), log, 0, "seen")
    assert warm == cold
    assert warm["parent"] == os.getpid() and warm["leads its session"] and warm["environment"]["HELIXRT_LOG"] == "ERROR"


def test_forks_draw_other_numbers(launchers: Launchers, tmp_path: Path) -> None:
    launcher = launchers("warm", "drawing_rank")
    drawn = [told(launcher, tmp_path / "logs" / f"r{replica}.pp0.inc0.log", replica, "drawn") for replica in range(2)]
    for one, other in zip(*drawn, strict=True):
        assert one != other


def test_a_thread_that_was_about_to_end_when_the_forerunner_was_stopped_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it wakes the time for threads to end is over, and that thread has not run."""
    slept = list[float]()
    clock = SimpleNamespace(monotonic=lambda: 10.0 * len(slept), sleep=slept.append)
    tasks = iter([["1", "2"], ["1", "2"], ["1"]])
    system = SimpleNamespace(listdir=lambda path: next(tasks) if path.endswith("task") else [])
    monkeypatch.setattr(forerunner_process, "time", clock)
    monkeypatch.setattr(forerunner_process, "os", system)
    monkeypatch.setattr(forerunner_process, "threading", SimpleNamespace(active_count=lambda: 1, enumerate=lambda: []))
    assert forerunner_process._obstacle() == ""
    tasks = iter([["1", "2"]] * 4)
    assert "2 threads" in forerunner_process._obstacle()


def test_two_runs_of_a_process_have_one_forerunner(launchers: Launchers, caplog: pytest.LogCaptureFixture) -> None:
    first, second = launchers("warm", logs="first"), launchers("warm", logs="second")
    first.start(spec(0, do="3"))
    assert polled(first, 1)[0].code == 3
    first.close()
    second.start(spec(0, do="4"))
    assert polled(second, 1)[0].code == 4
    assert first._forerunner() is second._forerunner() and COLD not in caplog.text


def test_ranks_outlive_the_forerunner_and_later_ones_start_without_it(
    launchers: Launchers, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    launcher = launchers("warm", "gated_rank", GATE=str(gate))
    launcher.start(spec(0))
    (pid,), ahead = launcher.pids(0), launcher._forerunner().pid
    gate.unlink()
    os.kill(ahead, signal.SIGKILL)
    until(lambda: not exists(ahead), "end of the forerunner")
    assert exists(pid) and launcher.poll() == [] and COLD not in caplog.text

    launcher.start(spec(1, do="6"))
    assert polled(launcher, 1)[0].code == 6
    assert f"r1.pp0 (incarnation 0) {COLD}" in caplog.text
    assert "the forerunner is not ready yet; the one before: the forerunner has ended, killed by SIGKILL" in caplog.text
    caplog.clear()
    gate.touch()
    assert launcher._forerunner().pid != ahead and launcher._forerunner().is_ready(PATIENCE_S)
    launcher.start(spec(2, do="7"))
    assert polled(launcher, 1)[0].code == 7 and COLD not in caplog.text

    assert exists(pid)
    launcher.kill(0)
    assert polled(launcher, 1)[0].code == -signal.SIGKILL


def slowly(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Let the driver do something else between hearing of a rank that it has adopted, and adopting nobody any more."""

    class Slowly(AdoptedProcess):
        def __init__(self, pid: int) -> None:
            super().__init__(pid)
            do()

    monkeypatch.setattr(forerunner, "AdoptedProcess", Slowly)


def child_of_rank(log: Path) -> int:
    return int(str(until(lambda: "child " in log.read_text() and log.read_text(), "a child")).split("child ")[1])


def test_a_driver_that_is_slow_adopts_nothing_that_a_rank_has_left(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = launchers("warm")
    slowly(monkeypatch, lambda: time.sleep(1.0))  # if it had the time, the rank would end in it
    launcher.start(spec(0, do="fork"))
    child = child_of_rank(tmp_path / "logs" / "r0.pp0.inc0.log")
    polled(launcher, 1)
    until(lambda: not exists(child), "end of the rank's child")
    assert child not in children()


def test_what_a_rank_leaves_while_another_one_is_forked_is_waited_for(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = launchers("warm")
    launcher.start(spec(0, do="parent"))
    (pid,), child = launcher.pids(0), child_of_rank(tmp_path / "logs" / "r0.pp0.inc0.log")

    def lose_the_first() -> None:
        os.kill(pid, signal.SIGKILL)
        until(lambda: child in children(), "adoption of the child")

    slowly(monkeypatch, lose_the_first)
    launcher.start(spec(1, do="6"))
    assert sorted(ended.code for ended in polled(launcher, 2)) == [-signal.SIGKILL, 6]
    until(lambda: launcher.poll() == [] and child not in children(), "end of the rank's child")


def test_threads_that_end_by_themselves_do_not_keep_it_from_forking(
    launchers: Launchers, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of OpenBLAS, which are joined before a fork and then still listed for a moment."""
    launcher = launchers("warm", "lingering_rank")
    launcher.start(spec(0))
    assert polled(launcher, 1)[0].code == 5 and COLD not in caplog.text


def test_a_forerunner_that_does_not_answer_is_ended(
    launchers: Launchers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forerunner, "_ANSWER_S", 0.2)
    launcher = launchers("warm")
    ahead = launcher._forerunner().pid
    os.kill(ahead, signal.SIGSTOP)
    launcher.start(spec(0, do="6"))
    assert polled(launcher, 1)[0].code == 6
    assert f"r0.pp0 (incarnation 0) {COLD}" in caplog.text and "killed by SIGKILL" in caplog.text
    assert not exists(ahead)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("broken_rank", "exit code 1, before it was ready: RuntimeError: not to be imported"),
        ("threaded_rank", "the imports have left 2 threads in the forerunner, of Python's: MainThread, Thread-"),
    ],
    ids=["an import fails", "a thread stays"],
)
def test_a_forerunner_that_cannot_fork_is_not_tried_again(
    program: str, why: str, launchers: Launchers, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = launchers("warm", program)
    ahead = launcher._forerunner()
    for replica in range(2):
        launcher.start(spec(replica))
        assert polled(launcher, 1)[0].code == 5
    assert caplog.text.count(COLD) == caplog.text.count(why) == 2
    assert launcher._forerunner() is ahead and not exists(ahead.pid)


def test_a_rank_that_the_system_has_no_process_for_is_forked_later(
    launchers: Launchers, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = launchers("warm", "crowded_rank")
    launcher.start(spec(0))
    assert launcher.waiting(0) and launcher.pids(0) == []
    assert launcher.poll() == [] and launcher.waiting(0), "nor for the second fork"
    (ended,) = polled(launcher, 1)
    assert (ended.code, launcher.waiting(0)) == (5, False)
    assert COLD not in caplog.text


def test_a_forerunner_refuses_ranks_that_would_inherit_something_else(launchers: Launchers, tmp_path: Path) -> None:
    launcher = launchers("warm")
    ahead, environment = launcher._forerunner(), launcher._environment
    with open(tmp_path / "log", "ab") as log:
        for changed, what in (
            ({**environment, "OMP_NUM_THREADS": "3"}, "OMP_NUM_THREADS of the environment"),
            ({k: v for k, v in environment.items() if k != "PYTHONPATH"}, "PYTHONPATH of the environment"),
        ):
            with pytest.raises(ForerunnerLost, match=f"^{what} is not what it was when the forerunner was started$"):
                ahead.start(["tiny_rank"], changed, b"", log.fileno())
        umask = os.umask(0o123)
        try:
            with pytest.raises(ForerunnerLost, match="^the Umask is not"):
                ahead.start(["tiny_rank"], environment, b"", log.fileno())
        finally:
            os.umask(umask)
        with pytest.raises(ForerunnerLost, match="has imported tiny_rank, not other_rank"):
            ahead.start(["other_rank"], environment, b"", log.fileno())
    assert (tmp_path / "log").read_text() == ""


def test_a_launcher_with_another_environment_gets_another_forerunner(
    launchers: Launchers, caplog: pytest.LogCaptureFixture
) -> None:
    first = launchers("warm")
    ahead = first._forerunner()
    second = launchers("warm", logs="second", OMP_NUM_THREADS="2")
    assert second._forerunner().is_ready() and second._forerunner() is not ahead and not exists(ahead.pid)
    second.start(spec(0, do="8"))
    assert polled(second, 1)[0].code == 8 and COLD not in caplog.text
    first.start(spec(0, do="9"))
    assert polled(first, 1)[0].code == 9
    assert "OMP_NUM_THREADS of the environment is not what it was" in caplog.text


def test_what_differs_between_two_children() -> None:
    earlier = Inherited({"A": "1", "B": "2"}, {"limits": "x"})

    def differs(environment: dict[str, str], limits: str = "x", **made: str) -> str:
        return difference(earlier, Inherited(environment, {"limits": limits}), made)

    assert differs({"A": "1", "B": "2"}) == ""
    assert differs({"A": "1", "B": "2"}, "y") == "the limits"
    assert differs({"A": "1"}) == differs({"A": "1", "B": "3"}) == "B of the environment"
    assert differs({"A": "1", "B": "2", "C": "3"}) == "C of the environment"
    assert differs({"A": "1", "B": "2", "PWD": "/", "RUST_LOG": "error"}) == ""
    assert differs({"A": "1", "B": "2"}, C="3") == differs({"A": "1", "B": "2", "C": "3"}, C="3") == ""
    assert differs({"A": "1", "B": "2", "C": "4"}, C="3") == "C of the environment"


def test_what_is_inherited_changes_with_the_process_and_with_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inherited(os.environ)
    assert difference(before, inherited(os.environ), {}) == ""
    monkeypatch.chdir(tmp_path)
    assert difference(before, inherited(os.environ), {}) == "the working directory"


def test_a_rank_whose_log_cannot_be_opened_waits_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is full for a while. Before any rank was started the error ends the launch. Killed, it counts as ended."""
    logs, quick = tmp_path / "logs", [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with_nothing = LocalLauncher(quick, tmp_path / "other")
    (tmp_path / "other").rmdir()
    with pytest.raises(FileNotFoundError):
        with_nothing.start(spec(0))
    launcher = LocalLauncher(quick, logs)
    try:
        launcher.start(spec(0))
        moved = logs.rename(tmp_path / "away")
        launcher.start(spec(1))
        for _ in range(3):
            launcher.poll()
        assert launcher.waiting(1) and not launcher.waiting(0)
        assert caplog.text.count("cannot be started yet") == 1
        moved.rename(logs)
        ended = []
        until(lambda: ended.extend(launcher.poll()) or len(ended) == 2, "the end of both")
        assert not launcher.waiting(1) and {e.code for e in ended} == {0}

        logs.rename(moved)
        launcher.start(spec(1, incarnation=1))
        launcher.kill(1)
        assert not launcher.waiting(1)
        (killed,) = launcher.poll()
        assert (killed.coordinate, killed.incarnation, killed.code) == (Coordinate(1), 1, -signal.SIGKILL)
        assert "was not started" in killed.reason and launcher.poll() == []
    finally:
        launcher.close()
