"""The journal of a run's store in a file, written by the process that serves the store.

In: a folder, whose the journal is (`store_journal.Identity`), and changes. Out: the values at the start, and a file from which
the next process takes them. The file is in `FOLDER/journal`, read and written by its user alone.

Where the file system refuses (a full disk), the store must not lie to its clients and need not stop: the journal is emptied and
deleted, so that no later process takes a part for the whole (an empty one is refused, too), and written anew as soon as that
works. Until then the store has its values in memory alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from helixrt.protocol.store_journal import Change, Identity, Refused, is_due, line_of, replay, written_anew
from helixrt.replica.telling import tell

FILE = "journal"
AGAIN_S = 10.0  # between two tries to write what the file system refused


class StoreFile:
    """Of one process at a time, in one thread. `values`: what the store has; who changes it calls `append` before anybody is
    told. `begun`: the store has served before. Raises Refused for a journal that must not be taken, and for a missing one of a
    store that has begun; OSError for a folder that cannot be used."""

    def __init__(
        self, folder: Path, identity: Identity, clock: Callable[[], float] = time.monotonic, begun: bool = False
    ) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._identity, self._clock = folder / FILE, identity, clock
        self._descriptor = -1
        self._bytes = self._anew_bytes = 0
        self._tried_s = 0.0
        self.values: dict[str, str] = {}
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            if begun:
                raise Refused(f"{self._path} is missing: the store was in memory alone, or the file was deleted") from None
            self._write_anew()
            return
        try:
            self.values, whole = replay(data, identity)
        except Refused as why:
            raise Refused(f"{self._path} cannot be taken: {why}") from why
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._descriptor, whole)
        self._bytes = self._anew_bytes = whole

    def append(self, changes: Iterable[Change]) -> None:
        """`values` has these changes already. What is not written when this returns is not in the journal at all."""
        if self._descriptor < 0:
            if self._clock() - self._tried_s >= AGAIN_S:
                self._try_anew("the run's store is in its journal again")
            return
        data = b"".join(map(line_of, changes))
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(f"{self._path} takes no more")
        except OSError as error:
            self._lost(error)
            return
        self._bytes += len(data)
        if is_due(self._bytes, self._anew_bytes):
            self._try_anew()

    def _try_anew(self, said: str = "") -> None:
        try:
            self._write_anew()
        except OSError as error:
            self._lost(error)
            return
        if said:
            tell(said)

    def _write_anew(self) -> None:
        data, part = written_anew(self._identity, self.values), self._path.with_name(f".{FILE}")
        descriptor = os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.replace(part, self._path)
        except OSError:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self._bytes, self._anew_bytes = descriptor, len(data), len(data)

    def _lost(self, error: OSError) -> None:
        first = self._descriptor >= 0
        if first:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # perhaps the file cannot be deleted
        self.close()
        self._tried_s = self._clock()
        for path in (self._path, self._path.with_name(f".{FILE}")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        if first:
            lost = "the run's store is in memory alone, and does not outlive its process, until its journal can be written"
            tell(f"{lost}: {error}")

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
