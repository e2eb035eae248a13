"""Planning an order beside the training: a process that answers one question at a time.

In: a `Question`. Out: its `Answer`, some time later. The process is started for the first question and kept; it shares no
interpreter with the rank, so that no step waits for it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress

from helixrt.schedule.adaptation.answering import put, take
from helixrt.schedule.adaptation.judge import Answer, Question

LIMIT_S = 60.0  # for one answer; planning that takes longer is given up
_END_S = 2.0


class OrderPlanner:
    """Owned and called by one thread at a time; `close` ends the process."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._asked_s = 0.0
        self._answer: Answer | str | None = None  # written by the thread, read when it has ended

    def ask(self, question: Question) -> None:
        """Begin to plan. The answer before must have been taken."""
        assert self._thread is None, "one question at a time"
        self._answer, self._asked_s = None, time.monotonic()
        self._thread = threading.Thread(target=self._ask, args=(question,), name="helixrt-order-planner", daemon=True)
        self._thread.start()

    def answer(self) -> Answer | str | None:
        """The answer to the last question, once; a text says why there is none; None: not yet, or no question."""
        if self._thread is None:
            return None
        if self._thread.is_alive():
            if time.monotonic() - self._asked_s <= self._limit_s:
                return None
            self._end()
        self._thread = None
        return self._answer or f"the planner has not answered within {self._limit_s:g} s, or has ended"

    def wait(self, timeout_s: float) -> None:
        """Until there is an answer to take, or for so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """End the process and the thread; idempotent."""
        self._end()

    def _ask(self, question: Question) -> None:
        try:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            put(process.stdin, question)
            self._answer = take(process.stdout)
        except (OSError, EOFError):
            self._answer = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "helixrt.schedule.adaptation.answering"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait(_END_S)
        if self._thread is not None:
            self._thread.join(_END_S)  # it reads the end of the pipe
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet has nobody to read it
                    pipe.close()
