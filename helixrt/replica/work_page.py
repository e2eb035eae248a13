"""The position of the batch that a rank works on, in memory that it shares with the process that started it.

In: positions, as the rank's main thread says them. Out: the newest one, for the other process, also when the rank has ended at
once. A call takes a microsecond, where one of the run's store takes a hundred. Linux; elsewhere, and where the other process
has not made such memory, ranks say it in the run's store (`run_keys.working_key`).
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

_NAME = "helixrt-work"
_BYTES = 8  # a signed number: the position, or one of these
_NONE, _UNSAID = -1, -2
NOT_WORKING = "-"


class WorkPage:
    """Of one rank, in the process that starts it. `path` is for that rank, while this process lives and until `close`. Raises
    OSError where the system has no such memory."""

    def __init__(self) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(self._descriptor, _BYTES)
            self._memory = mmap.mmap(self._descriptor, _BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._value = memoryview(self._memory).cast("q")
        self._value[0] = _UNSAID
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def said(self) -> str | None:
        """The position, or NOT_WORKING; None: the rank has said nothing here."""
        value = self._value[0]
        return None if value == _UNSAID else NOT_WORKING if value == _NONE else str(value)

    def close(self) -> None:
        """Unmap and close this process's side; idempotent. The rank's side stays usable, and has no reader then."""
        if self._descriptor >= 0:
            self._value.release()
            self._memory.close()
            os.close(self._descriptor)
            self._descriptor = -1


class WorkWord:
    """The rank's side of the page at `path`. Raises OSError where that cannot be opened."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            if os.readlink(f"/proc/self/fd/{file.fileno()}") != f"/memfd:{_NAME} (deleted)":
                raise OSError(f"{path} is no page: the process that made it has closed it")
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._value = memoryview(self._memory).cast("q")

    def say(self, position: int | None) -> None:
        """None: it works on no batch."""
        self._value[0] = _NONE if position is None else position


def page_if_possible() -> WorkPage | None:
    with suppress(OSError):
        return WorkPage()
    return None


def word_if_possible(path: str) -> WorkWord | None:
    """None for "", and where the page cannot be opened."""
    if path:
        with suppress(OSError, ValueError):
            return WorkWord(path)
    return None
