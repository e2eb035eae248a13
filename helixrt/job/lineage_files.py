"""The run's log on disk: files of consecutive commit records, written so that a crash leaves none half done.

In: records with their index in the log. Out: `FOLDER/00000017.json` with the record of index 17 and those that were gathered
with it, one in a line; from these `resume` rebuilds the log. A file is written, fsynced and put in place on a background
thread. That takes a disk several milliseconds, so records of short steps share it: at most `GATHER_S` of them are in memory
alone. A caller that needs them on disk (a checkpoint that refers to them) calls `flush`.

The run's driver merges old files (`merge_files`): `FOLDER/00001024-00002048.json` has the records from index 1024 up to 2048,
without the last. Writers never write a file of such a name.
"""

from __future__ import annotations

import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from helixrt.errors import ConfigError, Retryable
from helixrt.job.storage_trouble import StorageTrouble
from helixrt.protocol.step.lineage import Behind, CommitRecord, Log

GATHER_S = 0.1  # how long a record waits for others to share its file
_MOST = 1024  # records in a file
_BEHIND = "begin.json"  # what lies behind the first entry, once old ones were deleted


def write_durably(path: Path, text: str, replace: bool = True) -> bool:
    """Put `text` into `path` so that after a crash the file is whole or not there. Without `replace` a file that is there
    stays, so that the first writer decides; False, and nothing done, if the file system has no links, which that needs."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(part, path)
        elif not _link(part, path):
            return False
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)
    return True


def _link(part: Path, path: Path) -> bool:
    """Give the file `part` the name `path` alone, or remove it if `path` is taken. False where the file system has no links."""
    linked = True
    try:
        os.link(part, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        linked = False
    part.unlink()
    return linked


def sync_folder(folder: Path) -> None:
    """Make a folder's entries (names created or renamed in it) survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineageWriter:
    """Writes records in the background, in order. `append` may be called from any thread, again for the same index too.

    Records are written `gather_s` after the first of them came. Several replicas write the same folder: one with a `lag_s`
    leaves a record alone for so long as well, and then finds it written by another, unless that one is gone. `flush` waits
    for neither.

    What cannot be written is tried again, with pauses of `PAUSES_S`, and records behind it wait for it. With
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
        gather_s: float = GATHER_S,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gather_s = gather_s
        self._folder, self._lag_s, self._trouble, self._again, self._capacity = folder, lag_s, trouble, again, capacity
        self._changed = threading.Condition()  # guards everything below
        self._pending: dict[int, tuple[float, CommitRecord]] = {}  # by index: since when, and what
        self._next = 0  # index of the first record that is not known to be on disk
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
            if index < self._next:
                return  # another replica has written it
            idle = not self._pending and self._left_out is None
            self._newest = max(self._newest, index)
            if self._again is None or (self._left_out is None and len(self._pending) < self._capacity):
                self._pending.setdefault(index, (time.monotonic(), record))
            elif self._left_out is None:
                self._left_out = index
            if idle:
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
                number = self._tries
                index, records = self._due()
                self._hurry = False
            try:
                if not records:
                    self._read_again()
                    continue
                end = self._write(index, records)
            except (OSError, Retryable) as error:
                failures += 1
                if self._trouble is not None:
                    self._trouble.failed(records[0].step if records else -1, error)
                with self._changed:
                    self._failed = (number, error)
                    self._changed.notify_all()
                if not self._pause(failures):
                    return
                continue
            failures = 0
            if self._trouble is not None:
                self._trouble.worked(records[0].step)
            with self._changed:
                self._next = max(self._next, end)
                for written in range(index, end):
                    self._pending.pop(written, None)
                self._changed.notify_all()

    def _await_record(self) -> bool:
        """Wait for something to write, and until others have been gathered with it; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._left_out is not None or self._close_by is not None)
            if not self._pending:
                return self._left_out is not None
            left_s = self._pending[min(self._pending)][0] + self._lag_s + self._gather_s - time.monotonic()
            self._changed.wait_for(lambda: self._hurry or self._close_by is not None, max(0.0, left_s))
            return True

    def _due(self) -> tuple[int, list[CommitRecord]]:
        """The lowest index that waits, and the records from there on whose lag is over; none if they must be read again."""
        first = min(self._pending, default=-1)
        hurry = self._hurry or self._close_by is not None
        since_s = time.monotonic() - self._lag_s
        records: list[CommitRecord] = []
        for index in count(first):
            since, record = self._pending.get(index, (0.0, None))
            if record is None or len(records) == _MOST or not (hurry or since <= since_s or not records):
                return first, records
            records.append(record)
        raise AssertionError("unreachable")

    def _write(self, index: int, records: Sequence[CommitRecord]) -> int:
        """Have the records from `index` on in a file of that name, these or what another replica has put there. Returns the
        index behind them."""
        if _merged(self._folder, index).exists():
            return index - index % _MOST + _MOST
        path = self._folder / f"{index:08d}.json"
        if _is_of_a_life_before(path, records[0]):
            write_durably(path, "\n".join(record.to_json() for record in records))
        if not path.exists():
            texts = [record.to_json() for record in records]
            if not write_durably(path, "\n".join(texts), replace=False):
                write_durably(path, texts[0])  # the same text, whichever replica's file is the last one
        try:
            return _end_of(path)
        except FileNotFoundError:
            return index + len(records)  # all that may be in this file is in merged ones

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
            read = {index: (-math.inf, entry) for index, entry in enumerate(entries, begin) if index >= self._next}
            self._pending.update(read)
            end = begin + len(entries)
            self._left_out = end if end <= self._newest else None
            self._changed.notify_all()


def _is_of_a_life_before(path: Path, record: CommitRecord) -> bool:
    """Whether a rank of a life of the run that has ended has put another record there, late: the run was resumed without it."""
    try:
        theirs = CommitRecord.from_json(path.read_text(encoding="utf-8").partition("\n")[0])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False  # who reads the lineage says what is wrong with it
    return theirs.hash != record.hash and theirs.life < record.life


def _files(folder: Path) -> list[Path]:
    """Those with records, in no order."""
    return list(folder.glob("[0-9]*.json"))


def _begin_of(path: Path) -> int:
    """The index of the first record."""
    return int(path.stem.partition("-")[0])


def _end_of(path: Path) -> int:
    """The index behind the last record."""
    end = path.stem.partition("-")[2]
    return int(end) if end else _begin_of(path) + path.read_text(encoding="utf-8").count("\n") + 1


def _merged(folder: Path, index: int) -> Path:
    """The merged file for entry `index`, whether it is there or not."""
    begin = index - index % _MOST
    return folder / f"{begin:08d}-{begin + _MOST:08d}.json"


def read_log(folder: Path) -> Log:
    """The log as far as `read_lineage` reads it. Raises ConfigError (resume) for a damaged file."""
    entries, behind = _read(folder)
    try:
        return Log(entries, behind)
    except ValueError as error:
        raise ConfigError("resume", "true", f"the lineage in {folder} is damaged: {error}") from error


def with_history(log: Log, folder: Path) -> Log:
    """The log and, in front of its entries, those of the disk that it has dropped; itself if the disk has not all of them."""
    try:
        entries, behind = _read(folder)
        dropped = log.behind.begin - behind.begin
        return Log([*entries[:dropped], *log.entries], behind) if 0 < dropped <= len(entries) else log
    except (ConfigError, ValueError, OSError):
        return log


def read_lineage(folder: Path) -> list[CommitRecord]:
    """The log's entries from the first on disk, up to the first that is missing. Files may overlap, since a writer may have
    begun at another record, and they may be merged during the call. Raises ConfigError (resume) for a damaged file."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[list[CommitRecord], Behind]:
    while True:
        behind = _behind(folder)
        entries, first, merged = list[CommitRecord](), behind.begin, list[Path]()
        while True:
            for path in [*merged, *sorted(_files(folder), key=_begin_of)]:
                if (begin := _begin_of(path)) > first + len(entries):
                    break
                entries += _records(path)[first + len(entries) - begin :]
            merged = [_merged(folder, first + len(entries))]  # perhaps since the files were listed
            if not merged[0].exists():
                break
        if _behind(folder) == behind:
            return entries, behind


def _records(path: Path) -> list[CommitRecord]:
    """An empty list for a file that is not there any more: its records are in a merged file, or were deleted."""
    try:
        found = [CommitRecord.from_json(line) for line in path.read_text(encoding="utf-8").split("\n")]
        if not path.stem.isdigit() and len(found) != _end_of(path) - _begin_of(path):
            raise ValueError(f"it has {len(found)} records")
        return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("resume", "true", f"cannot read {path}: {error}") from error


def _behind(folder: Path) -> Behind:
    try:
        return Behind.from_json((folder / _BEHIND).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Behind()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("resume", "true", f"cannot read {folder / _BEHIND}: {error}") from error


def merge_files(folder: Path, entries: Sequence[CommitRecord], begin: int, stop: Callable[[], bool] = lambda: False) -> None:
    """Have one file for every `_MOST` entries of the log, and delete the files whose records are all in such files. `entries`:
    the log's from index `begin` on, as the run's store has them. For one process at a time, which has the lock of the run.

    What remains are the files of the last 2 * `_MOST` entries. After a crash at any moment, and after `stop`, at which it
    returns, every record is still in a file. A writer that is late may write a file again; the next call deletes it.
    Raises OSError."""
    files = _files(folder)
    merged = {_begin_of(path) for path in files if path == _merged(folder, _begin_of(path))}
    for first in range(begin + -begin % _MOST, begin + len(entries) - _MOST + 1, _MOST):
        if first not in merged and not stop():
            records = entries[first - begin : first - begin + _MOST]
            write_durably(_merged(folder, first), "\n".join(record.to_json() for record in records))
            merged.add(first)
    for path in files:  # one of a writer has at most `_MOST` records
        first = _begin_of(path) // _MOST * _MOST
        if path.stem.isdigit() and merged >= {first, first + _MOST} and not stop():
            path.unlink(missing_ok=True)


def forget_before(folder: Path, behind: Behind) -> None:
    """Have the log on disk begin with entry `behind.begin`: write down what lies behind it, then delete files that have nothing
    else. Raises OSError."""
    if not behind.begin:
        return
    if behind != _behind(folder):
        write_durably(folder / _BEHIND, behind.to_json())
    for path in _files(folder):
        if _begin_of(path) < behind.begin and _end_of(path) <= behind.begin:
            path.unlink(missing_ok=True)
    sync_folder(folder)


def drop_from(folder: Path, index: int) -> None:
    """Delete entries from `index` on, where `read_lineage` has ended: what it did not take (a gap came first) must not stand in
    the way of the entries that a resumed run gives these numbers. What a crash left half written is deleted, too."""
    for path in _files(folder):
        if _begin_of(path) >= index:
            path.unlink()
    for part in folder.glob(".*.json.*"):
        part.unlink(missing_ok=True)
    if folder.is_dir():
        sync_folder(folder)
