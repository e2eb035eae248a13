"""The lineage: hashes, chains, superseding, and the audit that follows them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from helixrt.protocol.step.lineage import CommitRecord, Exclusion, Log, audit, genesis


def after(parent: CommitRecord, generation: int, *contributors: int) -> CommitRecord:
    positions = {r: n + (r in contributors) for r, n in parent.positions.items()}
    pairs = tuple((replica, 0) for replica in contributors)
    return CommitRecord(parent.step + 1, generation, parent.hash, pairs, positions, parent.run)


def test_a_record_survives_its_text_and_every_field_counts() -> None:
    record = after(genesis("run", 3), 5, 0, 2)
    assert CommitRecord.from_json(record.to_json()) == record
    changed = [
        dataclasses.replace(record, step=9),
        dataclasses.replace(record, generation=6),
        dataclasses.replace(record, parent="x"),
        dataclasses.replace(record, contributors=((0, 0), (2, 1))),
        dataclasses.replace(record, positions={0: 1}),
        dataclasses.replace(record, run="other"),
        dataclasses.replace(record, life=1),
        dataclasses.replace(record, excluded={1: Exclusion(0, 1)}),
        dataclasses.replace(record, applied=False),
        dataclasses.replace(record, last="enough"),
        dataclasses.replace(record, orders={0: "5f6b"}),
    ]
    assert len({record.hash, *(c.hash for c in changed)}) == 12
    for other in changed:
        assert CommitRecord.from_json(other.to_json()) == other


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


def test_the_audit_of_streams_that_move_on_by_several_batches_a_step() -> None:
    root = genesis("run", 2)
    one = dataclasses.replace(after(root, 1, 0, 1), positions={0: 4, 1: 4})
    found = audit([root, one], advance=4)
    assert found.clean and found.batches == 8 and found.per_replica == {0: 4, 1: 4}
    assert audit([root, one]).gaps == 6 and audit([root, one], advance=8).repeats == 8


def test_excluded_batches_and_records_that_were_not_applied_are_no_gaps() -> None:
    root = genesis("run", 2)
    positions = {0: 1, 1: 1}
    excluded = dataclasses.replace(after(root, 1, 0), positions=positions, excluded={1: Exclusion(0, 0)})
    found = audit([root, excluded])
    assert found.clean and (found.batches, found.excluded) == (1, 1) and excluded.committers == ((0, 0), (1, 0))
    dropped = dataclasses.replace(after(excluded, 2, 0, 1), applied=False)
    found = audit([root, excluded, dropped])
    assert found.clean and (found.batches, found.excluded) == (1, 3) and dropped.summed == ()
    assert audit([root, dataclasses.replace(excluded, positions={0: 1, 1: 0})]).repeats == 1  # its batch would come again


def test_the_records_after_a_state_are_those_of_the_chain() -> None:
    root = genesis("run", 2)
    one = after(root, 1, 0, 1)
    two = after(one, 2, 0, 1)
    instead = after(one, 3, 1)
    log = Log([root, one, two, instead])
    assert log.after(root.hash) == one and log.after(one.hash) == instead and log.after(instead.hash) is None
    assert log.after(two.hash) is None and log.above(0) == [one, instead] and log.above(-5) == [root, one, instead]
