"""Chains of commit records, for tests of logs and checkpoints."""

from __future__ import annotations

from helixrt.protocol.step.lineage import CommitRecord, genesis


def chain_of(steps: int) -> list[CommitRecord]:
    """The genesis and `steps` records of a run of one replica."""
    entries = [genesis("run", 1)]
    for step in range(1, steps + 1):
        entries.append(CommitRecord(step, step, entries[-1].hash, ((0, 0),), {0: step}, "run"))
    return entries
