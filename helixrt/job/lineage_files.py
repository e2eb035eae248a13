"""The run's log on disk: one file per commit record, written so that a crash leaves none half done.

In: records with their index in the log. Out: `FOLDER/00000017.json`, from which `resume` rebuilds the
log. A record's file is written, fsynced and renamed into place on a background thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from helixrt.errors import ConfigError, Retryable
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.protocol.step.lineage import CommitRecord


def write_durably(path: Path, text: str) -> None:
    """Put `text` into `path` so that after a crash the file is whole or not there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (names created or renamed in it) survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineageWriter:
    """Writes records in the background, in order. `append` may be called from any thread, again for the same index too.

    Several replicas write the same folder. One with a `lag_s` leaves a record alone for so long, and
    then finds it written by another, unless that one is gone; `flush` does not wait for the lag.

    A record that cannot be written is tried again, with pauses of `PAUSES_S`, and those behind it wait for it. With
    `again` at most `capacity` records wait in memory: `again(i)` gives the log's entries from i on (it may raise
    Retryable), and those that had no room are read there.
    """

    PAUSES_S = (0.1, 5.0)  # the first; each is twice the one before; the longest
    CLOSE_S = 10.0  # how long `close` goes on trying

    def __init__(
        self,
        folder: Path,
        lag_s: float = 0.0,
        trouble: StorageTrouble | None = None,
        again: Callable[[int], Sequence[CommitRecord]] | None = None,
        capacity: int = 4096,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._lag_s, self._trouble, self._again, self._capacity = folder, lag_s, trouble, again, capacity
        self._changed = threading.Condition()  # guards everything below
        self._pending: dict[int, CommitRecord] = {}
        self._newest = -1  # index of those that were appended
        self._left_out: int | None = None  # entries from this index on were appended and are not in `_pending`
        self._tries = 0  # begun
        self._failed: tuple[int, Exception] | None = None  # the newest try that failed
        self._hurry = False
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="lineage-writer", daemon=True)
        self._thread.start()

    def append(self, index: int, record: CommitRecord) -> None:
        """Write entry `index` of the log, soon."""
        with self._changed:
            self._newest = max(self._newest, index)
            if self._again is None or (self._left_out is None and len(self._pending) < self._capacity):
                self._pending[index] = record
            elif self._left_out is None:
                self._left_out = index
            self._changed.notify_all()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Return once everything appended so far is on disk; what failed before is tried at once.

        Raises what a try begun after the call raised, Retryable when late.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            target, before, self._hurry = self._newest, self._tries, True
            self._changed.notify_all()
            while self._first_missing() <= target:
                if self._failed is not None and self._failed[0] > before:
                    raise self._failed[1]
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise Retryable(f"{len(self._pending)} records of the lineage were not on disk after {timeout_s} s")

    def close(self) -> None:
        """Write what is left, for at most `CLOSE_S` if that fails, and end the thread; idempotent."""
        with self._changed:
            if self._close_by is None:
                self._close_by = time.monotonic() + self.CLOSE_S
            self._changed.notify_all()
        self._thread.join(timeout=60)

    def _first_missing(self) -> int:
        """The lowest index that was appended and is not on disk; beyond any index if there is none."""
        left_out = sys.maxsize if self._left_out is None else self._left_out
        return min(min(self._pending, default=sys.maxsize), left_out)

    # ---------------------------------------------------------------- the writer's thread

    def _run(self) -> None:
        failures = 0
        while self._await_record():
            with self._changed:
                self._tries += 1
                number, self._hurry = self._tries, False
                index = min(self._pending, default=-1)
                record = self._pending.get(index)
            try:
                if record is None:
                    self._read_again()
                    continue
                path = self._folder / f"{index:08d}.json"
                if not path.exists():
                    write_durably(path, record.to_json())
            except (OSError, Retryable) as error:
                failures += 1
                if self._trouble is not None:
                    self._trouble.failed(-1 if record is None else record.step, error)
                with self._changed:
                    self._failed = (number, error)
                    self._changed.notify_all()
                if not self._pause(failures):
                    return
                continue
            failures = 0
            if self._trouble is not None:
                self._trouble.worked(record.step)
            with self._changed:
                del self._pending[index]
                self._changed.notify_all()

    def _await_record(self) -> bool:
        """Wait for something to write, and for the lag if it is the newest; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._left_out is not None or self._close_by is not None)
            if not self._pending and self._left_out is None:
                return False
            if self._lag_s and len(self._pending) == 1:
                self._changed.wait_for(lambda: self._hurry or self._close_by is not None, self._lag_s)
            return True

    def _pause(self, failures: int) -> bool:
        """After a failure; False when the writer was closed and has tried for long enough."""
        first_s, longest_s = self.PAUSES_S
        with self._changed:
            pause_s = min(longest_s, first_s * 2.0 ** min(failures - 1, 30))
            if self._close_by is not None:
                pause_s = min(pause_s, first_s)
            closing = self._close_by is not None
            self._changed.wait_for(lambda: self._hurry or (self._close_by is not None and not closing), pause_s)
            return self._close_by is None or time.monotonic() < self._close_by

    def _read_again(self) -> None:
        """Take entries that had no room from the log."""
        assert self._again is not None and self._left_out is not None
        begin = self._left_out  # `append` does not change it while it is set
        entries = self._again(begin)[: self._capacity]
        with self._changed:
            self._pending.update(enumerate(entries, begin))
            end = begin + len(entries)
            self._left_out = end if end <= self._newest else None
            self._changed.notify_all()


def read_lineage(folder: Path) -> list[CommitRecord]:
    """The log's entries from 0 on, up to the first that is missing. Raises ConfigError (resume) for a damaged one."""
    entries: list[CommitRecord] = []
    while (path := folder / f"{len(entries):08d}.json").exists():
        try:
            entries.append(CommitRecord.from_json(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("resume", "true", f"cannot read {path}: {error}") from error
    return entries


def drop_from(folder: Path, index: int) -> None:
    """Delete entries from `index` on: what `read_lineage` did not take (a gap came first) must not stand in the
    way of the entries that a resumed run gives these numbers."""
    for path in folder.glob("[0-9]*.json"):
        if path.stem.isdigit() and int(path.stem) >= index:
            path.unlink()
    if folder.is_dir():
        sync_folder(folder)
