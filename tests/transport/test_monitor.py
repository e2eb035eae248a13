"""Monitor processes: what happens to a rank is told to the ranks that watch it, whatever that rank's own threads do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import helixrt
from helixrt.transport.monitor import client
from helixrt.transport.monitor.client import Monitor
from helixrt.transport.monitor.wire import State
from tests.transport.worlds import LIMIT_S, SECRET

pytestmark = pytest.mark.skipif(client.unsupported() is not None, reason=str(client.unsupported()))

PERIOD_S = 0.2
_RANK = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from helixrt.transport.monitor.client import Monitor
monitor = Monitor("127.0.0.1")
monitor.know(bytes.fromhex(sys.argv[2]))
monitor.start()
print(monitor.address().decode(), monitor._child.pid, flush=True)
for line in sys.stdin:
    ctypes.PyDLL(None).usleep(int(float(line) * 1e6))
    print("held", flush=True)
"""


class Rank:
    """A process with a monitor of its own."""

    def __init__(self) -> None:
        root = str(Path(helixrt.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, root, SECRET.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        address, monitor = self.process.stdout.readline().rsplit(" ", 1)
        self.address, self.monitor = address.encode(), int(monitor)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.end()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    made = Monitor("127.0.0.1")
    yield made
    made.close()


def until(monitor: Monitor, done: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < limit, "it did not come to that"
        select.select([monitor.descriptor], [], [], 0.05)
        monitor.look()


def watched(monitor: Monitor, rank: Rank, secret: bytes = SECRET) -> int:
    """Stopped and continued once: so it is known that the connection stands."""
    number = monitor.watch(rank.address, secret, PERIOD_S)
    os.kill(rank.process.pid, signal.SIGSTOP)
    until(monitor, lambda: monitor.state(number) is State.STOPPED)
    os.kill(rank.process.pid, signal.SIGCONT)
    until(monitor, lambda: monitor.state(number) is State.RUNNING)
    return number


def settle(monitor: Monitor, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        select.select([monitor.descriptor], [], [], left)
        monitor.look()


def test_a_stopped_rank_goes_on_and_ends(monitor: Monitor, rank: Rank) -> None:
    number = watched(monitor, rank)
    rank.process.kill()
    until(monitor, lambda: monitor.state(number) is State.GONE)


def test_a_rank_that_holds_its_interpreter_lock_runs(monitor: Monitor, rank: Rank) -> None:
    number = watched(monitor, rank)
    assert rank.process.stdin is not None
    rank.process.stdin.write(f"{8 * PERIOD_S}\n")
    rank.process.stdin.flush()
    settle(monitor, 8 * PERIOD_S)
    assert monitor.state(number) is State.RUNNING


def test_a_rank_that_is_frozen_with_its_monitor_is_noticed_and_comes_back(monitor: Monitor, rank: Rank) -> None:
    """As a paused container: no process of it runs, and its kernel acknowledges."""
    number = watched(monitor, rank)
    os.kill(rank.monitor, signal.SIGSTOP)
    until(monitor, lambda: monitor.state(number) is State.FROZEN)
    os.kill(rank.monitor, signal.SIGCONT)
    until(monitor, lambda: monitor.state(number) is State.RUNNING)


def test_who_does_not_know_the_secret_learns_nothing(monitor: Monitor, rank: Rank) -> None:
    stranger = monitor.watch(rank.address, b"another secret", PERIOD_S)
    number = watched(monitor, rank)
    os.kill(rank.process.pid, signal.SIGSTOP)
    until(monitor, lambda: monitor.state(number) is State.STOPPED)
    assert monitor.state(stranger) is State.RUNNING


def test_a_monitor_that_starts_late_and_one_that_goes_away(monitor: Monitor) -> None:
    other = Monitor("127.0.0.1")  # its socket takes connections before its process runs
    number = monitor.watch(other.address(), SECRET, PERIOD_S)
    settle(monitor, 2 * PERIOD_S)
    other.know(SECRET)
    other.start()
    settle(monitor, 2 * PERIOD_S)
    other.close()
    settle(monitor, 2 * PERIOD_S)
    assert monitor.state(number) is State.RUNNING, "its rank lives"
    monitor.forget(number)


def test_nothing_of_a_monitor_outlives_its_rank(rank: Rank) -> None:
    process = os.pidfd_open(rank.monitor)
    rank.process.kill()
    poll = select.poll()
    poll.register(process, select.POLLIN)
    assert poll.poll(LIMIT_S * 1000)
    os.close(process)


def test_a_rank_has_one_monitor_however_many_ask_for_it() -> None:
    one, other = client.lease("127.0.0.1"), client.lease("127.0.0.1")
    assert one is other
    one.start()
    client.give_back(one)
    assert other.descriptor >= 0
    client.give_back(other)
    assert other.descriptor == -1
    again = client.lease("127.0.0.1")
    assert again is not one
    client.give_back(again)


def test_it_starts_without_torch() -> None:
    code = "import sys; import helixrt.transport.monitor.process; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
