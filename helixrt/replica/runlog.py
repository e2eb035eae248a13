"""The run's log in the run's store: commit records at consecutive indices, each put once.

In: a `RunStore` and records. Out: what stands at an index, which is what the first writer put there
(DESIGN, "The life of a step", 4). What the entries mean is `protocol.step.lineage.Log`.

In a run that lasts the driver deletes old entries (`compact`), far behind the newest and behind a complete checkpoint. A
process that was stopped for so long that the log went on without it finds that out here and starts again. What it may have put
no process reads at a deleted index: every reader begins at the begin of the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from helixrt.errors import StartAgain
from helixrt.protocol.step.lineage import Behind, CommitRecord, Log
from helixrt.replica.contracts import RunStore

KEPT = 1000  # entries that are kept at least, checkpoints or not: more than rules of the step protocol look back
LOOK_S = 5.0  # how often a reader looks for where the log begins


class RunLog:
    """The log under `prefix`: entry i is at `{prefix}log/{i}`. Safe from any thread, but `begin`, which one thread reads."""

    def __init__(self, store: RunStore, prefix: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._prefix, self._clock = store, prefix, clock
        self._looked_s = -math.inf
        self.begin = 0
        """Of the log, as it was known last: entries before this index are deleted."""

    def append(self, index: int, record: CommitRecord) -> CommitRecord:
        """Propose `record` as entry `index`; returns the entry that now stands there, ours or another's.

        All entries before `index` must stand already. Raises Retryable when the store is out of
        reach; the record may then stand all the same, so ask again before proposing another.
        """
        text = record.to_json()
        stands = self._store.put_if_absent(self._key(index), text)
        return record if stands == text else CommitRecord.from_json(stands)

    def read_from(self, index: int) -> list[CommitRecord]:
        """The entries `index`, `index + 1`, … as far as they go now, in order.

        Raises StartAgain if the log has no entry `index` any more, Retryable without the store.
        """
        entries = self._entries(index)
        if self._clock() - self._looked_s >= LOOK_S:
            self._looked_s = self._clock()
            if self.behind().begin > index + len(entries):
                raise StartAgain(f"the run's log went on without this process: it begins with entry {self.begin}, not {index}")
        return entries

    def read(self) -> Log:
        """The whole log, as far as it was not deleted: what a process that starts reads. Raises Retryable without the store."""
        while True:
            behind = self.behind()
            entries = self._entries(behind.begin)
            if self.behind() == behind:
                return Log(entries, behind)

    def behind(self) -> Behind:
        """What was deleted."""
        text = self._store.get(self._base)
        found = Behind() if text is None else Behind.from_json(text)
        self.begin = found.begin
        return found

    def compact(self, behind: Behind) -> None:
        """Delete the entries before `behind.begin`. One process of a run calls it, with growing indices. Raises Retryable
        without the store: what was not deleted then stays."""
        first = self.behind().begin
        self._set_behind(behind)  # before anything is gone: readers look for it when they find nothing
        for index in range(first, behind.begin):
            self._store.delete(self._key(index))

    def restore(self, log: Log) -> None:
        """Put a log of earlier lives of the run into the store, which is empty."""
        if log.behind.begin:
            self._set_behind(log.behind)
        for index, entry in enumerate(log.entries, log.behind.begin):
            self.append(index, entry)

    def _set_behind(self, behind: Behind) -> None:
        self._store.set(self._base, replace(behind, audit=None).to_json())
        self.begin = behind.begin

    def _entries(self, index: int) -> list[CommitRecord]:
        entries: list[CommitRecord] = []
        while (text := self._store.get(self._key(index + len(entries)))) is not None:
            entries.append(CommitRecord.from_json(text))
        return entries

    @property
    def _base(self) -> str:
        return f"{self._prefix}log/begin"

    def _key(self, index: int) -> str:
        return f"{self._prefix}log/{index}"
