"""Quorum rules: who is healthy, who is behind, and from what state a step starts.

In: the members' own accounts (step, lineage hash) and the run's log. Out: an `Assessment`, the same
on every member that sees the same log. Follows FT-HSDP section 4.3 (Figure 6), with the lineage
hash in place of the bare step number: a replica whose chain differs is behind, whatever its step.
Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.protocol.step.lineage import CommitRecord, Log


@dataclass(frozen=True)
class Member:
    """One replica's account of itself when it joins a quorum.

    `lineage` is the hash of the record whose state it holds ("" if it holds none yet), `fetching`
    the hash of the state it is fetching ("" if none), `epoch` the generation at which its exchange
    was last configured and is still sound (-1 if it must be configured anew), `addresses` where its
    ranks serve state, in rank order. `incarnation` tells a restarted replica from its predecessor.
    `entries` is how many entries of the log it knew: members read the log each at its own moment, and
    assess it as far as the one who knew most (0: not said, all that was read counts).
    """

    replica: int
    incarnation: int
    step: int
    lineage: str
    fetching: str = ""
    epoch: int = -1
    addresses: tuple[str, ...] = ()
    entries: int = 0


@dataclass(frozen=True)
class Assessment:
    """What a quorum means: the state the step starts from, who works on it, who catches up."""

    base: CommitRecord
    contributors: tuple[int, ...]
    behind: tuple[int, ...]
    supersedes: bool  # the head is held by nobody here: committing will supersede it

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.contributors + self.behind))


def assess(members: Sequence[Member], log: Log) -> Assessment | None:
    """The newest state on the head's chain that a member holds is the base; its holders are healthy.

    None if no member holds a state on the chain: nobody can work, all must load a checkpoint.
    """
    held = [log.get(m.lineage) for m in members if m.lineage and log.on_chain(m.lineage)]
    known = [record for record in held if record is not None]
    if not known:
        return None
    base = max(known, key=lambda record: record.step)
    healthy = tuple(sorted(m.replica for m in members if m.lineage == base.hash))
    behind = tuple(sorted(m.replica for m in members if m.lineage != base.hash))
    return Assessment(base, healthy, behind, supersedes=base.hash != log.head.hash)


def successor(assessment: Assessment, generation: int) -> CommitRecord:
    """The record that this quorum will propose; equal on every member."""
    base = assessment.base
    positions = {
        replica: position + (1 if replica in assessment.contributors else 0)
        for replica, position in base.positions.items()
    }
    for replica in assessment.contributors:
        positions.setdefault(replica, 1)
    return CommitRecord(base.step + 1, generation, base.hash, assessment.contributors, positions, base.run)


def reusable_epoch(members: Sequence[Member]) -> int:
    """The epoch all members share, if their exchange is still sound and whole; else -1."""
    epochs = {m.epoch for m in members}
    return epochs.pop() if len(epochs) == 1 else -1
