"""Entries of the run's store about incarnations that may hold newer state, and this incarnation's own entries there.

In: the store. Out: `Evidence` for the rule of superseding (`protocol.step.supersede`), holder entries, the counter of
waiting, and the fence: an incarnation that has ended stops. DESIGN, "The life of a step", 4.

The store begins empty with each life of the run, so every entry is of the present life.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from helixrt.errors import StartAgain
from helixrt.protocol.step.lineage import CommitRecord, Incarnation, Log
from helixrt.protocol.step.supersede import Evidence, Waited, counted
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import accepted_key, ended_key, holder_key, waited_key


class Holders:
    """One incarnation's view of the store. Called from the leader's threads, one call at a time for each method.

    Every method raises Retryable when the store cannot be reached.
    """

    def __init__(self, store: RunStore, replica: int, incarnation: int) -> None:
        self._store, self._me = store, (replica, incarnation)
        self._entries: list[tuple[Incarnation, str]] = []  # the list of holder entries as far as it was read
        self._ended: set[Incarnation] = set()
        self._claimed: str | None = None  # lineage of this incarnation's newest entry
        self._counter: tuple[str, Waited | None, int] = ("", None, 0)  # head, newest entry read, index of the next

    def check_fence(self) -> None:
        """Raise StartAgain if this incarnation has ended by the store's word: its replica was started again."""
        if self._store.get(ended_key(*self._me)) is not None:
            replica, incarnation = self._me
            raise StartAgain(f"incarnation {incarnation} of replica {replica} was declared ended; it takes part no more")

    def end_predecessors(self) -> None:
        """Say that the earlier incarnations of this replica take part no more."""
        replica, incarnation = self._me
        for earlier in range(incarnation):
            self._store.put_if_absent(ended_key(replica, earlier), "yes")

    def claim(self, lineage: str, log: Log) -> None:
        """Write a holder entry before the state `lineage` is fetched or read. One on the chain is enough."""
        if self._claimed is not None and log.on_chain(self._claimed):
            return
        mine = json.dumps([*self._me, lineage])
        index = len(self._entries)
        while self._store.put_if_absent(holder_key(index), mine) != mine:
            index += 1
        self._claimed = lineage

    def evidence(self, log: Log, head: CommitRecord, missing: Iterable[Incarnation], generation: int) -> Evidence:
        """Count the wait of the quorum `generation`, and say who may hold `head` and who of them has ended.

        Read in this order until nothing is new: ended, then holders. An incarnation that fetched from one that has
        ended since wrote its entry before, and is among the holders then.
        """
        waited = self._count(head.hash, generation)
        while True:
            known = len(self._entries)
            suspects = set(missing) | self._on_chain(log)
            self._ended |= {i for i in suspects - self._ended if self._store.get(ended_key(*i)) is not None}
            self._read_entries()
            if len(self._entries) == known:
                break
        accepted = self._store.get(accepted_key(head.hash)) is not None
        holders = tuple(sorted(self._on_chain(log)))
        return Evidence(head.hash, holders, tuple(sorted(self._ended)), waited.seconds, accepted)

    def wait_over(self, head: CommitRecord, generation: int) -> None:
        """A quorum holds the head: its counter starts again at 0."""
        last, index = self._newest(head.hash)
        if last is not None and last.seconds > 0:
            self._store.put_if_absent(waited_key(head.hash, index), Waited(generation, 0.0).to_json())

    def _count(self, head: str, generation: int) -> Waited:
        last, index = self._newest(head)
        after = counted(last, generation)
        if after == last:
            return after
        return Waited.from_json(self._store.put_if_absent(waited_key(head, index), after.to_json()))

    def _newest(self, head: str) -> tuple[Waited | None, int]:
        """The newest entry of a head's counter, and the index of the next."""
        of, last, index = self._counter
        if of != head:
            if of:
                self._forget_counter(of, index)
            last, index = None, 0
        while (text := self._store.get(waited_key(head, index))) is not None:
            last, index = Waited.from_json(text), index + 1
        self._counter = (head, last, index)
        return last, index

    def _forget_counter(self, head: str, index: int) -> None:
        """No quorum of this log waits for a holder of that head any more. `index`: of the next entry, as far as is known."""
        while self._store.get(waited_key(head, index)) is not None:
            index += 1
        for each in range(index):
            self._store.delete(waited_key(head, each))

    def _read_entries(self) -> None:
        while (text := self._store.get(holder_key(len(self._entries)))) is not None:
            replica, incarnation, lineage = json.loads(text)
            self._entries.append(((replica, incarnation), lineage))

    def _on_chain(self, log: Log) -> set[Incarnation]:
        return {who for who, lineage in self._entries if log.may_be_on_chain(lineage)}
