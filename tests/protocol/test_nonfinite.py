"""Sums that are not finite: found by vote, the culprit excluded, nothing applied that is not finite."""

from __future__ import annotations

import pytest

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Exclusion, Log, genesis
from helixrt.protocol.step.machine import Phase, StepMachine
from helixrt.protocol.step.quorum import Assessment, Member, Overflow, StepRules, Unusable, assess

ROOT = genesis("run", 2)


def actions_of(kind: type, actions: list[p.Action]) -> list[p.Action]:
    return [a for a in actions if isinstance(a, kind)]


def member(replica: int, **changes: object) -> Member:
    return Member(replica, 0, 0, ROOT.hash, **changes)  # type: ignore[arg-type]


def voted(machine: StepMachine, *finite: bool) -> list[p.Action]:
    """The actions after the first exchange, whose ranks vote so."""
    machine.on(p.Begin())
    machine.on(p.Formed(10, (member(0), member(1))))
    for rank, vote in enumerate(finite):
        actions = machine.on(p.RankDone(10, rank, finite=vote))
    return actions


def machine(replica: int = 0, **changes: object) -> StepMachine:
    return StepMachine(replica, 0, 2, Log([ROOT]), ROOT.hash, 10, **changes)  # type: ignore[arg-type]


def test_a_sum_that_is_not_finite_is_not_committed_and_each_examines_its_own() -> None:
    m = machine()
    assert voted(m, True, False) == [p.Examine(10)] and m.phase is Phase.EXAMINING
    assert m.on(p.Examined(10, 0, True)) == []
    (join,) = m.on(p.Examined(10, 1, False))
    assert isinstance(join, p.Join) and join.me.unusable == Unusable(ROOT.hash, 1) and join.me.overflow is None
    actions = m.on(p.Formed(11, (join.me, member(1, overflow=Overflow(ROOT.hash, (0, 1))))))
    (exchange,) = actions_of(p.Exchange, actions)
    assert isinstance(exchange, p.Exchange) and exchange.contributors == (1,) and not exchange.contribute
    assert exchange.members == (0, 1) and not actions_of(p.Work, actions)  # gradients are preserved
    m.on(p.RankDone(11, 0))
    (append,) = m.on(p.RankDone(11, 1))
    assert isinstance(append, p.Append)
    record = append.record
    assert record.contributors == ((1, 0),) and record.excluded == {0: Exclusion(0, 1)} and record.applied
    assert record.positions == {0: 1, 1: 1}  # the excluded batch is consumed


def test_if_nobody_has_one_the_step_is_committed_without_an_update() -> None:
    m = machine()
    voted(m, False, True)
    m.on(p.Examined(10, 0, True))
    (join,) = m.on(p.Examined(10, 1, True))
    assert isinstance(join, p.Join) and join.me.overflow == Overflow(ROOT.hash, (0, 1))
    actions = m.on(p.Formed(11, (join.me, member(1))))  # the other one need not say it too
    (append,) = actions_of(p.Append, actions)
    assert isinstance(append, p.Append) and not actions_of(p.Exchange, actions)
    record = append.record
    assert not record.applied and record.contributors == ((0, 0), (1, 0)) and record.summed == () and not record.excluded
    actions = m.on(p.Appended(1, record))
    assert actions_of(p.Apply, actions) == [p.Apply(record)] and actions_of(p.Work, actions) == [p.Work(record.hash, 1, 2)]


def test_after_an_exclusion_the_others_are_summed_before_anything_else_is_decided() -> None:
    """The overflow was of three; the sum of the two that are left may be finite."""
    found = assess(
        [
            member(0, overflow=Overflow(ROOT.hash, (0, 1, 2))),
            member(1, unusable=Unusable(ROOT.hash, 0)),
            member(2, overflow=Overflow(ROOT.hash, (0, 1, 2))),
        ],
        Log([ROOT]),
    )
    assert isinstance(found, Assessment) and found.applied and found.contributors == (0, 2) and set(found.excluded) == {1}
    again = member(0, overflow=Overflow(ROOT.hash, (0, 2)))
    found = assess([again, member(1, unusable=Unusable(ROOT.hash, 0)), member(2)], Log([ROOT]))
    assert isinstance(found, Assessment) and not found.applied


def test_all_excluded_is_a_step_without_an_update() -> None:
    unusable = Unusable(ROOT.hash, 0)
    found = assess([member(0, unusable=unusable), member(1, unusable=unusable)], Log([ROOT]))
    assert isinstance(found, Assessment) and not found.applied and found.contributors == () and found.healthy == (0, 1)
    stale = Unusable("another base", 0)
    found = assess([member(0, unusable=stale), member(1)], Log([ROOT]))
    assert isinstance(found, Assessment) and found.contributors == (0, 1)


def test_with_exclusion_off_an_overflow_is_nobodys_fault() -> None:
    (join,) = voted(machine(rules=StepRules(exclusion=False)), True, False)
    assert isinstance(join, p.Join) and join.me.unusable is None and join.me.overflow == Overflow(ROOT.hash, (0, 1))


def test_a_replica_behind_follows_a_record_without_an_update_without_buckets() -> None:
    skipped = CommitRecord(1, 5, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run", applied=False)
    m = machine(1)
    m.on(p.Begin())
    actions = m.on(p.Formed(10, (Member(0, 0, 1, skipped.hash), member(1)), (skipped,)))
    assert p.Replay(skipped) in actions and m.held == skipped.hash
    assert not actions_of(p.FetchReduced, actions) and not actions_of(p.FetchState, actions)


@pytest.mark.parametrize("rank", [0, -1])
def test_a_replica_that_is_excluded_again_and_again_is_restarted(rank: int) -> None:
    """But not for batches that are left out by order."""
    entries = [ROOT]
    for step in range(1, 5):
        excluded = {0: Exclusion(0, rank)}
        entries.append(CommitRecord(step, step, entries[-1].hash, ((1, 0),), {0: step, 1: step}, "run", 0, excluded))
    m = StepMachine(0, 0, 1, Log(entries[:-1]), entries[-2].hash, 10, StepRules(nonfinite_limit=3))
    m.on(p.Begin())
    m.unusable = Unusable(m.held, rank)
    m.on(p.Formed(4, (m._me(), Member(1, 0, 3, m.held))))
    (append,) = m.on(p.RankDone(4, 0))
    assert isinstance(append, p.Append) and append.record == entries[-1]
    actions = m.on(p.Appended(4, append.record))
    assert bool(actions_of(p.Restart, actions)) is (rank >= 0)


def test_a_batch_that_is_left_out_is_not_computed() -> None:
    m = machine(skips={0})
    (join,) = m.on(p.Begin())
    assert isinstance(join, p.Join) and join.me.unusable == Unusable(ROOT.hash, -1)
    actions = m.on(p.Formed(10, (join.me, member(1))))
    (exchange,) = actions_of(p.Exchange, actions)
    assert isinstance(exchange, p.Exchange) and not exchange.contribute and not actions_of(p.Work, actions)
