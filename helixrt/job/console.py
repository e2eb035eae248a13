"""A standard stream that the driver never waits for.

A console may take no bytes for any length of time: a stalled ssh connection, Ctrl-S in a terminal, a pager that nobody scrolls.
The thread that prints also starts lost replicas again and tells the run's keeper that it lives, so a thread of its own does the
writing. In: text, from any thread. Out: the same text, in its order; what has no room while nothing can be written is dropped,
the oldest first, and a line says how many lines that were.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from contextlib import suppress
from typing import Any, TextIO

FLUSH_S = 5.0  # how long `close` waits for what is not written yet


class Console:
    """What cannot be written is lost, and raises nothing. A stream without a file descriptor (a notebook's, a `StringIO`)
    cannot stall and is written to at once. At most `capacity` texts wait. Libraries can use it as a file (tqdm)."""

    def __init__(self, stream: TextIO, capacity: int = 5000) -> None:
        self._stream, self._capacity = stream, capacity
        # Past the stream's buffer: at the interpreter's exit nothing may wait for the buffer's lock.
        self._direct = type(stream) is io.TextIOWrapper and "write" not in vars(stream)
        self._changed = threading.Condition()  # guards everything below
        self._waiting: deque[str] = deque()
        self._dropped = 0  # lines, not told yet
        self._busy = False  # the thread writes a text that is no longer among those that wait
        self._thread: threading.Thread | None = None  # while there may be something to write
        self._closed = self._stalled = False

    def write(self, text: str) -> int:
        """After `close` it is waited for the text, unless `close` could not write all."""
        if not _has_descriptor(self._stream):
            self._put(None, text)
            return len(text)
        if not text:
            return 0
        with self._changed:
            if len(self._waiting) >= self._capacity:
                self._dropped += self._waiting.popleft().count("\n")
            self._waiting.append(text)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="helixrt-console", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if self._closed and not self._stalled:
            self.close()
        return len(text)

    def flush(self, limit_s: float = 0.0) -> bool:
        """Wait until all is written, for so long at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._dropped or self._busy), limit_s)

    def close(self, limit_s: float | None = None) -> None:
        """Write what is left, for so long at most (FLUSH_S), and end the thread; idempotent. The stream stays open."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(FLUSH_S if limit_s is None else limit_s)
            self._stalled = thread.is_alive()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _run(self) -> None:
        descriptor = None
        if self._direct:
            with suppress(OSError, ValueError):
                descriptor = os.dup(self._stream.fileno())  # which stays this file, whatever becomes of the stream
        try:
            while (text := self._next()) is not None:
                self._put(descriptor, text)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _next(self) -> str | None:
        """None: there is nothing left, and this thread ends."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._dropped or self._closed)
            if not self._waiting and not self._dropped:
                self._thread = None
                return None
            self._busy = True
            if self._dropped:
                lines, self._dropped = self._dropped, 0
                return f"({lines} lines are left out here: the console took nothing)\n"
            return self._waiting.popleft()

    def _put(self, descriptor: int | None, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            encoding, errors = (getattr(self._stream, name, None) for name in ("encoding", "errors"))
            encoding = encoding or "utf-8"
            encoded = text.encode(encoding, "backslashreplace" if errors in (None, "strict") else errors)
            if descriptor is None:
                self._stream.write(encoded.decode(encoding))
                self._stream.flush()
                return
            self._stream.flush()  # what others have printed before
            data = memoryview(encoded)
            while data:
                try:
                    data = data[os.write(descriptor, data) :]
                except BlockingIOError:
                    select.select([], [descriptor], [])


def _has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
