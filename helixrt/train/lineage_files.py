"""The run's log on disk: one file per commit record, written so that a crash leaves none half done.

In: records with their index in the log. Out: `FOLDER/00000017.json`, from which `resume` rebuilds the
log. A record's file is written, fsynced and renamed into place on a background thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

from helixrt.errors import ConfigError, Retryable
from helixrt.protocol.step.lineage import CommitRecord


def write_durably(path: Path, text: str) -> None:
    """Put `text` into `path` so that after a crash the file is whole or not there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (names created or renamed in it) survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineageWriter:
    """Writes records in the background. `append` may be called from any thread, again for the same index too.

    Several replicas write the same folder. One with a `lag_s` leaves a record alone for so long, and
    then finds it written by another, unless that one is gone; `flush` does not wait for the lag.
    """

    def __init__(self, folder: Path, lag_s: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._queue: queue.Queue[tuple[int, CommitRecord] | None] = queue.Queue()
        self._idle = threading.Condition()
        self._pending = 0
        self._error: OSError | None = None
        self._closed = False
        self._lag_s = lag_s
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lineage-writer", daemon=True)
        self._thread.start()

    def append(self, index: int, record: CommitRecord) -> None:
        """Write entry `index` of the log, soon."""
        with self._idle:
            self._pending += 1
        self._queue.put((index, record))

    def flush(self, timeout_s: float = 60.0) -> None:
        """Return once everything appended so far is on disk. Raises what writing raised, Retryable when late."""
        deadline = time.monotonic() + timeout_s
        self._hurry.set()
        with self._idle:
            while self._pending:
                if not self._idle.wait(timeout=max(0.0, deadline - time.monotonic())) and self._pending:
                    raise Retryable(f"{self._pending} records of the lineage were not on disk after {timeout_s} s")
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Write what is left and end the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._hurry.set()
            self._queue.put(None)
            self._thread.join(timeout=60)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            index, record = item
            if self._lag_s and self._queue.empty():
                if self._hurry.wait(self._lag_s) and not self._closed:
                    self._hurry.clear()
            path = self._folder / f"{index:08d}.json"
            try:
                if not path.exists():
                    write_durably(path, record.to_json())
            except OSError as error:
                self._error = error
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()


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
