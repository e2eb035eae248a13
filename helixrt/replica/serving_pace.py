"""Keeps what a rank does for others within limits of processor time and bytes, by having the serving threads sleep.

In: what serving has cost, as it is spent. Out: how long to sleep before more. The limit of processor time is fixed, or follows
what the machine has to spare (`protocol.serving`), which is sampled while state is served.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from helixrt.protocol.serving import Sample, ServeLimit, ServeRules

_BURST_S = 0.005  # of serving time that may run ahead of the pace


class IdleProcessors(ABC):
    """Where it is read how many of the processors that this process may use are idle, and whether training lacks any."""

    cores: float  # how many it may use

    @abstractmethod
    def since_last(self, now: float) -> tuple[float, float]:
        """Since the call before: the cores that were idle on average, and the fraction of the time in which the thread that
        trains waited for a processor. `now` is the caller's clock, in seconds."""


class ProcessorTimes(IdleProcessors):
    """From /proc/stat, the schedstat of the thread that makes it (which trains) and, where a control group (version 2)
    limits this process's processor time, what is left of it."""

    STAT, CGROUP = Path("/proc/stat"), Path("/sys/fs/cgroup")

    def __init__(self) -> None:
        """Raises OSError where a system does not tell."""
        mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self._names = {f"cpu{number}" for number in mine}
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._quota = self._read_quota()
        self.cores = min(float(len(self._names)), self._quota or float(len(self._names)))
        self._waits = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = (time.monotonic(), self._idle_s(), self._used_s(), self._waited_s())

    def since_last(self, now: float) -> tuple[float, float]:
        (then, idle_s, used_s, waited_s), self._last = self._last, (now, self._idle_s(), self._used_s(), self._waited_s())
        passed_s = max(now - then, 1e-6)
        idle, delayed = (self._last[1] - idle_s) / passed_s, (self._last[3] - waited_s) / passed_s
        if self._quota is not None:
            idle = min(idle, self._quota - (self._last[2] - used_s) / passed_s)
        return max(0.0, idle), delayed

    def _waited_s(self) -> float:
        """For a processor, by that thread; 0 on a kernel that does not tell."""
        try:
            return int(self._waits.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def _idle_s(self) -> float:
        ticks = 0
        for line in self.STAT.read_text().splitlines():
            fields = line.split()
            if fields and fields[0] in self._names:
                ticks += int(fields[4]) + int(fields[5])  # idle, and idle while a disk is waited for
        return ticks * self._tick_s

    def _read_quota(self) -> float | None:
        try:
            quota, period = (self.CGROUP / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        except (OSError, ValueError):
            return None

    def _used_s(self) -> float:
        if self._quota is None:
            return 0.0
        for line in (self.CGROUP / "cpu.stat").read_text().splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
        raise OSError("no usage_usec in cpu.stat")


def idle_processors() -> IdleProcessors | None:
    """None on a system that does not tell its idle time."""
    try:
        return ProcessorTimes()
    except OSError:
        return None


class Pace:
    """Keeps what several threads do for others below `cores` of processor time and `bytes_per_s`.

    `cores` 0: idle processor time, measured by `idle`; without `idle`, the share of `ServeRules`. `bytes_per_s` 0: no limit.
    """

    def __init__(
        self,
        cores: float = 0.0,
        bytes_per_s: float = 0.0,
        idle: IdleProcessors | None = None,
        rules: ServeRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores, self._bytes_per_s, self._idle, self._clock = cores, bytes_per_s, idle, clock
        self._spare = ServeLimit(idle.cores if idle is not None else float(os.cpu_count() or 1), rules)
        self._lock = threading.Lock()  # guards everything below
        self._free_at = self._sent_at = 0.0
        self._sampled_at: float | None = None
        self._spent_s = 0.0  # since the last sample

    @property
    def limit(self) -> float:
        """The cores that serving may use now."""
        return self._cores or self._spare.limit

    def spent(self, cpu_s: float) -> float:
        """Account for `cpu_s` of work that was done just now; returns how long to sleep before more."""
        with self._lock:
            now = self._clock()
            if not self._cores:
                self._sample(now, cpu_s)
            self._free_at = max(self._free_at, now - cpu_s) + cpu_s / self.limit
            ahead = self._free_at - now
        return ahead if ahead > _BURST_S else 0.0

    def sent(self, nbytes: int) -> float:
        """Account for bytes that were sent; returns how long to sleep before more."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            now = self._clock()
            self._sent_at = max(self._sent_at, now) + nbytes / self._bytes_per_s
            ahead = self._sent_at - now
        return ahead if ahead > _BURST_S else 0.0

    def _sample(self, now: float, cpu_s: float) -> None:
        """Count what is idle, once per interval; after a pause in serving from the beginning."""
        if self._idle is None:
            return
        interval_s = self._spare.rules.interval_s
        if self._sampled_at is None or now - self._sampled_at > 10 * interval_s:
            self._spare.forget()
            self._idle.since_last(now)
            self._sampled_at, self._spent_s = now, 0.0
        self._spent_s += cpu_s
        passed_s = now - self._sampled_at
        if passed_s >= interval_s:
            idle, delayed = self._idle.since_last(now)
            self._spare.add(Sample(idle, self._spent_s / passed_s, delayed))
            self._sampled_at, self._spent_s = now, 0.0
