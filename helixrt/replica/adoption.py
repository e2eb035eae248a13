"""A process becomes the parent of its descendants' orphans for a while, and can wait for them as for children of its own.

A process whose parent ends is given to the nearest ancestor that has asked for it (Linux, PR_SET_CHILD_SUBREAPER in prctl(2)).
So a process that another one has forked can be waited for here, and this process's id is its parent's.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_LOOK_S = 0.005
GO = b"go"  # what the adopted process waits for: until then everybody's orphans are adopted
_lock = threading.Lock()  # the setting is the process's


class CannotAdopt(Exception):
    """The kernel does not give orphans to a process that asks for them."""


@contextmanager
def adopting() -> Iterator[None]:
    """Descendants that lose their parent meanwhile become this process's children, all of them. Raises CannotAdopt."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(option: int, argument: object) -> None:
        if libc.prctl(option, argument, *[ctypes.c_ulong(0)] * 3) != 0:
            raise CannotAdopt(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")

    with _lock:
        before = ctypes.c_int()
        call(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        call(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
        try:
            yield
        finally:
            call(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


class AdoptedProcess:
    """A child of this process that it has not started: `pid`, `returncode`, `poll` and `wait` as of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return code
