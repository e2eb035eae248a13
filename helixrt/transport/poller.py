"""Waiting for descriptors, for a deadline, or to be woken: what the threads that drive endpoints sleep on.

A communicator's thread and one caller may wait at once; both see the same descriptors. Each has a wake of
its own: an eventfd that stays readable until its owner takes it, so one that comes before the wait is
not lost.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

_EPOLL_UNIT_S = 1e-3  # it rounds the time up to multiples of this


class Poller:
    """One epoll with the two wakes. `close` only when no thread waits any more."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for descriptor in (self._wake, self._nudge):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._watched: dict[int, int] = {}
        self._lock = threading.Lock()
        self._left = 0

    def watch(self, descriptors: Mapping[int, int]) -> None:
        """Watch exactly these from now on, also in waits that have begun.

        A number may mean another file than last time, one that replaced a closed one: so all are set again.
        """
        with self._lock:
            for descriptor in [d for d in self._watched if d not in descriptors]:
                del self._watched[descriptor]
                try:
                    self._epoll.unregister(descriptor)
                except (OSError, ValueError):
                    pass  # closing it took it out
            for descriptor, mask in descriptors.items():
                try:
                    self._epoll.modify(descriptor, mask)
                except FileNotFoundError:
                    self._epoll.register(descriptor, mask)
                self._watched[descriptor] = mask

    def wait(self, timeout_s: float) -> None:
        """Until a descriptor is ready, a wake comes, or the time is over. Takes no wake."""
        if 0.0 < timeout_s < _EPOLL_UNIT_S:
            try:
                select.select([self._epoll], [], [], timeout_s)
                return
            except ValueError:  # a descriptor of 1024 or more
                pass
        self._epoll.poll(max(0.0, timeout_s))

    def sleep(self, timeout_s: float) -> None:
        """For the thread: until its wake comes or the time is over, whatever the other descriptors do."""
        one = select.poll()
        one.register(self._wake, select.POLLIN)
        one.poll(timeout_s * 1000)

    def wake(self) -> None:
        """Wake the thread."""
        os.eventfd_write(self._wake, 1)

    def nudge(self) -> None:
        """Wake the caller that waits."""
        os.eventfd_write(self._nudge, 1)

    def take_wake(self) -> None:
        _take(self._wake)

    def take_nudge(self) -> None:
        _take(self._nudge)

    def close(self) -> None:
        self._epoll.close()
        os.close(self._wake)
        os.close(self._nudge)

    def leave(self) -> None:
        """For the two that a forgotten communicator leaves behind, its thread and its finalizer: the second one closes."""
        with self._lock:
            self._left += 1
            last = self._left == 2
        if last:
            self.close()


def _take(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        pass
