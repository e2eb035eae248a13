"""What a replica's machine waits for, and one generation's exchange as it sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from helixrt.protocol.step.lineage import CommitRecord
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
