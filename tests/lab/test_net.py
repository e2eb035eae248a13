"""Networks of namespaces: rates hold, cut rails stall and come back, and nothing is left, whatever ends a network."""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixrt import cli
from helixrt.errors import ConfigError
from helixrt.lab import machine, namespaces
from helixrt.lab.flow import measure
from helixrt.lab.namespaces import NetworkError, Owner
from helixrt.lab.net import Cut, Direction, Network
from helixrt.lab.shaping import Shape, changes, parse_rate
from tests.waiting import until

DEADLINE_S = 60.0
ECHO = """
import socket
with socket.create_server((ADDRESS, 7000)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            while data := connection.recv(100):
                connection.sendall(data)
"""
SAY = """
import socket, sys
with socket.create_connection((ADDRESS, 7000), timeout=100) as connection:
    print("connected", flush=True)
    for line in sys.stdin:
        connection.sendall(line.encode())
        print(connection.recv(100).decode(), end="", flush=True)
"""
ALL_REDUCE = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
ones = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(ones)
assert ones.eq(3.0).all(), ones
print("sum", ones[0].item())
dist.destroy_process_group()
"""


# ---- decisions: any machine --------------------------------------------------------------------


def test_rates_are_read_and_refused() -> None:
    assert [parse_rate(text) for text in ("500mbit", "1.5gbit", "64kbit", "none")] == [500.0, 1500.0, 0.064, None]
    for wrong in ("500", "mbit", "0mbit", "-1mbit", "1e3mbit", "5mbps", ""):
        with pytest.raises(ConfigError, match="^rate"):
            parse_rate(wrong)


@pytest.mark.parametrize("wrong", [{"delay_ms": -1.0}, {"queue_ms": 0.0}, {"burst_bytes": 100}, {"rate_mbit": float("nan")}])
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Shape(**wrong)


def test_shaping_changes_only_what_differs() -> None:
    free, slow, fast = Shape(), Shape(100.0), Shape(200.0)
    assert changes("d", free, free) == []
    (step,) = changes("d", slow, fast)
    assert " ".join(step) == "qdisc replace dev d root tbf rate 200000000bit burst 100000 limit 5100000"
    assert changes("d", fast, free) == [["qdisc", "del", "dev", "d", "root"]]
    delayed = Shape(delay_ms=2.0)
    first, second = changes("d", free, delayed.at(100.0))
    assert "netem" in first and "2.0ms" in first and second[3:8] == ["d", "parent", "1:1", "handle", "10:"]
    assert [step[1] for step in changes("d", delayed.at(100.0), delayed.at(50.0))] == ["replace"], "what is on its way stays"
    assert changes("d", delayed.at(50.0), delayed) == [["qdisc", "del", "dev", "d", "parent", "1:1", "handle", "10:"]]
    assert int(changes("d", free, Shape(400_000.0))[0][-1]) < 2**32, "the kernel counts a queue in 32 bits"


def test_a_name_says_who_owns_it() -> None:
    me = namespaces.this_process()
    assert me == Owner(os.getpid(), me.started) and me.alive
    assert namespaces.owner_of(namespaces.name_of(me, 3, "host12")) == me
    assert not Owner(me.pid, me.started + 1).alive, "another process that had the same id"
    for other in ("helix", "blue", "helix-1-2-3", "helix-a-2-3-host0", "x-helix-1-2-3-host0"):
        assert namespaces.owner_of(other) is None


def test_wrong_settings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--hosts", "0"], ["--rails", "999"], ["--rate", "5"], ["--delay-ms", "-1"], []):
        assert cli.main(["lab", "net", "run", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("helixrt: ") and error.count("\n") == 1 and len(error) < 200


def test_without_root_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.unavailable() == "not root: run as root to test with rated links"
    for arguments in (["up"], ["run", "--", "true"], ["measure"], ["clean"]):
        assert cli.main(["lab", "net", *arguments]) == 2
        assert capsys.readouterr().err == "helixrt: lab=net: not root: run as root to test with rated links\n"


def test_missing_commands_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux")):
        assert machine.unavailable() == f"no `{program}` command: apt-get install {package}"
        (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / program).chmod(0o755)
    assert machine.unavailable() is None


def test_what_the_kernel_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(machine, "kernel_refusal", lambda command: "Unknown device type." if "bridge" in command else None)
    assert machine.unavailable() == (
        "the kernel refuses bridges: Unknown device type.: use a kernel with veth, bridge and sch_tbf"
    )
    monkeypatch.setattr(machine, "kernel_refusal", lambda command: "Operation not permitted")
    assert machine.unavailable() == (
        "the kernel refuses network namespaces: Operation not permitted: start the container with --privileged"
    )


# ---- real networks -----------------------------------------------------------------------------


def links() -> list[str]:
    return sorted(link["ifname"] for link in json.loads(namespaces.call(["ip", "-j", "link"])))


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test this process owns no namespace, and the machine's own namespace has the devices it had."""
    mine = f"helix-{os.getpid()}-"
    before = links()
    yield
    assert not [name for name in namespaces.existing() if name.startswith(mine)]
    assert links() == before


def line_of(process: subprocess.Popen[str], timeout_s: float = DEADLINE_S) -> str:
    """The next line `process` prints; what there is of it when no more comes in time."""
    assert process.stdout is not None
    said, file = b"", process.stdout.fileno()  # past the stream's buffer, into which `select` does not look
    while not said.endswith(b"\n") and select.select([file], [], [], timeout_s)[0] and (more := os.read(file, 1)):
        said += more
    return said.decode()


def start(network: Network, host: int, program: str, address: str) -> subprocess.Popen[str]:
    program = program.replace("ADDRESS", repr(address))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return network.run(host, [sys.executable, "-c", program], text=True, **pipes)


def say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def carries(network: Network, source: int, target: int, least_mbit: float, most_mbit: float = math.inf) -> bool:
    """In one of several tries: programs that get no processor are slower, or send in bursts."""
    return any(least_mbit < measure(network, source, target, seconds=0.7) < most_mbit for _ in range(8))


@pytest.mark.netns
def test_a_rate_holds_each_way_and_changes_while_programs_run(nothing_left: None) -> None:
    with Network(hosts=2, rate_mbit=100.0) as network:
        for source, target in ((0, 1), (1, 0)):
            assert carries(network, source, target, 50.0, 102.0)
        network.set_rate(1, 0, 20.0, Direction.IN)
        assert network.rate(1, direction=Direction.IN) == 20.0 and network.rate(1) == 100.0
        assert carries(network, 0, 1, 0.0, 24.0)  # what the host may send at once counts in so short a time
        assert carries(network, 1, 0, 30.0), "the other way keeps its rate"
        network.set_rate(1, 0, None)
        network.set_rate(0, 0, None)
        assert carries(network, 0, 1, 120.0)
        with pytest.raises(ConfigError, match="rate_mbit"):
            network.set_rate(0, 0, 0.0)


@pytest.mark.netns
@pytest.mark.parametrize("at", list(Cut))
def test_a_cut_rail_stalls_and_comes_back_while_the_other_works(at: Cut, nothing_left: None) -> None:
    with Network(hosts=2, rails=2, rate_mbit=200.0) as network:
        talks = []
        for rail in range(2):
            assert line_of(start(network, 1, ECHO, network.address(1, rail))) == "listening\n"
            talks.append(start(network, 0, SAY, network.address(1, rail)))
            assert line_of(talks[rail]) == "connected\n"
            say(talks[rail], "one")
            assert line_of(talks[rail]) == "one\n"
        network.cut(0, 0, at)
        with pytest.raises(NetworkError, match="cut already"):
            network.cut(0, 0)
        say(talks[0], "two")
        say(talks[1], "two")
        assert line_of(talks[1]) == "two\n", "the other rail"
        assert line_of(talks[0], timeout_s=0.5) == "", "nothing passes a cut"
        new = start(network, 0, SAY.replace("timeout=100", "timeout=0.5"), network.address(1))
        _, error = new.communicate(timeout=DEADLINE_S)
        assert ("Network is unreachable" if at is Cut.DEVICE else "timed out") in error
        network.restore(0, 0)
        assert line_of(talks[0]) == "two\n", "TCP sends it again"
        assert network.rate(0, 0) == 200.0
        kept = namespaces.call(["tc", "-n", network.namespace(0), "qdisc", "show", "dev", "rail0"])
        assert "tbf" in kept and "200Mbit" in kept
        network.restore(0, 0)  # a whole rail stays as it is


@pytest.mark.netns
def test_two_gloo_ranks_sum_over_the_rail(
    nothing_left: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    job = tmp_path / "job.py"
    job.write_text(ALL_REDUCE)
    status = cli.main(["lab", "net", "run", "--rate", "500mbit", "--", sys.executable, "-P", str(job)])
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert sorted(printed.out.splitlines()) == ["host0 | sum 3.0", "host1 | sum 3.0"]


@pytest.mark.netns
def test_hosts_of_three_rails_reach_each_other_and_nothing_else(nothing_left: None) -> None:
    with Network(hosts=3, rails=3) as network:
        for host in range(3):
            heard = json.loads(namespaces.call(["ip", "-n", network.namespace(host), "-j", "address"]))
            addresses = {one["ifname"]: [a["local"] for a in one["addr_info"] if a["family"] == "inet"] for one in heard}
            assert addresses == {"lo": ["127.0.0.1"]} | {network.device(r): [network.address(host, r)] for r in range(3)}
            routes = json.loads(namespaces.call(["ip", "-n", network.namespace(host), "-j", "route"]))
            assert sorted(route["dst"] for route in routes) == ["10.77.0.0/24", "10.77.1.0/24", "10.77.2.0/24"]
        assert line_of(start(network, 2, ECHO, network.address(2, 1))) == "listening\n"
        assert line_of(start(network, 0, SAY, network.address(2, 1))) == "connected\n"
        for wrong in ((3, 0), (-1, 0), (0, 3)):
            with pytest.raises(ConfigError):
                network.address(*wrong)


@pytest.mark.netns
def test_run_gives_environment_cores_and_folder_and_the_commands_own_exit(
    nothing_left: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    core = min(os.sched_getaffinity(0))
    with Network(hosts=2) as network:
        shown = (
            "import os; print(os.getpid(), os.environ['HELIXRT_HOST'], os.environ['MINE'], os.getcwd(), "
            "os.sched_getaffinity(0))"
        )
        argv = [sys.executable, "-c", shown]
        process = network.run(1, argv, {"MINE": "m"}, tmp_path, {core}, stdout=subprocess.PIPE, text=True)
        assert process.communicate(timeout=DEADLINE_S)[0] == f"{process.pid} 1 m {tmp_path} {{{core}}}\n"
        with pytest.raises(ConfigError, match="cpus"):
            network.run(0, ["true"], cpus={10_000})
        with pytest.raises(ConfigError, match="no-such-program"):
            network.run(0, ["no-such-program"])
    before = os.sched_getaffinity(0)
    said = tmp_path / "said"
    waiting = f"until test -e {said}; do sleep 0.1; done"
    failing = f"test $HELIXRT_HOST = 0 || {{ {waiting}; exit 4; }}; echo out --delay -1 $1; echo err >&2; touch {said}"
    assert cli.main(["lab", "net", "run", "--pin", "--", "bash", "-c", failing, "--rate", "-1"]) == 4
    printed = capfd.readouterr()
    assert printed.out == "host0 | out --delay -1 -1\n"
    assert printed.err.splitlines() == ["host0 | err", "helixrt: host 1 ended with exit code 4"]
    assert cli.main(["lab", "net", "run", "--", "bash", "-c", "kill -9 $$"]) == 128 + 9
    assert os.sched_getaffinity(0) == before


@pytest.mark.netns
def test_an_error_in_the_block_ends_programs_that_will_not_and_removes_all(nothing_left: None) -> None:
    stubborn = "trap '' TERM; (trap '' TERM; sleep 1000) & echo ready; while :; do sleep 1000; done"
    with pytest.raises(RuntimeError, match="mine"), Network(hosts=2, rails=2, rate_mbit=10.0) as network:
        process = network.run(0, ["bash", "-c", stubborn], stdout=subprocess.PIPE, text=True)
        assert line_of(process) == "ready\n"
        names = [network.namespace(host) for host in range(2)]
        assert len(namespaces.processes(names)) >= 2
        raise RuntimeError("mine")
    assert process.returncode == -signal.SIGKILL
    assert namespaces.processes(names) == []
    with pytest.raises(NetworkError, match="with"):
        network.run(0, ["true"])
    with pytest.raises(NetworkError, match="once"), network:
        pass


@pytest.mark.netns
def test_a_network_that_cannot_be_finished_is_removed(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "address", lambda self, host, rail=0: "nowhere")
    with pytest.raises(NetworkError, match="^ip -n helix-.*nowhere/24 dev rail0: "), Network():
        pass


OWNER = """
import signal, time
from helixrt.lab.net import Network
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which has it ignored
with Network(hosts=2, rate_mbit=50.0) as network:
    one = network.run(1, ["sleep", "1000"])
    print(network.namespace(0), network.namespace(1), one.pid, flush=True)
    for _ in range(10_000):  # a signal that comes just before a sleep begins is handled after it
        time.sleep(0.1)
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], list[str], int]]:
    """Another process that has a network with a program in it: the process, its namespaces, the program's id."""
    process = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(OWNER)], stdout=subprocess.PIPE, text=True)
    try:
        *names, sleeper = line_of(process).split()
        until(lambda: namespaces.processes(names) == [int(sleeper)])
        yield process, names, int(sleeper)
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill an owner and remove what it leaves; tests beside this one need theirs. (Its programs may hold its output open: that
    is not waited for.)"""
    process.kill()
    process.wait(DEADLINE_S)
    assert process.stdout is not None
    process.stdout.close()
    namespaces.remove(of(process))


def of(process: subprocess.Popen[str]) -> list[str]:
    """Names of its namespaces that exist."""
    return [name for name in namespaces.existing() if f"-{process.pid}-" in name]


def is_gone(pid: int) -> bool:
    """No such process, or one that has ended and is not yet reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_owner_removes_all(number: signal.Signals, owner: tuple[subprocess.Popen[str], list[str], int]) -> None:
    process, names, sleeper = owner
    process.send_signal(number)
    process.wait(DEADLINE_S)
    assert process.returncode == (-number if number is signal.SIGINT else 128 + number)
    assert not set(names) & set(namespaces.existing()) and is_gone(sleeper)


MAKER = """
from helixrt.lab.net import Network
print("begun", flush=True)
while True:
    with Network(hosts=3, rails=2, rate_mbit=50.0) as network:
        network.run(1, ["sleep", "1000"])
"""


@pytest.mark.slow
@pytest.mark.netns
def test_whenever_a_signal_comes_and_comes_again_nothing_is_left(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-P", "-c", MAKER], stdout=subprocess.PIPE, text=True)
        try:
            assert line_of(process) == "begun\n"
            time.sleep(draw.random())
            process.send_signal(draw.choice((signal.SIGTERM, signal.SIGINT)))
            time.sleep(draw.random() * draw.choice((0.0, 0.003, 0.05)))
            process.send_signal(draw.choice((signal.SIGTERM, signal.SIGINT)))
            process.wait(DEADLINE_S)
            left = of(process)
        finally:
            end(process)
        assert not left


@pytest.mark.netns
def test_what_a_killed_owner_left_is_cleaned_and_nothing_of_the_living(
    owner: tuple[subprocess.Popen[str], list[str], int], nothing_left: None, capsys: pytest.CaptureFixture[str]
) -> None:
    process, names, sleeper = owner
    assert not set(names) & set(namespaces.leftovers()), "its owner lives"
    with Network(hosts=1) as mine:
        process.kill()
        process.wait(DEADLINE_S)
        assert set(names) <= set(namespaces.leftovers()) and not is_gone(sleeper)
        assert cli.main(["lab", "net", "clean"]) == 0
        printed = capsys.readouterr().out
        assert all(f"removed {name}\n" in printed for name in names) and mine.namespace(0) not in printed
        assert not set(names) & set(namespaces.existing()) and is_gone(sleeper)
        assert mine.namespace(0) in namespaces.existing()


@pytest.mark.netns
def test_up_tells_how_to_enter_and_keeps_until_ctrl_c() -> None:
    command = [sys.executable, "-P", "-m", "helixrt.cli", "lab", "net", "up", "--hosts", "2", "--rails", "2", "--rate", "1gbit"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        lines = [line_of(process) for _ in range(5)]
        assert lines[0] == "host 0: rail0 10.77.0.1, rail1 10.77.1.1\n" and lines[4] == "up until Ctrl-C\n"
        entered = subprocess.run([*lines[3].split(), "-c", "hostname -I || true"], capture_output=True, timeout=DEADLINE_S)
        assert entered.returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate()
    assert not of(process)


@pytest.mark.netns
def test_what_one_host_sends_to_another_is_lost_and_nothing_else(nothing_left: None) -> None:
    with Network(hosts=3) as network:
        for host in range(3):
            assert line_of(start(network, host, ECHO, network.address(host))) == "listening\n"
        talks = {(a, b): start(network, a, SAY, network.address(b)) for a, b in ((1, 0), (0, 1), (1, 2))}
        assert [line_of(talk) for talk in talks.values()] == ["connected\n"] * len(talks)
        network.block(1, 0)
        network.block(1, 0)
        for talk in talks.values():
            say(talk, "one")
        assert line_of(talks[1, 2]) == "one\n", "it still reaches others"
        assert [line_of(talks[way], timeout_s=0.5) for way in ((1, 0), (0, 1))] == [""] * 2, "neither data nor an answer"
        network.unblock(1, 0)
        assert [line_of(talks[way]) for way in ((1, 0), (0, 1))] == ["one\n"] * 2
        network.unblock(1, 0)  # there is nothing to undo
