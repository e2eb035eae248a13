"""The processes of a rank: it leads a process group of its own, in which the processes that it starts are as well."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_ENDED = ("Z", "X")  # states in proc(5)
_TRACKER = b"multiprocessing.resource_tracker"


def kill_group(group: int) -> None:
    """SIGKILL to all processes of a group, except Python's resource trackers where there is a /proc.

    A tracker ends when the last process that uses it has, and then unlinks the shared memory that they have left in /dev/shm.
    That of mosaicml-streaming must not stay: it names the `local` folders of the data, and a rank that is started again with
    the same folders would be refused by the library.
    """
    killed: set[int] = set()
    while trackers := _trackers_in(group):
        others = set(_processes_in(group)) - {*trackers, *killed}
        if not others:
            return
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= others  # the next look finds processes that these have forked since
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def reaped(group: int) -> bool:
    """Wait for the children of this process that have ended in a process group; whether none is left in it. Not for a group
    with a child that another part of the program waits for."""
    if not hasattr(os, "waitid"):  # nor is anything adopted there
        return True
    try:
        while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return True
    return False


def _trackers_in(group: int) -> list[int]:
    found = []
    for pid in _processes_in(group):
        with suppress(OSError):
            if _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _processes_in(group: int) -> list[int]:
    """The processes of a group that have not ended; none where there is no /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            state, _, of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(of) == group and state not in _ENDED:
                found.append(int(folder.name))
    return found
