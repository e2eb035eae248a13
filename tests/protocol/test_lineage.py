"""The lineage: hashes, chains, superseding, and the audit that follows them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from helixrt.protocol.step.lineage import CommitRecord, Log, audit, genesis


def after(parent: CommitRecord, generation: int, *contributors: int) -> CommitRecord:
    positions = {r: n + (r in contributors) for r, n in parent.positions.items()}
    return CommitRecord(parent.step + 1, generation, parent.hash, contributors, positions, parent.run)


def test_a_record_survives_its_text_and_every_field_counts() -> None:
    record = after(genesis("run", 3), 5, 0, 2)
    assert CommitRecord.from_json(record.to_json()) == record
    changed = [
        dataclasses.replace(record, step=9),
        dataclasses.replace(record, generation=6),
        dataclasses.replace(record, parent="x"),
        dataclasses.replace(record, contributors=(0,)),
        dataclasses.replace(record, positions={0: 1}),
        dataclasses.replace(record, run="other"),
    ]
    assert len({record.hash, *(c.hash for c in changed)}) == 7


def test_the_newest_entry_decides_what_counts() -> None:
    root = genesis("run", 2)
    one = after(root, 1, 0, 1)
    two = after(one, 2, 0, 1)
    instead = after(root, 3, 1)
    log = Log([root, one, two])
    assert [r.step for r in log.chain()] == [0, 1, 2] and not log.superseded()
    log.append(instead)
    assert log.chain() == [root, instead] and log.superseded() == [one, two]
    assert not log.on_chain(one.hash) and not log.on_chain(two.hash) and log.on_chain(root.hash)
    assert log.chain(two.hash) == [root, one, two]
    with pytest.raises(ValueError, match="unknown parent"):
        log.append(after(after(two, 4, 0), 5, 0))


def test_on_chain_agrees_with_walking_parents(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(200):
        log = Log([genesis("run", 2)])
        for generation in range(1, 30):
            parent = log.head if choose.random() < 0.8 else choose.choice(log.chain())
            log.append(after(parent, generation, *choose.sample((0, 1), choose.randint(1, 2))))
        walked = {r.hash for r in log.chain()}
        assert {e.hash for e in log.entries if log.on_chain(e.hash)} == walked


def test_the_audit_counts_and_finds_gaps_and_repeats() -> None:
    root = genesis("run", 2)
    one = after(root, 1, 0, 1)
    two = after(one, 2, 1)
    clean = audit([root, one, two])
    assert clean.clean and clean.batches == 3 and clean.per_replica == {0: 1, 1: 2}
    skipped = dataclasses.replace(two, positions={0: 1, 1: 3})
    assert audit([root, one, skipped]).gaps == 1
    repeated = dataclasses.replace(two, positions={0: 1, 1: 1})
    assert audit([root, one, repeated]).repeats == 1
    moved = dataclasses.replace(two, positions={0: 2, 1: 2})  # replica 0 did not contribute
    assert audit([root, one, moved]).gaps == 1
    assert audit([root, two]).gaps > 0
