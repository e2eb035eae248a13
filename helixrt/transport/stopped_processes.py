"""Which processes of this host stand still (SIGSTOP, a debugger), by the kernel's word, and for how long they have.

In: the peers' processes. Out: seconds. A peer that has not connected yet gives no signs of life over shared memory, and the
kernel takes calls for it whether it runs or not. Linux.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_STOPPED = ("T", "t")  # by a signal, by a tracer; see proc(5)


@dataclass
class StoppedProcesses:
    of: dict[int, int] = field(default_factory=dict)  # peer -> process; 0: unknown
    _since_s: dict[int, float] = field(default_factory=dict)

    def for_s(self, peer: int, now: float) -> float:
        """Seconds since every look has found the peer's process stopped; 0 if it runs, or cannot be seen."""
        process = self.of.get(peer, 0)
        if not process or not is_stopped(process):
            self._since_s.pop(peer, None)
            return 0.0
        return now - self._since_s.setdefault(peer, now)


def is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False
