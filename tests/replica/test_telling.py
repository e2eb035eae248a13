"""Messages that cannot be printed are lost, and cost nothing else; a process that ends in native code says where."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helixrt.replica.native_stacks_private import VARIABLE
from helixrt.replica.rank_log import last_error, last_traceback
from helixrt.replica.telling import tell, tell_native_ends


def test_a_stream_that_takes_nothing_and_one_that_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    tell("lost", full)
    tell("lost, too", full)
    with pytest.raises(OSError):
        full.close()
    closed = io.StringIO()
    closed.close()
    tell("lost", closed)
    tell("said")
    assert capsys.readouterr().err == "said\n"


UNPRINTED = """
import atexit, logging, sys
from helixrt.job.logs import configure_logging
from helixrt.replica.telling import tell

configure_logging()
atexit.register(tell, "lost")
tell("lost")
logging.getLogger("helixrt.job").warning("lost, too")
print("said", flush=True)
sys.exit(7)
"""


def test_a_process_whose_messages_are_lost_ends_with_its_own_exit_code() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-c", UNPRINTED]
        ended = subprocess.run(argv, stdout=subprocess.PIPE, stderr=full, env=buffered, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (7, "said\n")


BROKEN = """
import ctypes, faulthandler, sys, threading
from helixrt.replica.telling import tell_native_ends

def waits():
    threading.Event().wait()

def breaks():
    ctypes.string_at(0)

try:
    raise ValueError("of earlier")
except ValueError:
    import traceback
    traceback.print_exc()
tell_native_ends()
assert faulthandler.is_enabled()
threading.Thread(target=waits, daemon=True).start()
breaks()
"""


def test_the_log_of_a_process_that_ends_in_native_code_tells_what_its_thread_ran(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "w") as stream:
        ended = subprocess.run([sys.executable, "-c", BROKEN], stdout=stream, stderr=stream, timeout=120)
    assert ended.returncode == -signal.SIGSEGV
    assert last_error(log) == "Fatal Python error: Segmentation fault"
    lines = last_traceback(log).splitlines()
    assert lines[0] == "Fatal Python error: Segmentation fault" and lines[1].startswith("Current thread ")
    assert lines[2].endswith("in string_at") and lines[3].endswith("in breaks") and len(lines) == 5
    said = ["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):", "  no frame of Python"]
    log.write_text("\n".join(["of before", *said]))
    assert last_traceback(log).splitlines() == said
    said[2:] = ["Current thread 0x1 (most recent call first):", *(f"  File x, line {n} in f" for n in range(100))]
    log.write_text("\n".join(said))
    assert last_traceback(log).splitlines() == [said[0], *said[2:43]], "the innermost calls"


NATIVE = """
import ctypes, os, signal, threading
from helixrt.replica.native_stacks_private import tell_native_stacks
from helixrt.replica.telling import tell_native_ends

tell_native_stacks()
tell_native_ends()
threading.Thread(target=threading.Event().wait, daemon=True).start()
try:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(10)
except KeyboardInterrupt:
    print("interrupted", flush=True)
ctypes.string_at(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch writes native stacks on Linux alone")
@pytest.mark.parametrize("asked", [True, False])
def test_who_asks_for_native_stacks_gets_that_of_the_thread_that_ended_the_process(asked: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, VARIABLE: "1" if asked else "0"}
    with open(log, "w") as stream:
        ended = subprocess.run([sys.executable, "-c", NATIVE], stdout=stream, stderr=stream, env=environment, timeout=120)
    assert ended.returncode == -signal.SIGSEGV, log.read_text()
    written = log.read_text()
    assert "interrupted" in written and "SIGINT" not in written, "Ctrl-C is no end in native code"
    assert written.count(", Thread ") == (2 if asked else 0), written
    assert last_error(log) == "Fatal Python error: Segmentation fault"
    found = last_traceback(log)
    assert "in string_at" in found
    assert ("SIGSEGV(11), PID: " in found, found.count(", Thread "), "ffi_call" in found) == (asked, int(asked), asked)


def test_of_native_stacks_the_one_of_the_signal_counts(tmp_path: Path) -> None:
    python = ["Fatal Python error: Aborted", "", "Current thread 0x1 (most recent call first):", "  File x, line 1 in f"]
    answer = " frame #0: c10::FatalSignalHandler::stacktraceSignalHandler(bool)"
    other = ["SIGABRT(6), PID: 7, Thread 8:", answer, "frame #1: wait"]
    handler = "frame #1: c10::FatalSignalHandler::fatalSignalHandler(int, siginfo_t*)"
    mine = ["SIGABRT(6), PID: 7, Thread 9:", answer, handler, *(f"frame #{n}: call" for n in range(2, 100))]
    log = tmp_path / "log"
    log.write_text("\n".join([*python, "", "Extension modules: a, b", *other, "", *mine, "", *other]))
    assert last_traceback(log).splitlines() == [python[0], *python[2:], *mine[:43]], "the innermost calls"
    log.write_text("\n".join([*python, "", *other, ""]))
    assert last_traceback(log).splitlines() == [python[0], *python[2:]]


def test_without_a_standard_error_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        tell_native_ends()
