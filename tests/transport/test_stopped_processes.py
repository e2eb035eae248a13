"""A stopped process is told from one that runs, and counts as dead after a period in which every look found it stopped."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from helixrt.transport.stopped_processes import StoppedProcesses, is_stopped


def test_a_process_is_stopped_goes_on_and_ends() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        peers = StoppedProcesses(period_s=0.8)  # a look every 0.1 s

        def dead(begin_s: float, looks: int) -> list[float | None]:
            return [peers.stopped_s(child.pid, begin_s + 0.1 * look) for look in range(looks)]

        assert dead(10.0, 9) == [None] * 9 and peers.stopped_s(0, 10.0) is None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert is_stopped(child.pid) and dead(11.0, 8) == [None] * 8
        assert peers.stopped_s(child.pid, 11.81) == pytest.approx(0.81)
        os.kill(child.pid, signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert dead(13.0, 1) == [None]
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert dead(14.0, 8) == [None] * 8  # counted from the second stop on
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid) and peers.stopped_s(child.pid, 16.0) is None
