"""The run's log in the run's store: commit records at consecutive indices, each put once.

In: a `RunStore` and records. Out: what stands at an index, which is what the first writer put there
(DESIGN, "The life of a step", 4). What the entries mean is `protocol.step.lineage.Log`.
"""

from __future__ import annotations

from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import RunStore


class RunLog:
    """The log under `prefix`: entry i is at `{prefix}log/{i}`. Safe from any thread; keeps no copy."""

    def __init__(self, store: RunStore, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix

    def append(self, index: int, record: CommitRecord) -> CommitRecord:
        """Propose `record` as entry `index`; returns the entry that now stands there, ours or another's.

        All entries before `index` must stand already. Raises Retryable when the store is out of
        reach; the record may then stand all the same, so ask again before proposing another.
        """
        text = record.to_json()
        stands = self._store.put_if_absent(self._key(index), text)
        return record if stands == text else CommitRecord.from_json(stands)

    def read_from(self, index: int) -> list[CommitRecord]:
        """The entries `index`, `index + 1`, … as far as they go now, in order."""
        entries: list[CommitRecord] = []
        while (text := self._store.get(self._key(index + len(entries)))) is not None:
            entries.append(CommitRecord.from_json(text))
        return entries

    def _key(self, index: int) -> str:
        return f"{self._prefix}log/{index}"
