"""Monitor processes: what happens to a rank is told to the ranks that watch it, whatever that rank's own threads do."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import helixrt
from helixrt.transport.monitor import client, process, wire
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
for secret in sys.argv[3:]:
    monitor.know(bytes.fromhex(secret))
print(monitor.address().decode(), monitor._child.pid, flush=True)
for line in sys.stdin:
    print("holds", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # with the interpreter lock, until something is said
"""


class Rank:
    """A process with a monitor of its own."""

    def __init__(self, *secrets: bytes) -> None:
        """Who knows one of the `secrets`, or SECRET, which comes before them, may watch it."""
        root = str(Path(helixrt.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, root, SECRET.hex(), *(secret.hex() for secret in secrets)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
    assert rank.process.stdin is not None and rank.process.stdout is not None
    rank.process.stdin.write("hold\n")
    rank.process.stdin.flush()
    assert rank.process.stdout.readline() == "holds\n"
    settle(monitor, 8 * PERIOD_S)
    until(monitor, lambda: monitor.state(number) is State.RUNNING)  # FROZEN for a moment where its monitor got no processor


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


def test_the_secrets_of_many_groups_are_known(monitor: Monitor) -> None:
    """Each group may have its own."""
    rank = Rank(*(f"of group {number}".encode() for number in range(20)))
    try:
        watched(monitor, rank)
    finally:
        rank.end()


def test_a_monitor_that_starts_late_and_one_that_goes_away(monitor: Monitor) -> None:
    other = Monitor("127.0.0.1")  # its socket takes connections before its process runs
    number = monitor.watch(other.address(), SECRET, 50 * PERIOD_S)  # a monitor that gets no processor is not silent so long
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


def test_a_stopped_monitor_does_not_hold_its_rank_up(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """More orders than a socket takes: those of a large group are all obeyed, and none waits for long."""
    monkeypatch.setattr(client, "_TAKES_S", LIMIT_S)
    monitor.start()
    for number in range(2000):
        monitor.know(str(number).encode())
    monitor.look()
    assert not monitor.ended
    monitor.close()

    monkeypatch.setattr(client, "_TAKES_S", 0.5)
    stopped = client.lease("127.0.0.1")
    stopped.start()
    assert stopped._child is not None
    os.kill(stopped._child.pid, signal.SIGSTOP)

    def order() -> None:
        for _ in range(2000):
            stopped.forget(stopped.watch(stopped.address(), SECRET, PERIOD_S))

    ordering = threading.Thread(target=order, daemon=True)
    ordering.start()
    ordering.join(LIMIT_S)
    try:
        assert not ordering.is_alive()
        assert stopped.ended and stopped.descriptor == -1
        stopped.look()
    finally:
        os.kill(stopped._child.pid, signal.SIGCONT)
        client.give_back(stopped)


def test_reports_that_the_rank_did_not_take_at_once_follow() -> None:
    """The newest of each: a rank that was stopped learns how things are."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.create_server(("127.0.0.1", 0))
    pidfd = os.pidfd_open(os.getpid())
    theirs.setblocking(False)
    reporter = process.Monitor(os.getpid(), pidfd, theirs, listener)
    try:
        watched_ranks = range(3000)
        for state in (State.STOPPED, State.RUNNING):
            for number in watched_ranks:
                reporter._changed(number, state)
        states: dict[int, str] = {}
        while True:
            try:
                news = wire.unpack(ours.recv(wire.MESSAGE_BYTES, socket.MSG_DONTWAIT))
                states[news["number"]] = news["state"]
            except BlockingIOError:
                before = len(reporter._unsent)
                reporter._turn(time.monotonic())
                if not before:
                    break
        assert states == dict.fromkeys(watched_ranks, "running")
    finally:
        reporter._poll.close()
        for each in (ours, theirs, listener):
            each.close()
        os.close(pidfd)


def test_late_news_of_a_membership_that_rests_does_not_make_it_beat_again() -> None:
    """A second order to rest would end the monitor."""
    monitor = Monitor("127.0.0.1")
    monitor._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monitor._beating["0:0"] = False
    monitor.rest("0:0")
    assert wire.unpack(theirs.recv(wire.MESSAGE_BYTES)) == {"do": "rest", "name": "0:0"}
    theirs.send(wire.pack({"beating": True, "name": "0:0"}))
    monitor.look()
    monitor.rest("0:0")
    theirs.setblocking(False)
    with theirs, pytest.raises(BlockingIOError):
        theirs.recv(wire.MESSAGE_BYTES)
    monitor.close()


def test_it_starts_without_torch() -> None:
    code = "import sys; import helixrt.transport.monitor.process; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
