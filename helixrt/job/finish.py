"""The end of a replica's training: validate, digest, wait until the last state is saved, say so, leave when told.

In: the step machine after its last step and the members of the newest quorum. Out: commands to the ranks, and
`Finished` under the replica's `done_key`. A replica is not done before the run's last checkpoint is complete and synced,
whichever replica writes it, or before it is known that it cannot be written.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from helixrt.errors import Fatal
from helixrt.job.checkpoint_orders import CheckpointOrders
from helixrt.job.evaluation_orders import EvaluationOrders
from helixrt.job.leader_reports import Finished
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.replica.commands import Digest, Digested, Exit, RankCommand
from helixrt.replica.contracts import Formed, Membership, RunStore
from helixrt.replica.progress import Progress
from helixrt.replica.run_keys import EXIT_KEY, done_key


class ObservedMembership(Membership):
    """Another membership, whose newest quorum's `members` can be looked up."""

    def __init__(self, inner: Membership) -> None:
        self._inner, self.alone = inner, inner.alone
        self.members: tuple[Member, ...] = ()

    def announce(self) -> None:
        self._inner.announce()

    def join(self, me: Member, timeout_s: float) -> Formed:
        formed = self._inner.join(me, timeout_s)
        self.members = formed.members
        return formed

    def close(self) -> None:
        self._inner.close()


class EndOfRun:
    """Of one replica's leader; called in its coordination thread. Validation and digest may take `limit_s`, or as long as this
    rank's program has asked for (`progress`).

    `digests` is filled, rank by rank, as the answers to `Digest` come.
    """

    def __init__(
        self,
        replica: int,
        ranks: int,
        store: RunStore,
        membership: ObservedMembership,
        orders: CheckpointOrders,
        digests: dict[int, Digested],
        tell: Callable[[RankCommand], None],
        evaluations: EvaluationOrders,
        replicas: Iterable[int],
        limit_s: float,
        progress: Progress,
    ) -> None:
        self._replica, self._ranks, self._store, self._membership = replica, ranks, store, membership
        self._orders, self._digests, self._tell = orders, digests, tell
        self._evaluations, self._replicas = evaluations, tuple(replicas)
        self._limit_s, self._progress = limit_s, progress
        self._ended: Finished | None = None  # what we hold, not told yet

    def resting(self, machine: StepMachine) -> bool:
        """Once after each quorum that follows the last step; True when the ranks were told to leave.

        Raises Retryable without the store.
        """
        if machine.settled and self._store.get(done_key(self._replica)) is None:
            self._say_done(machine)
        if self._store.get(EXIT_KEY) is None:
            return False
        if (done := self._done()) and self._replica in done:
            for evaluate in self._evaluations.left(self._held(machine), done):
                self._tell(evaluate)
        self._tell(Exit())
        return True

    def _done(self) -> list[int]:
        """The replicas that have said so: no other will, once all may exit."""
        return [replica for replica in self._replicas if self._store.get(done_key(replica)) is not None]

    def _held(self, machine: StepMachine) -> CommitRecord:
        record = machine.log.get(machine.held)
        assert record is not None, f"the log does not know {machine.held}, which this replica holds"
        return record

    def _say_done(self, machine: StepMachine) -> None:
        record = self._held(machine)
        if self._ended is None or self._ended.lineage != machine.held:
            self._ended = self._validate_and_digest(machine)  # after it every update has been made, by all ranks
        holders = {m.replica for m in self._membership.members if m.lineage == machine.held}
        unsaved = self._orders.last_is_safe(record, holders)
        if unsaved is not None:
            ended = Finished(**{**self._ended.__dict__, "unsaved": unsaved})
            self._store.put_if_absent(done_key(self._replica), ended.to_json())

    def _validate_and_digest(self, machine: StepMachine) -> Finished:
        self._digests.clear()
        if (evaluate := self._evaluations.at_the_end(self._held(machine))) is not None:
            self._tell(evaluate)
        self._tell(Digest())
        deadline = time.monotonic() + self._limit_s
        while len(self._digests) < self._ranks:
            now = time.monotonic()
            deadline = max(deadline, now + self._progress.time_left_s())  # the user's evaluation may have asked for more
            if now >= deadline:
                raise Fatal(
                    f"validation and digest of the last state took longer than {self._limit_s:g} s; within "
                    "`with session.busy(what, limit_s):` a validation may take longer"
                )
            time.sleep(0.01)
        digests = [self._digests[r] for r in range(self._ranks)]
        return Finished(
            self._replica,
            machine.held_step,
            machine.held,
            _joined(d.parameters for d in digests),
            _joined(d.state for d in digests),
        )


def _joined(digests: Iterable[str]) -> str:
    return hashlib.sha256("".join(digests).encode()).hexdigest()
