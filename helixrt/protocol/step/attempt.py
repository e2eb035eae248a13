"""What a replica's machine waits for, and one generation's exchange as it sees it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from helixrt.protocol.step.batches import BatchRules, of_record
from helixrt.protocol.step.lineage import CommitRecord, Incarnation
from helixrt.protocol.step.messages import Differ, RankDone, RankFailed
from helixrt.protocol.step.quorum import Assessment, Member


class Phase(Enum):
    """What the replica waits for."""

    NEW = "new"  # Begin
    JOINING = "joining"  # Formed or JoinFailed
    WAITING = "waiting"  # WaitEnded: a holder of newer state may live elsewhere
    HOLDING = "holding"  # HoldEnded: a replica's fetch is waited for
    EXCHANGING = "exchanging"  # RankDone of all ranks, or RankFailed
    BREAKING = "breaking"  # waiting for the last answers of exchanges that were aborted
    EXAMINING = "examining"  # Examined of all ranks, after a sum that was not finite
    COMMITTING = "committing"  # Appended
    SETTLING = "settling"  # LogRead after a broken exchange: was it decided by others?
    REPAIRING = "repairing"  # reduced buckets of the step that others finished and we did not
    RELOADING = "reloading"  # Reloaded
    RESTING = "resting"  # Rested


@dataclass
class Attempt:
    """One generation's exchange as this replica sees it. `head` is the log's head that was assessed."""

    generation: int
    members: tuple[Member, ...]
    assessment: Assessment
    candidate: CommitRecord
    head: str
    done: dict[int, bool] = field(default_factory=dict)  # rank -> whether its sums are finite
    failed: set[int] = field(default_factory=set)
    examined: dict[int, bool] = field(default_factory=dict)  # rank -> whether its own gradient is finite
    suspects: set[int] = field(default_factory=set)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)  # rank -> digest of each replica's batches
    states: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # rank -> digest of each replica, and of what
    read_again: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> (position, digest)

    @property
    def taking_part(self) -> list[Member]:
        return [m for m in self.members if m.replica in self.assessment.members]

    @property
    def group(self) -> tuple[Incarnation, ...]:
        return tuple((m.replica, m.incarnation) for m in self.taking_part)

    @property
    def blamed(self) -> tuple[Incarnation, ...]:
        return tuple((m.replica, m.incarnation) for m in self.members if m.replica in self.suspects)

    def note_batches(self, rules: BatchRules) -> None:
        """All ranks are done: the record has the digests, the same at each leader."""
        found = of_record(self.batches, self.candidate.replicas, rules)
        if found:
            self.candidate = replace(self.candidate, batches={**self.candidate.batches, **found})

    def differing_states(self, every: int) -> Differ | None:
        """Whether replicas hold different states, in what was compared in this step. `every` steps look at all parts."""
        base = self.assessment.base
        for rank, (digests, part) in sorted(self.states.items()):
            known = {r: digests[r] for r in self.candidate.replicas if r < len(digests) and digests[r]}
            if len(set(known.values())) < 2:
                continue
            usual, count = Counter(known.values()).most_common(1)[0]
            odd = tuple(replica for replica, digest in known.items() if digest != usual) if 2 * count > len(known) else ()
            return Differ(self.generation, base.step + 1, max(0, base.step - every), rank, tuple(known), odd, part)
        return None

    def answered(self, event: RankDone | RankFailed) -> int:
        """Take one rank's answer; how many have answered."""
        if isinstance(event, RankDone):
            self.done[event.rank], self.batches[event.rank] = event.finite, event.batches
            self.states[event.rank] = event.states, event.part
            if event.read_again is not None:
                self.read_again[event.rank] = event.read_again
        else:
            self.failed.add(event.rank)
            self.suspects |= set(event.suspects)
        return len(self.done) + len(self.failed)
