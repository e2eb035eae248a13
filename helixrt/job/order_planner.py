"""Planning an order beside the training: a process that answers one question at a time.

In: a `Question`. Out: its `Answer`. The process is started for the first question and kept; it shares no interpreter with the
rank and has the lowest priority, so that no step waits for it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

from helixrt.schedule.adaptation.answering import put, take
from helixrt.schedule.adaptation.judge import Answer, Question

LIMIT_S = 60.0  # for one answer; planning that takes longer is given up
_END_S = 2.0


class OrderPlanner:
    """`ask` is called by one thread, `close` by any."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()  # guards everything below
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def ask(self, question: Question) -> Answer | str | None:
        """The answer, or why there is none: blocks for `limit_s` at most. None after `close`."""
        try:
            process = self._running()
        except OSError as error:  # no process or no memory for it now
            return f"the planner cannot be started: {error}"
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        limit = threading.Timer(self._limit_s, process.kill)
        limit.start()
        try:
            put(process.stdin, question)
            answer: Answer | str = take(process.stdout)
            return answer
        except (OSError, EOFError):
            self._end(process)
            return None if self._closed else f"the planner has ended, or has not answered within {self._limit_s:g} s"
        finally:
            limit.cancel()
            limit.join()

    def close(self) -> None:
        """End the process; an `ask` under way returns. Idempotent."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None:
            _kill(process)

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if not self._closed and self._process is None:
                command = [sys.executable, "-m", "helixrt.schedule.adaptation.answering"]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            return None if self._closed else self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """The next question has a new one."""
        with self._lock:
            self._process = None
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet has nobody to read it
                    pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # stuck in the kernel; nothing of the rank waits for it
        process.wait(_END_S)
