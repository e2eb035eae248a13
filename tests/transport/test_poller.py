"""Waits of the poller: they end when something comes, also those shorter than the unit in which epoll counts."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import threading
import time
from collections.abc import Iterator

import pytest

from helixrt.transport.poller import Poller

LIMIT_S = 30.0


@pytest.fixture
def poller() -> Poller:
    return Poller()


@pytest.mark.parametrize("timeout_s", [0.0, 2e-5, 5e-4, 2e-3])
def test_a_wait_without_events_ends(poller: Poller, timeout_s: float) -> None:
    poller.wait(timeout_s)
    poller.close()


def test_the_shortest_waits_are_shorter_than_the_unit_of_epoll(poller: Poller) -> None:
    def took_s() -> float:
        begun_s = time.perf_counter()
        poller.wait(1e-4)
        return time.perf_counter() - begun_s

    assert min(took_s() for _ in range(500)) < 9e-4
    poller.close()


def test_a_wake_that_came_before_ends_a_wait_and_stays(poller: Poller) -> None:
    poller.wake()
    thread = threading.Thread(target=lambda: [poller.wait(LIMIT_S) for _ in range(3)], daemon=True)
    thread.start()
    thread.join(LIMIT_S / 2)
    assert not thread.is_alive()
    poller.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_short_waits_do_not_need_a_low_descriptor(poller: Poller, many_files: None) -> None:
    high = fcntl.fcntl(poller._epoll, fcntl.F_DUPFD_CLOEXEC, 1024)
    low, poller._epoll = poller._epoll, select.epoll.fromfd(high)
    reader, writer = os.pipe()
    poller.watch({reader: select.EPOLLIN})
    poller.wait(5e-4)
    os.write(writer, b"1")
    poller.wait(5e-4)
    assert [fd for fd, _ in poller._epoll.poll(0)] == [reader]
    low.close()
    poller.close()
    for descriptor in (reader, writer):
        os.close(descriptor)
