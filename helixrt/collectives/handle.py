"""What a caller holds of a collective that was submitted: whether it is done, how it ended, and a way to wait.

A handle is finished once, by whichever thread drives the communicator then; everything that
belongs to the operation (copies back into the caller's tensors) has happened before. Callbacks run in that
thread, after the waiters were woken; the communicator's links make no progress in that thread meanwhile, so a callback may
wait for other operations of the communicator, and for nothing else. What a callback raises is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from helixrt.errors import Cause, Retryable

_log = logging.getLogger("helixrt.collectives")


class End(Enum):
    """What ended a generation first, as seen from here."""

    ABORTED = "aborted"  # by a caller of this rank
    PEER = "peer"  # a peer was lost, or aborted
    DEADLINE = "deadline"  # an operation's deadline passed


class CollectiveError(Retryable):
    """A collective ended without a result. `skipped`: it had not begun, nothing of it was sent or written.

    `end` is None if there was no generation.
    """

    def __init__(self, cause: Cause, end: End | None = None, skipped: bool = False) -> None:
        super().__init__(cause)
        self.end, self.skipped = end, skipped


class Latch:
    """What one caller sleeps on, once. Any thread may open it, more than once and also before the sleep."""

    __slots__ = ("_closed",)

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def open(self) -> None:
        try:
            self._closed.release()
        except RuntimeError:
            pass  # it is open

    def wait(self, timeout_s: float) -> None:
        """Until it is open, or the time is over; `timeout_s` may be infinite."""
        self._closed.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))


class Driver(Protocol):
    """An object that can make progress on an operation while its caller waits for it."""

    def drive(self, handle: Handle, timeout_s: float | None) -> None:
        """Return when `handle.done`, or after `timeout_s` seconds."""


class Handle:
    """One submitted operation. `wait` may be called from any thread, any number of times."""

    __slots__ = ("_callbacks", "_driver", "_finish", "_join", "_sleepers", "done", "failure", "number")

    def __init__(
        self, driver: Driver | None, finish: Callable[[], None] | None = None, join: Callable[[], None] | None = None
    ) -> None:
        self._driver, self._finish, self._join = driver, finish, join
        self._sleepers: list[Latch] = []
        self.number = -1  # of the operation, where its driver counts them
        self._callbacks: list[Callable[[], None]] | None = []
        self.done = False
        self.failure: CollectiveError | None = None

    @property
    def error(self) -> CollectiveError | None:
        """Why it ended without a result; None while it runs and when it went well."""
        return self.failure if self.done else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False if it has not come within `timeout_s`. Raises what the operation failed with."""
        if not self.done and self._driver is not None:
            self._driver.drive(self, timeout_s)
        if not self.done:
            return False
        self.join()
        if self.failure is not None:
            raise CollectiveError(self.failure.cause, self.failure.end, self.failure.skipped)
        return True

    def join(self) -> None:
        """Have what this thread queues on a GPU from now on come after what the operation queued: it sees the result, or, if
        it failed, may use the tensors for something else. Does not block."""
        if self._join is not None:
            self._join()

    def sleep(self, latch: Latch, timeout_s: float) -> None:
        """Wait without bringing anything on: until the end, until another thread opens `latch`, or for `timeout_s`."""
        self._sleepers.append(latch)
        if not self.done:  # else the latches may have been opened before this one was added
            latch.wait(timeout_s)

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done: in the thread that finishes it, or now if it is done."""
        waiting = self._callbacks
        if waiting is not None:
            waiting.append(callback)
            if self._callbacks is not None:
                return
            try:  # it was finished in between: the thread that removes the callback calls it
                waiting.remove(callback)
            except ValueError:
                return
        callback()

    def complete(self, failure: CollectiveError | None) -> None:
        """For the communicator: the operation ended, and nothing touches its memory any more."""
        if failure is None and self._finish is not None:
            try:
                self._finish()
            except Exception as error:  # of this operation alone; the thread that drives must go on
                failure = CollectiveError(Cause(f"what follows the collective failed: {error!r}"), End.ABORTED)
        self._finish = None  # with the tensors it holds
        self.failure = failure
        self.done = True
        for latch in self._sleepers:
            latch.open()
        waiting, self._callbacks = self._callbacks, None
        while waiting:
            try:
                callback = waiting.pop(0)
            except IndexError:  # another thread, in `then`, has taken the last one back and calls it
                break
            try:
                callback()
            except Exception:  # of this callback alone: operations that ended with this one wait to be completed
                _log.exception("a callback of a collective failed")


def finished(failure: CollectiveError | None = None) -> Handle:
    """A handle of an operation that needs no waiting."""
    handle = Handle(None)
    handle.complete(failure)
    return handle
