"""The step machine, scenario by scenario, without a world around it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.deal import Deal
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.offers import IDLE_QUORUMS
from helixrt.protocol.step.quorum import Assessment, Member, StepRules, assess, reusable_epoch, successor

ROOT = genesis("run", 2)


def machine(
    replica: int = 0, group_world_size: int = 2, log: Log | None = None, held: str = ROOT.hash, steps: int = 10
) -> StepMachine:
    return StepMachine(replica, 0, group_world_size, log or Log([ROOT]), held, steps)


def member(replica: int, record: CommitRecord = ROOT, **changes: object) -> Member:
    return Member(replica, 0, record.step, record.hash, **changes)  # type: ignore[arg-type]


def actions_of(kind: type, actions: list[p.Action]) -> list[p.Action]:
    return [a for a in actions if isinstance(a, kind)]


def test_work_begins_before_the_quorum_answers() -> None:
    actions = machine().on(p.Begin())
    assert actions_of(p.Work, actions) == [p.Work(ROOT.hash, 0, 1)]
    assert len(actions_of(p.Join, actions)) == 1


def exchanging(m: StepMachine, generation: int = 1, *others: Member) -> p.Exchange:
    m.on(p.Begin())
    (exchange,) = actions_of(p.Exchange, m.on(p.Formed(generation, (member(m.replica), *others))))
    assert isinstance(exchange, p.Exchange)
    return exchange


def test_a_replica_commits_only_when_all_its_rings_are_done() -> None:
    m = machine()
    exchange = exchanging(m, 1, member(1))
    assert exchange == p.Exchange(1, (0, 1), (0, 1), contribute=True, fresh=True)
    assert m.on(p.RankDone(1, 0)) == []
    (append,) = m.on(p.RankDone(1, 1))
    assert isinstance(append, p.Append) and append.index == 1
    record = append.record
    assert record.positions == {0: 1, 1: 1} and record.parent == ROOT.hash
    actions = m.on(p.Appended(1, record))
    assert actions_of(p.Apply, actions) == [p.Apply(record)]
    assert actions_of(p.Work, actions) == [p.Work(record.hash, 1, 2)]


def test_a_broken_exchange_keeps_the_gradients_for_the_next_generation() -> None:
    m = machine()
    exchanging(m, 1, member(1))
    assert m.on(p.RankFailed(1, 0, "peer died")) == [p.Abort(1, "peer died")]
    assert m.on(p.RankFailed(1, 1, "aborted")) == [p.ReadLog(1)]
    m.on(p.LogRead(()))
    actions = m.on(p.Formed(2, (member(0),)))
    assert not actions_of(p.Work, actions)
    assert actions_of(p.Exchange, actions) == [p.Exchange(2, (0,), (0,), contribute=True, fresh=True)]


@pytest.mark.parametrize(("skips", "steps"), [((1,), 10), ((), 1)])
def test_gradients_that_an_update_has_overwritten_are_not_exchanged_again(skips: tuple[int, ...], steps: int) -> None:
    """Another replica's record supersedes the step, and its holders are lost; no work has begun meanwhile, as the next batch is
    not computed, or there is none."""
    m = StepMachine(0, 0, 1, Log([ROOT]), ROOT.hash, steps, skips=skips)
    exchanging(m, 1, member(1))
    m.on(p.RankDone(1, 0))
    assert m.attempt is not None
    one = m.attempt.candidate
    actions = m.on(p.Appended(1, one))
    assert actions_of(p.Apply, actions) and not actions_of(p.Work, actions)
    instead = CommitRecord(1, 3, ROOT.hash, ((2, 0),), {0: 0, 1: 0, 2: 1}, "run")
    actions = m.on(p.Formed(5, (member(0, one), member(1)), (instead,)))
    assert [a.lineage for a in actions_of(p.FetchState, actions)] == [ROOT.hash]  # type: ignore[attr-defined]
    assert actions_of(p.Load, m.on(p.Fetched(ROOT.hash))) == [p.Load(ROOT.hash)]
    m.on(p.RankFailed(5, 0, "peer died"))
    m.on(p.LogRead(()))
    actions = m.on(p.Formed(6, (member(0), member(1))))
    assert actions_of(p.Work, actions) == [p.Work(ROOT.hash, 0, 1)]
    (exchange,) = actions_of(p.Exchange, actions)
    assert isinstance(exchange, p.Exchange) and exchange.contribute


def test_gradients_are_not_preserved_over_the_replay_of_what_others_committed() -> None:
    m = StepMachine(0, 0, 1, Log([ROOT]), ROOT.hash, 10, skips=(1,))
    exchanging(m, 1, member(1))
    assert m.attempt is not None
    decided = m.attempt.candidate
    m.on(p.RankFailed(1, 0, "peer died"))
    m.on(p.LogRead((decided,)))
    actions = m.on(p.Fetched(decided.hash))
    assert actions_of(p.Replay, actions) == [p.Replay(decided)] and not actions_of(p.Work, actions)
    instead = CommitRecord(1, 3, ROOT.hash, ((2, 0),), {0: 0, 1: 0, 2: 1}, "run")
    m.on(p.Formed(5, (member(0, decided), member(1)), (instead,)))
    m.on(p.Fetched(ROOT.hash))
    m.on(p.RankFailed(5, 0, "peer died"))
    m.on(p.LogRead(()))
    assert actions_of(p.Work, m.on(p.Formed(6, (member(0), member(1))))) == [p.Work(ROOT.hash, 0, 1)]


def test_who_did_not_finish_takes_the_reduced_buckets_of_who_did() -> None:
    m = machine()
    exchanging(m, 1, member(1))
    assert m.attempt is not None
    decided = m.attempt.candidate
    m.on(p.RankDone(1, 0))
    m.on(p.RankFailed(1, 1, "peer died"))
    actions = m.on(p.LogRead((decided,)))
    (fetch,) = actions_of(p.FetchReduced, actions)
    assert isinstance(fetch, p.FetchReduced) and fetch.lineage == decided.hash and [d.replica for d in fetch.donors] == [1]
    actions = m.on(p.Fetched(decided.hash))
    assert actions_of(p.Replay, actions) == [p.Replay(decided)]
    assert actions_of(p.Work, actions) == [p.Work(decided.hash, 1, 2)]


def test_an_older_generation_in_the_log_is_superseded_and_a_newer_one_respected() -> None:
    for generation, expected in ((1, p.Append), (9, p.Join)):
        m = machine(group_world_size=1)
        exchanging(m, 5)
        m.on(p.RankDone(5, 0))
        stray = CommitRecord(1, generation, ROOT.hash, ((1, 0),), {0: 0, 1: 1}, "run")
        answer = m.on(p.Appended(1, stray))[-1]
        assert isinstance(answer, expected)
        if isinstance(answer, p.Append):
            assert answer.index == 2 and answer.record.parent == ROOT.hash


def test_positions_move_on_by_the_advance_of_the_rules() -> None:
    assessment = assess([member(0)], Log([ROOT]))
    one = successor(assessment, 1, [member(0)], advance=4)  # type: ignore[arg-type]
    assert one.positions == {**ROOT.positions, 0: 4}
    m = StepMachine(0, 0, 1, Log([ROOT]), ROOT.hash, 5, StepRules(advance=4))
    m.on(p.Begin())
    m.on(p.Formed(5, (member(0),)))
    assert m.attempt is not None and m.attempt.candidate.positions[0] == 4


def test_a_replica_behind_gives_zeros_and_replays_what_it_kept() -> None:
    one = successor(assess([member(0)], Log([ROOT])), 1, [member(0)])  # type: ignore[arg-type]
    m = machine(replica=1, group_world_size=1, log=Log([ROOT, one]))
    m.on(p.Begin())
    healthy = member(0, one)
    m.held = ""  # a replica that holds nothing at all
    actions = m.on(p.Formed(2, (healthy, Member(1, 0, -1, ""))))
    assert actions_of(p.FetchState, actions) == [p.FetchState(one.hash, (healthy,))]
    (exchange,) = actions_of(p.Exchange, actions)
    assert isinstance(exchange, p.Exchange) and not exchange.contribute and exchange.contributors == (0,)
    assert m.attempt is not None
    two = m.attempt.candidate
    assert actions_of(p.Keep, m.on(p.RankDone(2, 0))) == [p.Keep(two)]
    actions = m.on(p.Formed(3, (member(0, two), Member(1, 0, -1, "", fetching=one.hash)), (two,)))
    assert not actions_of(p.FetchState, actions)  # the one under way still leads here
    actions = m.on(p.Fetched(one.hash))
    assert actions[:2] == [p.Load(one.hash), p.Replay(two)] and m.held == two.hash


def test_healthy_replicas_offer_the_base_only_while_somebody_needs_it() -> None:
    m = machine(group_world_size=1)
    m.on(p.Begin())
    actions = m.on(p.Formed(1, (member(0), Member(1, 3, -1, ""))))
    assert actions_of(p.Offer, actions) == [p.Offer(ROOT.hash)]
    m.on(p.RankDone(1, 0))
    assert m.attempt is not None
    one = m.attempt.candidate
    m.on(p.Appended(1, one))
    actions = m.on(p.Formed(2, (member(0, one), Member(1, 3, -1, "", fetching=ROOT.hash))))
    assert not actions_of(p.Withdraw, actions) and not actions_of(p.Offer, actions)
    m.on(p.RankDone(2, 0))
    assert m.attempt is not None
    two = m.attempt.candidate
    m.on(p.Appended(2, two))
    actions = m.on(p.Formed(3, (member(0, two), Member(1, 3, 2, two.hash))))
    assert not actions_of(p.Withdraw, actions)  # whoever fetches it may have missed a quorum
    for generation in range(4, 4 + IDLE_QUORUMS):
        m.on(p.RankFailed(generation - 1, 0, "peer died"))
        m.on(p.LogRead(()))
        actions = m.on(p.Formed(generation, (member(0, two), Member(1, 3, 2, two.hash))))
    assert actions_of(p.Withdraw, actions) == [p.Withdraw(ROOT.hash)]


def test_a_snapshot_that_nobody_fetches_makes_room_for_one_that_is_needed() -> None:
    m = machine(group_world_size=1)
    m.on(p.Begin())
    m.on(p.Formed(1, (member(0), Member(1, 3, -1, ""))))
    m.on(p.RankDone(1, 0))
    assert m.attempt is not None
    one = m.attempt.candidate
    m.on(p.Appended(1, one))
    actions = m.on(p.Formed(2, (member(0, one), Member(1, 4, -1, ""))))  # started again: the first fetch is over
    assert actions_of(p.Withdraw, actions) == [p.Withdraw(ROOT.hash)] and actions_of(p.Offer, actions) == [p.Offer(one.hash)]


def test_connections_are_reused_only_when_everyone_has_the_same_sound_ones() -> None:
    assert reusable_epoch([member(0, epoch=4), member(1, epoch=4)]) == 4
    assert reusable_epoch([member(0, epoch=4), member(1, epoch=-1)]) == -1
    assert reusable_epoch([member(0, epoch=4), member(1, epoch=3)]) == -1


def test_a_chain_decides_who_is_behind_not_the_step_number() -> None:
    one = CommitRecord(1, 1, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    two = CommitRecord(2, 2, one.hash, ((0, 0),), {0: 2, 1: 0}, "run")
    instead = CommitRecord(1, 3, ROOT.hash, ((1, 0),), {0: 0, 1: 1}, "run")
    found = assess([member(0, two), member(1, instead)], Log([ROOT, one, two, instead]))
    assert isinstance(found, Assessment) and found.base == instead and found.behind == (0,) and not found.supersedes


def test_after_the_last_step_it_rests_and_serves_who_is_behind() -> None:
    m = machine(group_world_size=1, steps=1)
    exchanging(m, 1)
    m.on(p.RankDone(1, 0))
    assert m.attempt is not None
    last = m.attempt.candidate
    actions = m.on(p.Appended(1, last))
    assert not actions_of(p.Work, actions)
    actions = m.on(p.Formed(2, (member(0, last), Member(1, 1, 0, ROOT.hash))))
    assert p.Offer(last.hash) in actions and p.Rest() in actions and not m.settled
    m.on(p.Rested())
    m.on(p.Formed(3, (member(0, last), member(1, last))))
    assert m.settled


def test_members_that_read_the_log_at_different_moments_agree() -> None:
    """A straggler's record lands between two members' reads: both must see the same base and contributors."""
    held = CommitRecord(1, 3, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    straggler = CommitRecord(1, 4, ROOT.hash, ((2, 0),), {0: 0, 1: 0, 2: 1}, "run")  # supersedes what replica 0 holds
    early = machine(0, 1, Log([ROOT, held]), held.hash)
    late = machine(1, 1, Log([ROOT, held]), ROOT.hash)
    (first,), (second,) = (actions_of(p.Join, m.on(p.Begin())) for m in (early, late))
    assert isinstance(first, p.Join) and isinstance(second, p.Join)
    members = (first.me, second.me)
    (mine,) = actions_of(p.Exchange, early.on(p.Formed(6, members)))
    (theirs,) = actions_of(p.Exchange, late.on(p.Formed(6, members, (straggler,))))
    assert isinstance(mine, p.Exchange) and isinstance(theirs, p.Exchange)
    assert mine.contributors == theirs.contributors == (0,) and not theirs.contribute
    # and the straggler is superseded when the step commits
    (append,) = early.on(p.RankDone(6, 0))
    assert isinstance(append, p.Append)
    (again,) = actions_of(p.Append, early.on(p.Appended(2, straggler)))
    assert again == p.Append(3, append.record)


def test_a_member_that_could_not_read_what_all_others_know_takes_no_part() -> None:
    """Its reader believes that the log has no more entries: they are deleted, or the store gives nothing."""
    held = CommitRecord(1, 3, ROOT.hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")
    m = machine(1, 1, Log([ROOT, held]), held.hash)
    m.on(p.Begin())
    ahead = Member(0, 0, 900, "of step 900", entries=901)
    actions = m.on(p.Formed(2000, (ahead, member(1, held, entries=2))))
    assert not actions_of(p.Exchange, actions) and len(actions_of(p.Join, actions)) == 1


def test_reduced_buckets_of_a_superseded_record_are_not_taken_for_a_state() -> None:
    decided = CommitRecord(1, 3, ROOT.hash, ((1, 0),), {0: 0, 1: 1}, "run")
    other = CommitRecord(1, 4, ROOT.hash, ((2, 0),), {0: 0, 1: 0, 2: 1}, "run")
    m = machine(0, 1, Log([ROOT, decided]))
    m.on(p.Begin())
    (fetch,) = actions_of(p.FetchReduced, m.on(p.Formed(5, (member(0), member(1, decided)))))
    assert isinstance(fetch, p.FetchReduced)
    m.on(p.RankFailed(5, 0, "peer died"))
    assert p.Forget(decided.hash) in m.on(p.LogRead((other,)))
    assert m.on(p.Fetched(decided.hash)) == [] and m.held == ROOT.hash


def test_a_fetch_of_a_state_that_is_not_needed_any_more_is_given_up() -> None:
    """Its record was superseded by one that follows what is held."""
    one = CommitRecord(1, 2, ROOT.hash, ((1, 0),), {0: 0, 1: 1}, "run")
    two = CommitRecord(2, 3, one.hash, ((1, 0),), {0: 0, 1: 2}, "run")
    m = machine(0, 1, Log([ROOT, one, two]))
    m.on(p.Begin())
    (fetch,) = actions_of(p.FetchState, m.on(p.Formed(5, (member(0), member(1, two)))))
    assert isinstance(fetch, p.FetchState) and fetch.lineage == two.hash
    m.on(p.RankFailed(5, 0, "peer died"))
    m.on(p.LogRead(()))
    instead = CommitRecord(1, 6, ROOT.hash, ((2, 0),), {0: 0, 1: 0, 2: 1}, "run")
    actions = m.on(p.Formed(7, (member(0),), (instead,)))
    assert actions_of(p.Exchange, actions)
    assert p.Forget(two.hash) in actions and m.on(p.Fetched(two.hash)) == []


def test_a_record_that_needs_no_fetch_is_not_followed_into_data_that_is_dealt_anew() -> None:
    """A run goes on from the checkpoint of step 1 with other streams; step 2 of the life before was not applied."""
    one = CommitRecord(1, 1, ROOT.hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")
    two = replace(one, step=2, parent=one.hash, positions={0: 2, 1: 2}, applied=False)
    three = replace(two, step=3, parent=two.hash, positions={0: 3, 1: 3}, applied=True)
    deal = Deal((1, 1), 1, 12, False, 1, 6, 0, 1)
    log = Log([ROOT, one, two, three])
    m = StepMachine(0, 0, 1, log, one.hash, 9, StepRules(deal=(deal,)), life=1)
    m.on(p.Begin())
    actions = m.on(p.Formed(5, (Member(0, 0, 1, one.hash),)))
    assert not actions_of(p.Replay, actions) and m.held == one.hash
    same = StepMachine(0, 0, 1, log, one.hash, 9)
    same.on(p.Begin())
    assert actions_of(p.Replay, same.on(p.Formed(5, (Member(0, 0, 1, one.hash),)))) == [p.Replay(two)]
