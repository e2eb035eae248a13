"""A process that does not outlive the one that started it, even when that is killed.

`python -m helixrt.replica.orphan MODULE ARG…` runs MODULE as the main program in this manner,
from before anything heavy is imported. On Linux the kernel sends SIGKILL when the parent dies;
elsewhere a thread watches for it. The parent gives its process id in HELIXRT_PARENT_PID, which
closes the gap between its death and this process's first instruction.

The kernel's rule is about the parent's *thread*: start such processes from a thread that exists as
long as they should, normally the main one.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

PARENT_VARIABLE = "HELIXRT_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int | None = None) -> None:
    """From now on this process dies by SIGKILL when its parent does. Idempotent.

    `parent_pid`: the process that must still be the parent; default: HELIXRT_PARENT_PID, else the present parent.
    """
    named = int(os.environ.pop(PARENT_VARIABLE, 0))  # not for this process's own children
    expected = parent_pid or named or os.getppid()
    if _kernel_watches() and os.getppid() == expected:
        return
    if os.getppid() != expected:
        _die()  # the parent ended before the kernel got the request
    if not any(t.name == "helixrt-parent-watch" for t in threading.enumerate()):
        threading.Thread(target=_watch, args=(expected,), name="helixrt-parent-watch", daemon=True).start()


def _kernel_watches() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.2)
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def command(module: str, *arguments: str) -> list[str]:
    """Of a process that runs `module` as described above."""
    return [sys.executable, "-m", "helixrt.replica.orphan", module, *arguments]


def run_as_main(arguments: list[str]) -> None:
    """Run a module, the first argument, as `python -m` does; the others are its arguments."""
    module, sys.argv = arguments[0], arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main(arguments: list[str]) -> None:
    die_with_parent()
    run_as_main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
