"""Which processes of this host are stopped (SIGSTOP, a debugger), as the kernel reports it, and which have been for too long.

In: the peers' processes. Out: whether they count as dead (`protocol/liveness.Stopped`). The state of a process depends
neither on its interpreter lock nor on its user code. Linux.
"""

from __future__ import annotations

from pathlib import Path

from helixrt.protocol.liveness import Stopped

_STOPPED = ("T", "t")  # by a signal, by a tracer; see proc(5)


class StoppedProcesses:
    """`period_s`: of liveness. Ask for each process at least every `Stopped.look_s`."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._seen: dict[int, Stopped] = {}

    def stopped_s(self, process: int, now: float) -> float | None:
        """For how long the process has been found stopped, once it counts as dead; else None, also if it cannot be seen."""
        if not process:
            return None
        seen = self._seen.setdefault(process, Stopped(self._period_s))
        dead = seen.look(is_stopped(process), now)
        return seen.for_s if dead else None


def is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False
