"""A run with a keeper: its driver is killed, its ranks train on, and another driver attaches; nothing is begun again."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from helixrt import cli
from helixrt.commands import attach
from helixrt.errors import ConfigError, Fatal, Retryable
from helixrt.job import driver as drivers
from helixrt.job import keeper as keepers
from helixrt.job import keeper_start
from helixrt.job import kept_run as kept_runs
from helixrt.job.attaching import attached_driver, away_s
from helixrt.job.config import JobConfig, MeshConfig, OutputConfig
from helixrt.job.controller import Terminated
from helixrt.job.draining import DRAINED_WHY
from helixrt.job.keeper import FILE, LOCK_FILE, SECRET_FILE, Keeper, KeeperOrder, KeptRun, Progress
from helixrt.job.keeper_start import keeper_lives, kept_run, secret_of, start_again
from helixrt.job.kept_run import Absence, KeptServices, absence_of, living, standing_of
from helixrt.job.launch_orders import (
    ALIVE_KEY,
    BEAT_S,
    DONE_KEY,
    ENDING_KEY,
    UNATTENDED_KEY,
    Close,
    KeptLauncher,
    Unattended,
    exit_key,
    exit_text,
    order_key,
    order_text,
)
from helixrt.job.lineage_files import read_lineage
from helixrt.job.machine import boot_identity
from helixrt.job.policies import CONFIG_EXIT, LEFT_EXIT, Phase
from helixrt.job.rank_context import check_folder
from helixrt.job.ray_run import Reserved
from helixrt.job.run_lock import RunLock
from helixrt.job.services import rank_launcher
from helixrt.job.session_rank import run_rank
from helixrt.protocol.step.lineage import CommitRecord, Log, audit
from helixrt.protocol.store_journal import Identity, written_anew
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.run_keys import done_key, leave_key, running_key
from helixrt.replica.store import MemoryRunStore
from helixrt.replica.store_client import DurableRunStore
from helixrt.replica.variables import adopt
from helixrt.replica.versions import versions
from tests import programs
from tests.waiting import until

SCRIPT = Path(__file__).with_name("kept_script.py")
KEPT = KeptRun("h:1", "127.0.0.1:1", "", "process 7 on h", "run-1", 0, {"launcher": "local"}, "m", {}, 600.0, 10.0, "", 0)
DEADLINE_S = 200.0


class Console:
    """A driver, in a process of its own."""

    begun: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, folder: Path, name: str, *argv: str) -> None:
        self.output = folder / name
        with open(self.output, "w", encoding="utf-8") as log:
            self.process = programs.Popen([sys.executable, *argv], stdout=log, stderr=subprocess.STDOUT)
        self.begun.append(self.process)

    def said(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        def look() -> object:
            assert self.process.poll() is None, f"the driver ended before {what}: {self.said()}"
            return condition()

        until(look, what)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(autouse=True)
def _drivers_end() -> Iterator[None]:
    """In good order, so that their keepers and ranks end too."""
    yield
    for process in Console.begun:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    Console.begun.clear()


def records(folder: Path) -> list[CommitRecord]:
    entries = read_lineage(folder / "runs" / "latest" / "lineage")
    return Log(entries).chain() if entries else []


def step(folder: Path) -> int:
    return max((record.step for record in records(folder)), default=0)


def store_process(keeper: int) -> int:
    """The process that serves the store of this keeper's run."""
    found: list[int] = []

    def look() -> bool:
        try:
            children = Path(f"/proc/{keeper}/task").glob("*/children")
            pids = [int(pid) for file in children for pid in file.read_text().split()]
            found[:] = [pid for pid in pids if b"store_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:  # a thread or another child has just ended
            return False
        return bool(found)

    until(look, "the process of the store")
    return found[0]


def keeper_process(folder: Path) -> int:
    kept = kept_run(folder / "runs" / "latest")
    assert kept is not None
    return int(kept.where.split()[1])


def processes(folder: Path, replica: int) -> list[int]:
    return [int(file.name.split(".")[1]) for file in folder.glob(f"r{replica}.*")]


@pytest.mark.system
@pytest.mark.timeout(480)
def test_ranks_train_on_without_a_driver_and_two_others_attach_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, which starts a lost replica again; then by the script itself, as a scheduler would start it."""
    monkeypatch.setenv("AWAY_S", "400")  # a driver takes long to start on a busy machine
    first = Console(tmp_path, "first.txt", str(SCRIPT), str(tmp_path))
    first.until(lambda: step(tmp_path) >= 5, "a few steps")
    first.kill()
    alone, noticed_s = step(tmp_path), time.monotonic() + 4 * BEAT_S
    until(lambda: step(tmp_path) >= alone + 10 and time.monotonic() > noticed_s, "ten steps without a driver")

    second = Console(tmp_path, "second.txt", "-m", "helixrt.cli", "attach", str(tmp_path / "runs" / "latest"))
    second.until(lambda: "attached to run" in second.said(), "the second driver")
    told = re.search(r"([0-9.]+) s without a driver; the ranks went from step (\d+) to step (\d+), no step is lost; "
                     r"longest time without progress ([0-9.]+) s", second.said())  # fmt: skip
    assert told is not None, second.said()
    away, before, after, still = (float(number) for number in told.groups())
    assert before < after and after >= alone + 10 and 0 < still < away
    assert len(processes(tmp_path, 0)) == len(processes(tmp_path, 1)) == 1, "no rank was started again"
    (lost,) = processes(tmp_path, 1)
    os.kill(lost, signal.SIGKILL)
    second.until(lambda: any((1, 1) in record.contributors for record in records(tmp_path)), "the replica's return")
    second.kill()

    third = Console(tmp_path, "third.txt", str(SCRIPT), str(tmp_path), "latest")
    third.until(lambda: "attached to run" in third.said(), "the third driver")
    with pytest.raises(ConfigError, match=rf"is written by process {third.process.pid}"):
        attached_driver((tmp_path / "runs" / "latest").resolve())
    (tmp_path / "stop").touch()
    assert third.process.wait(DEADLINE_S) == 0, third.said()

    chain = records(tmp_path)
    found = audit(chain)
    assert found.clean and found.batches == sum(len(record.summed) for record in chain)
    assert f"ended at step {chain[-1].step} of {chain[-1].hash}" in third.said()
    report = json.loads((tmp_path / "runs" / "latest" / "report.json").read_text())
    assert 0 < report["updates_in_seconds"] < report["steps"], "those since the second driver was lost"
    assert len(processes(tmp_path, 0)) == 1 and len(processes(tmp_path, 1)) == 2
    until(lambda: not (tmp_path / "runs" / "latest" / FILE).exists(), "the end of the keeper")
    assert list((tmp_path / "runs").glob("*/*/run.json")) == [(tmp_path / "runs" / "latest").resolve() / "run.json"]


def goes_on(console: Console, folder: Path, steps: int, what: str) -> None:
    """So many steps more."""
    begin = step(folder)
    console.until(lambda: step(folder) >= begin + steps, what)


def ends_alike(console: Console, folder: Path) -> list[CommitRecord]:
    """Both replicas end, bitwise equal (the driver checks it), at the head of one lineage in which every batch is once."""
    (folder / "stop").touch()
    assert console.process.wait(DEADLINE_S) == 0, console.said()
    entries = read_lineage(folder / "runs" / "latest" / "lineage")
    log = Log(entries)
    found = audit(log.chain())
    assert found.clean and found.batches == sum(len(record.summed) for record in log.chain())
    assert f"ended at step {log.head.step} of {log.head.hash}" in console.said() or "attach" in str(console.process.args)
    return entries


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_ranks_train_on_when_the_store_and_its_driver_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of store and lighthouse twice, alone; then with the driver, and another attaches. No step is lost: no record
    of the log is superseded, and no rank is started again."""
    monkeypatch.setenv("AWAY_S", "400")  # a driver takes long to start on a busy machine
    first = Console(tmp_path, "first.txt", str(SCRIPT), str(tmp_path))
    first.until(lambda: step(tmp_path) >= 5, "a few steps")
    keeper = keeper_process(tmp_path)
    for _ in range(2):
        os.kill(store_process(keeper), signal.SIGKILL)
        goes_on(first, tmp_path, 10, "ten steps with another process of the store")
    os.kill(store_process(keeper), signal.SIGKILL)
    first.kill()
    alone = step(tmp_path)
    until(lambda: step(tmp_path) >= alone + 10, "ten steps without a driver")
    second = Console(tmp_path, "second.txt", "-m", "helixrt.cli", "attach", str(tmp_path / "runs" / "latest"))
    second.until(lambda: "attached to run" in second.said(), "the second driver")
    goes_on(second, tmp_path, 5, "five steps with the second driver")
    entries = ends_alike(second, tmp_path)
    assert not Log(entries).superseded()
    assert len(processes(tmp_path, 0)) == len(processes(tmp_path, 1)) == 1, "no rank was started again"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_goes_on_from_its_checkpoint_when_its_keeper_and_its_driver_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks end with their keeper; the driver, or the next one, starts a keeper with the store as it was, and they go on in
    the same life of the run."""
    monkeypatch.setenv("AWAY_S", "400")
    first = Console(tmp_path, "first.txt", str(SCRIPT), str(tmp_path))
    first.until(lambda: step(tmp_path) >= 25, "a checkpoint")
    before = kept_run(tmp_path / "runs" / "latest")
    os.kill(keeper_process(tmp_path), signal.SIGKILL)
    first.until(lambda: any((0, 1) in record.contributors for record in records(tmp_path)), "the replicas' return")
    goes_on(first, tmp_path, 25, "another checkpoint")
    os.kill(keeper_process(tmp_path), signal.SIGKILL)
    first.kill()
    second = Console(tmp_path, "second.txt", "-m", "helixrt.cli", "attach", str(tmp_path / "runs" / "latest"))
    second.until(lambda: any((0, 2) in record.contributors for record in records(tmp_path)), "their return again")
    after = kept_run(tmp_path / "runs" / "latest")
    assert before is not None and after is not None and after.number == 2
    assert (after.store, after.durable, after.lighthouse) == (before.store, before.durable, before.lighthouse)
    ends_alike(second, tmp_path)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_replicas_that_were_asked_to_leave_save_their_state_also_when_the_driver_is_killed_then(tmp_path: Path) -> None:
    """As by a launcher whose grace is over. The keeper ends with them, and does not wait for another driver."""
    driver = Console(tmp_path, "driver.txt", str(SCRIPT), str(tmp_path))
    driver.until(lambda: step(tmp_path) >= 3, "a few steps")
    keeper = keeper_process(tmp_path)
    driver.process.terminate()
    driver.until(lambda: "SIGTERM to the driver" in driver.said(), "the departure")
    driver.kill()
    until(lambda: not Path(f"/proc/{keeper}").exists(), "the end of the keeper")
    assert list(tmp_path.glob(f"runs/latest/checkpoints/step_{step(tmp_path):08d}_*/complete.json"))
    assert kept_run(tmp_path / "runs" / "latest") is None and living(tmp_path / "runs" / "latest") is None


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False], ids=["keeper", "no keeper"])
def test_a_launcher_of_the_users_is_called_by_who_owns_the_ranks(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is beside the script, where a keeper by itself would not find it."""
    noted = tmp_path / "noted"
    for name, value in (("LAUNCHER", "noting_launcher:noting"), ("NOTED", str(noted)), ("AWAY_S", "60" if kept else "0")):
        monkeypatch.setenv(name, value)
    driver = Console(tmp_path, "driver.txt", str(SCRIPT), str(tmp_path))
    driver.until(lambda: step(tmp_path) >= 3, "a few steps")
    run = (tmp_path / "runs" / "latest").resolve()
    found = living(run)
    owner = driver.process.pid if found is None else int(found.where.split()[1])
    assert (found is not None) is kept and int(noted.read_text()) == owner
    (tmp_path / "stop").touch()
    assert driver.process.wait(DEADLINE_S) == 0, driver.said()


# ---------------------------------------------------------------- the parts, without processes


class Ranks(Launcher):
    """Stand-ins that end when a test says so."""

    def __init__(self) -> None:
        self.started: list[RankSpec] = []
        self.killed: list[int] = []
        self.exits: list[RankExit] = []
        self.closed = False

    def start(self, spec: RankSpec) -> None:
        if spec not in self.started:
            self.started.append(spec)

    def poll(self) -> list[RankExit]:
        exits, self.exits = self.exits, []
        return exits

    def waiting(self, replica: int) -> bool:
        return not self.killed

    def kill(self, replica: int) -> None:
        self.killed.append(replica)

    def close(self) -> None:
        self.closed = True


def spec(replica: int, incarnation: int = 0, pp: int = 0) -> RankSpec:
    return RankSpec("run", Coordinate(replica, pp), incarnation, "s", "l", "out", "the secret", 0.0, {})


def order_of(folder: Path, away: float) -> KeeperOrder:
    config = replace(JobConfig(), mesh=MeshConfig(replicas=1))
    return KeeperOrder(config.to_plain(), str(folder), "run", 0, "none", {"cpus": 1.0, "gpus": 0.0}, "the secret", away, 1.0)


def kept(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, away: float) -> tuple[threading.Thread, RunStore]:
    """A keeper in a thread of this process."""
    monkeypatch.setattr(keepers.ServedApart, "launcher", lambda self: ranks)
    order = order_of(tmp_path, away)
    assert KeeperOrder.from_plain(asdict(order)) == order
    thread = threading.Thread(target=keepers.keep, args=(order,), daemon=True)
    thread.start()
    until(lambda: living(tmp_path), "the keeper")
    found = living(tmp_path)
    assert found is not None
    return thread, DurableRunStore(found.durable, "the secret")


def test_a_keeper_carries_out_orders_once_and_tells_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    thread, store = kept(tmp_path, ranks, monkeypatch, 60.0)
    launcher = KeptLauncher(store)
    for _ in range(2):
        launcher.start(spec(0))
    until(lambda: ranks.started, "the start")
    until(lambda: launcher.waiting(0), "news that it waits")
    assert ranks.started == [spec(0)], "with the secret, which the store does not have"
    assert "the secret" not in str(store.get("launch/order/0"))
    launcher.kill(0)
    until(lambda: ranks.killed and not launcher.waiting(0), "the kill")
    ranks.exits.append(RankExit(Coordinate(0), 0, -9, "killed"))
    seen: list[RankExit] = []
    until(lambda: seen.extend(launcher.poll()) or seen, "the exit")
    assert seen == [RankExit(Coordinate(0), 0, -9, "killed")] and launcher.poll() == []
    late = KeptLauncher(store, 2, 1)  # of a driver that attaches
    assert late.poll() == []
    late.start(spec(0, 1))
    until(lambda: len(ranks.started) == 2, "the second start")
    late.close()
    assert ranks.closed and thread.is_alive(), "the driver still reads"
    store.put_if_absent(DONE_KEY, "yes")
    thread.join(30)
    assert not thread.is_alive() and living(tmp_path) is None and not (tmp_path / FILE).exists()


def test_once_the_replicas_leave_none_is_started_and_the_keeper_ends_soon_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "_GONE_S", 0.0)
    ranks = Ranks()
    thread, store = kept(tmp_path, ranks, monkeypatch, 600.0)
    launcher, late = KeptLauncher(store), KeptLauncher(store, 1)
    launcher.start(spec(0))
    until(lambda: ranks.started, "the start")
    launcher.leaving()
    late.poll()
    launcher.poll()
    assert late.told_to_end and not launcher.told_to_end, "who has said so is not told"
    launcher.start(spec(1))
    until(lambda: store.get("launch/carried") == "2", "the second order")
    assert thread.is_alive() and ranks.started == [spec(0)], "a rank is still leaving"
    ranks.exits.append(RankExit(Coordinate(0), 0, LEFT_EXIT, "left"))
    thread.join(30)
    assert not thread.is_alive() and ranks.closed


def test_a_signal_to_the_keeper_has_the_replicas_leave_and_the_second_ends_it(tmp_path: Path) -> None:
    keeper, ranks = Keeper(order_of(tmp_path, 60.0)), Ranks()
    store = DurableRunStore(keeper._services.durable, "the secret")
    KeptLauncher(store).start(spec(0))
    assert keeper._round(ranks) and store.get(leave_key(0, 0)) is None
    keeper.signalled(signal.SIGINT, None)
    assert keeper._round(ranks) and store.get(leave_key(0, 0)) == "SIGINT to the keeper of the run"
    with pytest.raises(Terminated):
        keeper.signalled(signal.SIGINT, None)
    keeper._services.close()
    keeper._lock.close()


def test_the_store_has_the_settings_of_ranks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks are started, by however many drivers; each rank gets those that it was ordered with."""
    ranks = Ranks()
    monkeypatch.setattr(keepers.ServedApart, "launcher", lambda self: ranks)
    keeper = Keeper(order_of(tmp_path, 60.0))
    store = DurableRunStore(keeper._services.durable, "the secret")
    first, second = ({"arguments": {"text": letter * 5000}, "tuple": [1, 2]} for letter in "ab")
    lives = [(replica, life) for replica in range(3) for life in (0, 1)]
    ordered = [replace(spec(*life), config=config) for config in (first, second) for life in lives]
    for number, each in enumerate(ordered):
        each = replace(each, coordinate=Coordinate(each.coordinate.replica, number // 6))
        KeptLauncher(store, number, 0).start(each)
    until(lambda: keeper._round(ranks) and len(ranks.started) == 12, "the starts")
    assert [each.config for each in ranks.started] == [first] * 6 + [second] * 6
    texts = [str(store.get(order_key(number))) for number in range(12)]
    assert max(map(len, texts)) < 500 and len({json.loads(text)["config"] for text in texts}) == 2
    standing = standing_of(store, 3, 0.0)
    assert [each.incarnation for each in standing.state.replicas] == [1, 1, 1] and standing.orders == 12
    store.put_if_absent(order_key(12), order_text(Close()))
    until(lambda: not keeper._round(ranks), "its end")
    keeper._services.close()
    keeper._lock.close()


def test_a_run_that_is_ending_is_not_attached_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver ordered the end, and was killed before it had its report."""
    thread, store = kept(tmp_path, Ranks(), monkeypatch, 60.0)
    store.put_if_absent(order_key(0), order_text(Close()))
    assert living(tmp_path) is None, "its end was waited for"
    thread.join(30)
    assert not thread.is_alive() and not (tmp_path / FILE).exists()


def test_a_lost_keeper_on_ray_is_started_again_in_a_job_alone(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    kept = KeptRun("h:1", "h:2", "", "process 7 on h", "run-1", 0, {"launcher": "ray"}, "m", {}, 600.0, 10.0, "", 0)
    with pytest.raises(ConfigError, match="submit its program again with resume="):
        start_again(tmp_path, kept)


def test_variables_of_the_program_reach_the_keeper_and_the_ranks_on_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from helixrt.ray_cluster import detached, launcher

    travels = {
        "HELIXRT_LOG": "INFO",
        "HELIXRT_HUGE_PAGES": "1",
        "HELIXRT_NATIVE_STACKS": "1",
        "NCCL_DEBUG": "WARN",
        "GLOO_SOCKET_IFNAME": "eth7",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
    }
    for name, value in (travels | {"HELIXRT_SECRET": "0123456789abcdef", "HOME_MADE": "1"}).items():
        monkeypatch.setenv(name, value)
    got: list[dict[str, str]] = []

    def start(name: str, entry: str, argument: Any, log: Path, environment: dict[str, str]) -> None:
        got.append(environment)
        raise Fatal("seen")

    monkeypatch.setattr(detached, "start_detached", start)
    config = JobConfig(launcher="ray", threads=3)
    with pytest.raises(Fatal, match="seen"):
        keeper_start._start(KeeperOrder(config.to_plain(), str(tmp_path), "run-1", 0, "m", {}, "secret", 600.0, 10.0))
    monkeypatch.setattr(launcher, "RayLauncher", lambda logs, entry, environment, *rest: got.append(environment))
    rank_launcher(config, tmp_path, "m", Reserved())
    assert len(got) == 2 and got[0] == got[1] and not {"HELIXRT_SECRET", "HOME_MADE"} & set(got[0])
    assert travels.items() <= got[0].items() and got[0]["OMP_NUM_THREADS"] == "3"


def test_a_nodes_own_variables_of_the_network_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ens5")
    monkeypatch.setenv("HELIXRT_LOG", "DEBUG")
    monkeypatch.setenv("NCCL_DEBUG", "")  # both are restored afterwards
    monkeypatch.delenv("NCCL_DEBUG")
    adopt({"NCCL_SOCKET_IFNAME": "eth0", "HELIXRT_LOG": "INFO", "NCCL_DEBUG": "WARN"})
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["HELIXRT_LOG"], os.environ["NCCL_DEBUG"]) == ("ens5", "INFO", "WARN")


def test_a_rank_of_another_version_is_refused_on_a_node_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text('{"run": "run-1"}')
    spec = RankSpec("run-1", Coordinate(0, 0), 0, "h:1", "", str(tmp_path), "", 0.0, {"a setting": "of later"}, "ray")
    monkeypatch.setenv("HELIXRT_VERSIONS", json.dumps(versions()))
    check_folder(spec)
    monkeypatch.setenv("HELIXRT_VERSIONS", json.dumps(versions() | {"helixrt": "99.1"}))
    with pytest.raises(ConfigError, match="helixrt=.*: what starts the ranks has 99.1; install the same version"):
        check_folder(spec)
    assert run_rank(spec) == CONFIG_EXIT, "before its settings are read"


def test_a_keeper_that_cannot_be_reached_from_here_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SECRET_FILE).write_text("the secret")
    (tmp_path / FILE).write_text(json.dumps(asdict(KEPT)))
    monkeypatch.setattr(kept_runs, "ANSWER_S", 0.1)
    lock = RunLock(tmp_path, "run-1", 0, LOCK_FILE)  # as another process holds it
    with pytest.raises(
        ConfigError, match=r"keeper \(process 7 on h\) has not ended, and does not answer from here: .*; attach"
    ):
        attached_driver(tmp_path)
    lock.close()
    with pytest.raises(ConfigError, match="no ranks of this run live"):
        attached_driver(tmp_path)


def test_a_driver_that_loses_its_store_for_good_writes_the_report_and_says_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keeper has ended without a journal; the command is one line, its notes, and exit code 1."""

    class Gone(MemoryRunStore):
        def get(self, key: str) -> str | None:
            raise Retryable("the store of the run is away")

    class Lost(KeptServices):
        def __init__(self) -> None:
            self.address, self.durable, self.lighthouse = "127.0.0.1:1", "", ""
            self.store, self._orders, self._exits = MemoryRunStore(), 0, 0

        def leave(self) -> None: ...

    monkeypatch.setattr(drivers, "run_store", lambda *where: MemoryRunStore())
    run = drivers.new_run(replace(JobConfig(), mesh=MeshConfig(replicas=1, pp=1), output=OutputConfig(str(tmp_path))))
    (run.folder / FILE).write_text(json.dumps(asdict(KEPT)))
    config = JobConfig(mesh=MeshConfig(replicas=1, pp=1), output=OutputConfig(str(tmp_path)))
    driver = drivers.Driver(config, run, drivers.JobProgram("none"), "the secret", Lost())
    driver.store = driver.log._store = Gone()
    monkeypatch.setattr(drivers, "Controller", partial(drivers.Controller, store_patience_s=0.0))
    monkeypatch.setattr(attach, "_drive", lambda folder: driver.run())
    assert cli.main(["attach", str(run.folder)]) == 1
    said = capsys.readouterr().err
    lost = "helixrt: the run's store did not answer for 0 s: the store of the run is away at driver"
    assert said.endswith(f"{lost}\nits keeper has ended; helixrt.run(resume=...) goes on from its newest checkpoint\n")
    assert (run.folder / "report.html").is_file() and (tmp_path / "latest").resolve() == run.folder


def test_the_watch_says_that_a_keeper_cannot_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(keeper_start, "kept_run", lambda folder: looks.append(1) or KEPT)  # no lock, no journal
    watch = keeper_start.KeeperWatch(tmp_path, period_s=0.01)
    until(lambda: len(looks) > 20, "twenty looks")
    watch.close()
    said = capsys.readouterr().err
    assert said.count("the keeper of the run (process 7 on h) has ended, and cannot be started again here") == 1


def exits_of(launcher: KeptLauncher) -> list[RankExit]:
    """As soon as there are some."""
    seen: list[RankExit] = []
    until(lambda: seen.extend(launcher.poll()) or seen, "an exit")
    return seen


def test_a_keeper_starts_a_lost_store_again_with_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders, exits and the secret's file are where they were; an exit that the store missed is told once it is there."""
    ranks = Ranks()
    thread, store = kept(tmp_path, ranks, monkeypatch, 60.0)
    launcher = KeptLauncher(store)
    launcher.start(spec(0))
    until(lambda: ranks.started, "the start")
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o077 == 0 and secret_of(tmp_path) == "the secret"
    before = kept_run(tmp_path)
    for number in range(2):
        os.kill(store_process(os.getpid()), signal.SIGKILL)
        ranks.exits.append(RankExit(Coordinate(0), number, -9, "killed"))
        launcher.start(spec(0, number + 1))
        assert exits_of(launcher) == [RankExit(Coordinate(0), number, -9, "killed")]
    until(lambda: len(ranks.started) == 3, "the last start")
    assert kept_run(tmp_path) == before, "at the same addresses"
    assert ranks.started == [spec(0), spec(0, 1), spec(0, 2)]
    launcher.close()
    store.put_if_absent(DONE_KEY, "yes")
    thread.join(30)
    assert not thread.is_alive() and not list(tmp_path.glob("keeper.[js]*")) and not keeper_lives(tmp_path)


def test_a_keeper_takes_over_from_one_that_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was ordered and not begun is carried out; of ranks that had begun, or perhaps had, it says that they ended."""
    ranks = Ranks()
    monkeypatch.setattr(keepers.ServedApart, "launcher", lambda self: ranks)
    lost = Keeper(order_of(tmp_path, 60.0))
    store = DurableRunStore(lost._services.durable, "the secret")
    launcher = KeptLauncher(store)
    for replica in range(3):
        launcher.start(spec(replica))
    lost._untold.append(RankExit(Coordinate(1), 0, 70, "its disk is full"))
    until(lambda: lost._round(ranks) and len(ranks.started) == 3 and not lost._untold, "its orders")
    launcher.start(spec(1, 1))
    lost.publish()
    before = kept_run(tmp_path)
    assert before is not None and len(ranks.started) == 3
    lost._services.close()
    lost._lock.close()

    ranks.started.clear()
    addresses = {"store": before.store, "durable": before.durable, "lighthouse": before.lighthouse}
    keeper = Keeper(replace(order_of(tmp_path, 60.0), number=1, before=addresses))
    keeper.publish()
    after = kept_run(tmp_path)
    assert after is not None and (after.store, after.durable, after.number) == (before.store, before.durable, 1)
    told: list[RankExit] = []
    until(lambda: told.extend(launcher.poll()) or len(told) >= 3, "the exits")
    assert [(e.coordinate.replica, e.code) for e in told] == [(1, 70), (0, -9), (2, -9)]
    assert "keeper of the run was lost" in told[1].reason
    until(lambda: keeper._round(ranks) and ranks.started, "the order")
    assert ranks.started == [spec(1, 1)]
    store.put_if_absent(order_key(4), order_text(Close()))
    until(lambda: not keeper._round(ranks), "its end")  # the store of a busy machine may be slow
    keeper._services.close()
    keeper._lock.close()


def test_a_keeper_that_no_driver_comes_back_to_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's clock advances only after the keeper has looked."""
    ranks, now = Ranks(), [0.0]
    monkeypatch.setattr(keepers, "LINGER_S", 0.2)
    monkeypatch.setattr(keepers.ServedApart, "launcher", lambda self: ranks)
    keeper = Keeper(order_of(tmp_path, 1.0), lambda: now[0])
    keeper.publish()
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    store = DurableRunStore(keeper._services.durable, "the secret")
    for beat in range(8):  # longer than it would wait
        store.set(ALIVE_KEY, str(beat))
        until(lambda beat=beat: keeper._alive == str(beat), "its look")
        now[0] += 0.4
    assert not ranks.closed and thread.is_alive()
    now[0] += 2.0
    thread.join(60)
    assert ranks.closed and not thread.is_alive() and not (tmp_path / FILE).exists()


def test_the_state_of_a_run_is_read_from_its_store() -> None:
    """Replica 0 runs, 1 was lost and started again, 2 was just lost, 3 is done, 4 is drained."""
    store = MemoryRunStore()
    launcher = KeptLauncher(store)
    for replica in range(5):
        for pp in range(2):
            launcher.start(spec(replica, 0, pp))
        store.put_if_absent(running_key(replica, 0), "yes")
    exits = [RankExit(Coordinate(1), 0, -9, "gone"), RankExit(Coordinate(1, 1), 0, -9, "gone")]
    exits += [RankExit(Coordinate(2, 1), 0, 70, "its disk is full"), RankExit(Coordinate(4), 0, 77, "left")]
    for number, ended in enumerate(exits):
        store.put_if_absent(exit_key(number), exit_text(ended))
    for pp in range(2):
        launcher.start(spec(1, 1, pp))
    store.put_if_absent(done_key(3), "{}")
    store.put_if_absent(leave_key(4, 0), DRAINED_WHY)

    standing = standing_of(store, 5, 7.0)
    phases = [replica.phase for replica in standing.state.replicas]
    assert phases == [Phase.RUNNING, Phase.RESTARTING, Phase.LOST, Phase.FINISHED, Phase.LOST]
    assert [replica.incarnation for replica in standing.state.replicas] == [0, 1, 0, 0, 0]
    assert standing.state.replicas[2].why == "its disk is full" and standing.state.replicas[2].ended == {str(Coordinate(2, 1))}
    assert standing.state.replicas[4].drained and not standing.state.replicas[2].drained
    assert standing.state.has_run and (standing.orders, standing.exits) == (12, 4)
    assert (1, str(Coordinate(1))) in standing.alive and (0, str(Coordinate(1))) not in standing.alive
    assert (0, str(Coordinate(2))) in standing.alive and (0, str(Coordinate(2, 1))) not in standing.alive


def test_the_absence_of_a_driver_is_told_with_the_longest_time_without_a_record() -> None:
    progress, store = keepers.Progress(0.0), MemoryRunStore()
    for step, at_s in enumerate((10.0, 11.0), 1):
        progress.record(step, at_s)
    progress.driver_lives(11.5)  # for the last time
    for step, at_s in enumerate((12.0, 18.0, 19.0), 3):
        progress.record(step, at_s)
    assert progress.unattended(20.0) == Unattended(2, 6.0) and progress.unattended(29.0) == Unattended(2, 10.0)
    assert absence_of(store, 5, 121.0) == Absence(0.0, 5, 5, 0.0, noticed=False)
    store.set(ALIVE_KEY, "111.500")
    assert absence_of(store, 5, 112.0) == Absence(0.5, 5, 5, 0.5, noticed=False)
    store.set(UNATTENDED_KEY, progress.unattended(20.0).to_json())
    found = absence_of(store, 5, 120.0)
    assert found == Absence(8.5, 2, 5, 6.0)
    told = "8.5 s without a driver; the ranks went from step 2 to step 5, "
    assert found.told(True) == told + "no step is lost; longest time without progress 6.0 s"
    ended = "and have ended, so steps after the newest checkpoint may be done again; longest time"
    assert found.told(False).startswith(told + ended)
    short = replace(found, noticed=False).told(True)
    assert short == "8.5 s without a driver; the ranks are at step 5, no step is lost"


def test_runs_on_ray_have_a_keeper_by_default() -> None:
    assert away_s(JobConfig(launcher="local")) == 0 and away_s(JobConfig(launcher="ray")) > 0
    assert (
        away_s(JobConfig(launcher="ray", driver_away_s=0)) == 0 and away_s(JobConfig(launcher="local", driver_away_s=30)) == 30
    )


@pytest.mark.parametrize("ending", [False, True])
def test_a_lost_keeper_is_started_again_unless_it_was_ending_the_run(ending: bool, tmp_path: Path) -> None:
    values = {"launch/carried": "3"} | ({ENDING_KEY: "yes"} if ending else {})
    kept: Any = SimpleNamespace(run="run", life=2)
    (tmp_path / keeper_start.FOLDER).mkdir()
    journal = written_anew(Identity("run", 2, boot_identity()), values)
    (tmp_path / keeper_start.FOLDER / keeper_start.JOURNAL).write_bytes(journal)
    assert keeper_start.is_lost(tmp_path, kept) is not ending


def test_a_run_without_living_ranks_cannot_be_attached_to(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no ranks of this run live .*helixrt\.run\(resume=\.\.\.\) goes on"):
        attached_driver(tmp_path)


# ---------------------------------------------------------------- what counts as the absence of a driver


def test_a_driver_is_missing_while_it_is_looked_for_alone() -> None:
    """Not while this process was suspended, between two looks or in one, or the store was away."""
    progress, now = Progress(100.0), 100.0
    for _ in range(40):
        now += 1.0
        progress.begin_round(now)
    assert progress.alone_s == 40.0
    now += 3600.0
    progress.begin_round(now)
    assert 40.0 <= progress.alone_s <= 46.0, "suspended between two rounds: a few seconds of it count"
    before = progress.alone_s
    now += 1000.0  # within the round: its verdict is that of its begin
    assert progress.alone_s == before
    progress.lost_round(now)
    assert progress.alone_s == before, "the store has not answered"
    now += 0.05
    progress.begin_round(now)
    assert progress.alone_s == pytest.approx(before + 0.05), "and is not counted twice"
    for _ in range(30):  # rounds that always take long, on a store that is slow
        now += 6.0
        progress.begin_round(now)
    assert progress.alone_s >= before + 100.0, "a missing driver is noticed all the same"
    progress.driver_lives(now)
    assert progress.alone_s == 0.0


def test_a_sign_of_life_counts_also_where_the_store_is_lost_right_after_it() -> None:
    class Losing(MemoryRunStore):
        def delete(self, key: str) -> None:
            raise Retryable("lost")

    keeper = object.__new__(Keeper)
    keeper._store, keeper._alive, keeper._progress, keeper._clock = Losing(), "", Progress(0.0), lambda: 100.0
    keeper._progress._round_s, keeper._leaving_s = 100.0, None
    keeper._store.set(ALIVE_KEY, "100.0")
    with pytest.raises(Retryable):
        keeper._is_alone(30.0)
    assert keeper._progress.alone_s == 0.0 and not keeper._is_alone(30.0)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale file handle"), Fatal("did not start in 120 s")])
def test_the_watch_over_a_keeper_goes_on_after_an_error(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file server that answers late, a machine that was busy: later it starts the keeper again."""
    looks, started = iter([error, error]), threading.Event()
    lives = SimpleNamespace(where="process 1", number=0)
    again = SimpleNamespace(where="process 2", number=1)

    def kept(folder: Path) -> Any:
        for found in looks:
            raise found
        return again if started.is_set() else lives

    def start(folder: Path, lost: Any) -> Any:
        started.set()
        return again

    monkeypatch.setattr(keeper_start, "kept_run", kept)
    monkeypatch.setattr(keeper_start, "is_lost", lambda folder, found: found is lives)
    monkeypatch.setattr(keeper_start, "start_again", start)
    watch = keeper_start.KeeperWatch(tmp_path, period_s=0.01)
    assert started.wait(60)
    watch.close()
    said = capsys.readouterr().err
    assert said.count(str(error)) == 1 and "was lost; now it is process 2" in said
