"""A stopped process is told from one that runs, and for how long it has been seen so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helixrt.transport.stopped_processes import StoppedProcesses, is_stopped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def test_a_process_is_stopped_goes_on_and_ends() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        peers = StoppedProcesses({1: child.pid, 2: 0})
        assert peers.for_s(1, 10.0) == 0 and peers.for_s(2, 10.0) == 0 and peers.for_s(3, 10.0) == 0
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert is_stopped(child.pid) and peers.for_s(1, 11.0) == 0 and peers.for_s(1, 12.5) == 1.5
        os.kill(child.pid, signal.SIGCONT)
        os.waitid(os.P_PID, child.pid, os.WCONTINUED)
        assert peers.for_s(1, 13.0) == 0
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert peers.for_s(1, 14.0) == 0 and peers.for_s(1, 15.0) == 1  # from the second stop on
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid) and peers.for_s(1, 16.0) == 0
