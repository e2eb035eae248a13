"""Which replica evaluates what: the orders of a leader to its ranks.

In: the commands that bring this replica's state to a record, and the records. Out: `Evaluate` commands. A validation that is
not shared is run by one replica, the one that writes checkpoints, and by each after the last step. One that is shared is dealt
over the record's committers: all replicas that held the base of the step, which every replica reads from the record, so nobody
asks anybody. A replica that was behind has no part. What a lost replica has not evaluated is not evaluated again while steps
go on, since nobody holds that state any more when the loss is known: the figure says so (`shared_validation`). After the last
step everybody holds the state, and replicas that are done evaluate the parts of those that are not (`left`).
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
    """Of one replica's leader. `every`: steps, 0 for never; `batches`: for engines that find them themselves; `last_step`: of
    the run."""

    replica: int
    every: int
    shared: bool
    batches: int
    last_step: int

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
        if self.shared:
            return self._part(record, self.replica)
        return Evaluate(record.step, self.batches) if writer_of(record) == self.replica else None

    def at_the_end(self, record: CommitRecord) -> Evaluate | None:
        """Once this replica holds the last state."""
        return self._part(record, self.replica) if self.every and self.shared else Evaluate(record.step, self.batches)

    def left(self, record: CommitRecord, done: Collection[int]) -> list[Evaluate]:
        """Before this replica leaves, when no other will come: its share of the parts of replicas that are not `done`."""
        helpers = sorted(done)
        if not (self.every and self.shared):
            return []
        lost = [replica for replica in parts_of(record) if replica not in done]
        mine = lost[helpers.index(self.replica) :: len(helpers)]
        return [order for replica in mine if (order := self._part(record, replica)) is not None]

    def _part(self, record: CommitRecord, of: int) -> Evaluate | None:
        among = parts_of(record)
        return Evaluate(record.step, self.batches, record.hash, of, among) if of in among else None


def parts_of(record: CommitRecord) -> tuple[int, ...]:
    """The replicas that a shared validation of this record's state is dealt over, in the order of their parts."""
    return tuple(replica for replica, _ in record.committers)
