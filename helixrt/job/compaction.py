"""Keeps a run's log bounded, in the run's store, in the driver's memory and on disk, however long the run lasts.

In: the driver's copy of the log, and which checkpoints are complete. Out: old entries are deleted, all of them behind the
oldest complete checkpoint that the chain has: nothing before that is ever gone back to. The store keeps what the step protocol
looks back at (`runlog.KEPT`), so a rank that starts reads about that and what came since the checkpoint; the driver keeps twice
that. The disk keeps `history_of` entries for the report (`lineage_files.with_history`); of those before, the audit and how many
were superseded are kept (`lineage.Behind`).
Without checkpoints nothing is deleted. Files of the log on disk are merged, so that a file holds many entries.
"""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from helixrt.errors import Retryable
from helixrt.job.background import QUICK_S, Background
from helixrt.job.checkpoint import checkpoints_of, folder_name, is_complete, record_part, step_folders
from helixrt.job.lineage_files import forget_before, merge_files
from helixrt.job.stored_path import Place, StoredPath
from helixrt.protocol.step.lineage import Behind, CommitRecord, Log
from helixrt.replica.runlog import KEPT, RunLog

_RECORDS = 200_000  # times replicas: entries of a history; a record has a line of some 25 bytes for each replica
_PATIENCE_S = 60.0  # with a storage, at the start
_CLOSE_S = 60.0  # for a file to be written at the end
_STEP = re.compile(r"step_(\d+)_")


def history_of(replicas: int) -> int:
    """How many entries the run's folder keeps at least: each has some bytes for every replica."""
    return max(2 * KEPT, _RECORDS // replicas)


def _complete(checkpoints: Place) -> list[str]:
    """The records of the complete ones, the oldest first (`record_part`)."""
    return [record_part(folder) for folder in reversed(step_folders(checkpoints)) if is_complete(folder)]


def _index(log: Log, complete: Sequence[str]) -> int:
    places = {entry.hash: index for index, entry in enumerate(log.entries, log.behind.begin)}
    by_step = {record.step: record for record in log.chain()} if log.entries else {}
    for name in complete:
        found = _STEP.match(name)
        record = by_step.get(int(found[1])) if found else None
        if record is not None and folder_name(record) == name:
            return places[record.hash]
    return 0


class Compaction:
    """Of the driver, from its construction to `close`. `kept`, `history`: how many entries stay, in the store and on disk; in
    memory twice `kept`, so that whole files of them are merged before they go."""

    def __init__(self, log: RunLog, folder: Path, replicas: int, kept: int = KEPT, history: int = 0) -> None:
        self._log, self._folder = log, folder
        self._kept, self._history = kept, history or history_of(replicas)
        self._questions = Background[list[str]]()  # to a storage; the driver must not wait for it
        self._files = Background[None]()  # of the log on disk, likewise
        self._stop = threading.Event()
        self._behind: deque[Behind] = deque()  # where the disk may begin: as the driver's copy did, the oldest first
        self._next = 0  # length of the log at which it is looked at again

    def restore(self, log: Log) -> None:
        """Put the log of earlier lives into the run's store, which is empty: as much of it as ranks need."""
        part = Log(log.entries, log.behind)
        part.drop(self._begin(part, self._kept, math.inf))
        self._log.restore(part)

    def look(self, log: Log, advance: int) -> None:
        """Delete what is not needed any more, if that is much. `log`: the driver's copy, which is dropped from; `advance`:
        batches that a step takes. What the disk or the store refuses is tried again later, and what is done to files is done in
        the background."""
        if len(log) < self._next:
            return
        self._next = len(log) + max(1, self._kept // 4)
        try:
            if len(log) - self._log.begin >= 2 * self._kept:
                begin = self._begin(log, self._kept)
                if begin > self._log.begin:
                    self._log.compact(Behind(begin, log.genesis))
            if len(log.entries) >= 3 * self._kept:
                log.drop(self._begin(log, 2 * self._kept), advance)
                if not self._behind or self._behind[-1] != log.behind:
                    self._behind.append(log.behind)
        except (OSError, Retryable):
            pass
        while len(self._behind) > 1 and self._behind[1].begin <= len(log) - self._history:
            self._behind.popleft()
        old = self._behind[0] if self._behind and self._behind[0].begin <= len(log) - self._history else Behind()
        # `log.drop` makes another list, so this one only grows
        self._files.ask(self._next, partial(self._tidy, old, log.behind.begin, log.entries), wait_s=0.0)

    def settle(self, wait_s: float = _CLOSE_S) -> bool:
        """Wait for what goes on in the background; whether it has ended."""
        return self._files.settled(wait_s)

    def close(self) -> None:
        """Do no more, before the lock of the run is given up; idempotent."""
        self._stop.set()
        self.settle()

    def _tidy(self, old: Behind, begin: int, entries: Sequence[CommitRecord]) -> None:
        folder = self._folder / "lineage"
        forget_before(folder, old)
        merge_files(folder, entries, begin, self._stop.is_set)

    def _begin(self, log: Log, kept: int, wait_s: float = QUICK_S) -> int:
        """Nothing is deleted while a storage does not say what it has; `wait_s`: for its answer."""
        place = checkpoints_of(self._folder)
        if isinstance(place, StoredPath):
            complete = self._questions.ask("complete", lambda: _complete(place), min(wait_s, _PATIENCE_S))
        else:
            complete = _complete(place)
        return log.may_begin(min(len(log) - kept, _index(log, complete or ())))
