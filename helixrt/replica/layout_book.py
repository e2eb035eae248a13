"""The layouts of states that are offered, in the run's store: who fetches a state checks the donor's answer against it.

In: the layout of each snapshot, by lineage and group rank, before it is offered. Out: the agreed hash. A layout changes with
the first step of an optimizer, so it belongs to a lineage. The scalars of a state travel as one shard whose size differs
from state to state; it is not part of the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from helixrt.errors import Fatal, Retryable
from helixrt.replica.contracts import RunStore, Shard
from helixrt.replica.manifest import SCALARS_LIMIT_BYTES, Manifest, check_size
from helixrt.replica.state_shards import SCALARS

KEPT = 1024  # layouts that this rank has written last; so many states are never offered at a time


class LayoutBook:
    """Of one rank. `limit_bytes` is the memory that a fetched state may take. Without a store nothing is compared."""

    def __init__(self, store: RunStore | None = None, group_rank: int = 0, limit_bytes: int = 1 << 62) -> None:
        self._store, self._group_rank, self._limit_bytes = store, group_rank, limit_bytes
        self._written: dict[str, None] = {}  # lineages, oldest first

    def write(self, lineage: str, layout: Sequence[Shard]) -> None:
        """This rank is about to offer the state of `lineage`. Raises Fatal if another replica has written another layout, and
        Retryable without the store."""
        if self._store is None:
            return
        mine = _hash(layout)
        if (first := self._store.put_if_absent(self._key(lineage), mine)) != mine:
            raise Fatal(
                f"the state of {lineage[:8]} has another layout here ({mine[:8]}) than on the replica that offered it first "
                f"({first[:8]}): models or optimizers differ between replicas"
            )
        self._written.pop(lineage, None)
        self._written[lineage] = None
        if len(self._written) > KEPT:
            oldest = next(iter(self._written))
            del self._written[oldest]
            with suppress(Retryable):  # then it stays in the store
                self._store.delete(self._key(oldest))

    def check(self, lineage: str, layout: Sequence[Shard]) -> None:
        """Before memory is allocated for a donor's offer. Raises Retryable for another layout than was
        written, or more bytes than are allowed."""
        check_size(layout, self._limit_bytes)
        check_size([shard for shard in layout if shard.name == SCALARS], SCALARS_LIMIT_BYTES)
        if self._store is None:
            return
        written = self._store.get(self._key(lineage))
        if written != _hash(layout):
            raise Retryable(f"a donor offers the state of {lineage[:8]} in a layout that the replicas have not agreed on")

    def _key(self, lineage: str) -> str:
        return f"layout/{lineage}/{self._group_rank}"


def _hash(layout: Sequence[Shard]) -> str:
    return Manifest.of(shard for shard in layout if shard.name != SCALARS).tensors_hash
