"""Which checkpoints the leader of a replica orders besides those that are due at their step, and when the last one is safe.

In: the updates that this replica makes, the quorum after the last step, what the checkpointer of the leader's own rank
knows. Out: `Save` commands, and after the last step the word that the state is saved, or that it cannot be.

Three reasons for a checkpoint out of turn: a link lost a rail (`failover`); the newest one that was due is not complete
and nobody writes it (it failed, or its writer was lost); the run's last state is not saved yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from helixrt.errors import Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.background import Background
from helixrt.job.checkpoint_writer import Checkpointer, kept_key
from helixrt.job.failover import FailoverNews
from helixrt.job.stored_path import Place, StoredPath
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.commands import Save
from helixrt.replica.contracts import RunStore

_ASK_S = 5.0  # between two questions to a storage; the run's store says sooner that a checkpoint is complete
_LOOK_S = 0.05  # between two looks at the failovers, so that short steps do not all ask the run's store
LAST_PAUSES_S = (0.5, 10.0)  # between attempts at the last checkpoint: the first, doubled each time, and the longest


def unsaved_key(record: CommitRecord) -> str:
    """Put by the replica that gave up writing the run's last checkpoint: why."""
    return f"checkpoint/{record.hash}/unsaved"


def last_pause_s(failures: int) -> float:
    """How long after a failed attempt at the last checkpoint the next one begins."""
    first_s, longest_s = LAST_PAUSES_S
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 30))


class CheckpointOrders:
    """Of one replica's leader. `out_of_turn` is called while the leader handles an event, `last_is_safe` in its coordination
    thread once every update was made. `tell` sends a command to all ranks of the replica.

    `retry_s`: how long the last checkpoint is tried again, counted from its first failure.
    """

    def __init__(
        self,
        replica: int,
        folder: Place,
        every: int,
        retry_s: float,
        last_step: int,
        store: RunStore,
        checkpointer: Checkpointer,
        failovers: FailoverNews | None,
        tell: Callable[[Save], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica, self._folder, self._every, self._retry_s, self._last_step = replica, folder, every, retry_s, last_step
        self._store, self._checkpointer, self._failovers, self._tell = store, checkpointer, failovers, tell
        self._clock = clock
        self._looks_at = -math.inf  # when the failovers are looked at again
        self._asked_after = -1  # the failover that the last checkpoint out of turn was for
        self._saved_step = 0  # a checkpoint of this step or a later one is complete
        self._ordered = ("", 0)  # the last state, and the attempts that there will have been once our orders are carried out
        self._questions = Background[bool]()  # to a storage; the leader must not wait for it
        self._asks_at = -math.inf  # when a storage is asked for the last checkpoint again
        self._failing = ("", 0.0)  # the last state, and when the first failure of its checkpoint was seen

    def out_of_turn(self, record: CommitRecord) -> Save | None:
        """What to order behind the update to `record`."""
        writes = self._every > 0 and checkpoints.writer_of(record) == self._replica
        if not writes or checkpoints.is_due(record.step, self._every, self._last_step) or self._checkpointer.busy:
            return None
        if self._failover_is_due(record):
            return Save(record, after_failover=True)
        return Save(record) if self._owed(record.step) else None

    def _failover_is_due(self, record: CommitRecord) -> bool:
        """Once for each, as soon as the checkpoint before is written."""
        if self._failovers is None or (now := self._clock()) < self._looks_at:
            return False
        self._looks_at = now + _LOOK_S
        with suppress(Retryable):  # a later update asks again
            left_in = self._failovers.newest()
            if self._asked_after < left_in <= record.step and (saved := self._saved_since(left_in)) is not None:
                self._asked_after = left_in
                return not saved
        return False

    def _saved_since(self, step: int) -> bool | None:
        """None: the storage has not answered, and a later update asks again."""
        if self._checkpointer.newest_step >= step:
            return True
        if isinstance(self._folder, Path):
            return checkpoints.saved_since(self._folder, step)
        return self._questions.ask(step, lambda: checkpoints.saved_since(self._folder, step))

    def _owed(self, step: int) -> bool:
        """Whether the newest checkpoint that was due before `step` is missing, and it is time to make up for it."""
        due = step - step % self._every
        if due <= self._saved_step:
            return False
        outage = self._checkpointer.trouble.outage
        if outage is not None and outage.step >= due:
            return step >= outage.step + checkpoints.pause_steps(outage.failures, self._every)
        saved = self._saved_since(due)
        if saved is None:
            return False
        if saved:
            self._saved_step = due
            return False
        return outage is None or step >= outage.step + checkpoints.pause_steps(outage.failures, self._every)

    def _saved(self, record: CommitRecord) -> bool:
        """Not known to be, without an answer of the storage."""
        try:
            return checkpoints.complete_of(self._folder, record) is not None
        except OSError:
            return False

    def last_is_safe(self, record: CommitRecord, holders: Collection[int]) -> str | None:
        """Whether the run's last state, that of `record`, is saved: "" if it is, else the reason if it cannot be, else
        None: ask again. `holders` are the replicas of the newest quorum that hold this state.

        One of the holders (`writer_of_last`) writes it, with attempts for `retry_s` if that fails. Raises Retryable
        without the store.
        """
        if not self._every or (isinstance(self._folder, Path) and self._saved(record)):
            return ""
        if self._store.get(kept_key(record)) is not None:
            return ""
        if isinstance(self._folder, StoredPath) and self._clock() >= self._asks_at:
            if self._saved(record):  # in an earlier life of the run
                return ""
            self._asks_at = self._clock() + _ASK_S
        if (why := self._store.get(unsaved_key(record))) is not None:
            return why
        if not holders or checkpoints.writer_of_last(record, holders) != self._replica:
            return None
        begun = self._checkpointer.attempts(record)
        if self._checkpointer.busy or (self._ordered[0] == record.hash and begun < self._ordered[1]):
            return None
        outage = self._checkpointer.trouble.outage
        if outage is not None and outage.step == record.step and begun:
            now = self._clock()
            if self._failing[0] != record.hash:
                self._failing = (record.hash, now)
            if now - self._failing[1] >= self._retry_s:
                why = f"all attempts failed, for {now - self._failing[1]:.0f} s: {outage.reason}"
                return self._store.put_if_absent(unsaved_key(record), why)
            if now - outage.newest_s < last_pause_s(outage.failures):
                return None
        self._ordered = (record.hash, begun + 1)
        self._tell(Save(record))
        return None
