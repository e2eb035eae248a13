"""Which replica evaluates what: the orders of a leader to its ranks.

In: the commands that bring this replica's state to a record, and the records. Out: `Evaluate` commands. A validation that is
not shared has one part, which is that of the replica that writes checkpoints. One that is shared is dealt over the record's
committers: all replicas that held the base of the step, which every replica reads from the record, so nobody asks anybody. A
replica that was behind has no part. What a lost replica has not evaluated is not evaluated again while steps go on, since
nobody holds that state any more when the loss is known: the figure says so (`shared_validation`). After the last step everybody
holds the state, and replicas that are done evaluate the parts of those that are not (`left`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from helixrt.job.checkpoint import writer_of
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.replica.commands import Evaluate, RankCommand


@dataclass(frozen=True)
class EvaluationOrders:
    """Of one replica's leader. `every`: steps, 0 for never; `last_step`: of the run; `at_start`: also before the first step, if
    `shared` over so many `replicas`."""

    replica: int
    every: int
    shared: bool
    last_step: int
    at_start: bool = False
    replicas: int = 1

    def before(self, genesis: str) -> Evaluate | None:
        """Before the first step, of the initial state."""
        among = tuple(range(self.replicas if self.shared else 1))
        return self._part(0, genesis, among, self.replica) if self.every and self.at_start else None

    def behind(self, command: RankCommand, log: Log) -> Evaluate | None:
        """What to order behind a command that was sent: the last step is evaluated when all rest."""
        if not self.every:
            return None
        record: CommitRecord | None = None
        if isinstance(command, p.Apply | p.Replay):  # a committer replays if its own exchange broke
            record = command.record
        elif self.shared and isinstance(command, p.Load):
            record = log.get(command.lineage)
        if record is None or record.step % self.every or record.step >= self.last_step or record.last != "":
            return None
        return self._of(record, self.replica)

    def at_the_end(self, record: CommitRecord) -> Evaluate | None:
        """Once this replica holds the last state."""
        return self._of(record, self.replica) if self.every else None

    def left(self, record: CommitRecord, done: Collection[int]) -> list[Evaluate]:
        """Before this replica leaves, when no other will come: its share of the parts of replicas that are not `done`."""
        helpers = sorted(done)
        if not self.every:
            return []
        lost = [replica for replica in self._among(record) if replica not in done]
        mine = lost[helpers.index(self.replica) :: len(helpers)]
        return [order for replica in mine if (order := self._of(record, replica)) is not None]

    def _among(self, record: CommitRecord) -> tuple[int, ...]:
        return parts_of(record) if self.shared or not record.committers else (writer_of(record),)

    def _of(self, record: CommitRecord, replica: int) -> Evaluate | None:
        return self._part(record.step, record.hash, self._among(record), replica)

    def _part(self, step: int, lineage: str, among: tuple[int, ...], of: int) -> Evaluate | None:
        return Evaluate(step, lineage, of, among) if of in among else None


def parts_of(record: CommitRecord) -> tuple[int, ...]:
    """The replicas that a shared validation of this record's state is dealt over, in the order of their parts."""
    return tuple(replica for replica, _ in record.committers)
