"""When a quorum may build on a state older than the log's head: the rule, line by line, and the machine that follows it."""

from __future__ import annotations

import random

import pytest

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.machine import Phase, StepMachine
from helixrt.protocol.step.quorum import Assessment, Member, Stranded, assess, generation_of
from helixrt.protocol.step.supersede import GENERATIONS_PER_S, STEP_S, Evidence, Waited, counted

ROOT = genesis("run", 2)


def chain(*contributors: tuple[tuple[int, int], ...], life: int = 0) -> list[CommitRecord]:
    """A log whose record n has the n-th contributors."""
    entries = [ROOT]
    for step, who in enumerate(contributors, 1):
        entries.append(CommitRecord(step, step, entries[-1].hash, who, {0: 0, 1: 0}, "run", life))
    return entries


def lone(record: CommitRecord | None, replica: int = 0, incarnation: int = 1, **changes: object) -> Member:
    step, lineage = (record.step, record.hash) if record is not None else (-1, "")
    return Member(replica, incarnation, step, lineage, **changes)  # type: ignore[arg-type]


BOTH = ((0, 0), (1, 0))


def test_a_lone_member_with_old_state_waits_for_those_who_hold_newer() -> None:
    """Reproduced before: a lone member at step 0 against a head at step 40 superseded all of it."""
    entries = chain(*[BOTH] * 40)
    found = assess([lone(ROOT, incarnation=0)], Log(entries))
    assert isinstance(found, Stranded) and found.base == ROOT and found.head.step == 40
    assert not found.ruling.permitted and found.ruling.missing == ((1, 0),)  # it is judged by what it says it holds


def test_one_step_is_computed_again_at_once() -> None:
    entries = chain(BOTH, BOTH)
    found = assess([lone(entries[1])], Log(entries))
    assert isinstance(found, Assessment) and found.supersedes and found.base == entries[1]
    assert isinstance(assess([lone(entries[0])], Log(entries)), Stranded)


@pytest.mark.parametrize(
    ("evidence", "permitted"),
    [
        (Evidence("", ended=((0, 0), (1, 0))), True),
        (Evidence("", ended=((0, 0),)), False),
        (Evidence("", ended=((0, 0), (1, 0)), holders=((1, 1),)), False),  # it fetched, and may have replayed up to the head
        (Evidence("", ended=((0, 0), (1, 0), (1, 1)), holders=((1, 1),)), True),
        (Evidence("", waited_s=599.0), False),
        (Evidence("", waited_s=600.0), True),
        (Evidence("", accepted=True), True),
    ],
)
def test_deeper_only_when_all_holders_have_ended_or_the_wait_is_over(evidence: Evidence, permitted: bool) -> None:
    entries = chain(*[BOTH] * 5)
    head = entries[-1].hash
    told = Evidence(head, evidence.holders, evidence.ended, evidence.waited_s, evidence.accepted)
    found = assess([lone(entries[2], evidence=told, looked=head)], Log(entries))
    assert isinstance(found, Assessment) is permitted
    about_another_head = Evidence("other", told.holders, told.ended, told.waited_s, told.accepted)
    assert isinstance(assess([lone(entries[2], evidence=about_another_head, looked=head)], Log(entries)), Stranded)


def test_evidence_of_all_members_counts_together() -> None:
    entries = chain(*[((0, 0), (1, 0), (2, 0))] * 5)
    head = entries[-1].hash
    one = lone(entries[2], 0, 1, evidence=Evidence(head, ended=((0, 0), (1, 0))), looked=head)
    other = lone(None, 1, 1, evidence=Evidence(head, holders=((1, 0),), ended=((2, 0),)), looked=head)
    assert isinstance(assess([one], Log(entries)), Stranded)
    assert isinstance(assess([one, other], Log(entries)), Assessment)


def test_before_more_than_a_step_is_lost_every_member_looks_for_a_checkpoint() -> None:
    entries = chain(*[BOTH] * 5)
    head = entries[-1].hash
    evidence = Evidence(head, ended=BOTH)
    looked, not_yet = lone(entries[2], 0, evidence=evidence, looked=head), lone(entries[1], 1)
    found = assess([looked, not_yet], Log(entries))
    assert isinstance(found, Stranded) and found.ruling.look
    assert isinstance(assess([looked, lone(entries[1], 1, looked=head)], Log(entries)), Assessment)


def test_earlier_lives_of_the_run_have_ended() -> None:
    entries = chain(*[BOTH] * 5, life=1)
    head = entries[-1].hash
    member = lone(entries[2], 0, 0, evidence=Evidence(head), looked=head)
    assert isinstance(assess([member], Log(entries), life=1), Stranded)
    assert isinstance(assess([member], Log(entries), life=2), Assessment)


def test_waiting_is_counted_in_small_steps_whatever_the_clock_does(seed: int) -> None:
    choose = random.Random(seed)
    waited, generation, true_s = counted(None, 5), 5, 0.0
    for _ in range(300):
        pause_s = choose.choice((0.2, 1.0, 5.0, 3600.0))
        jump_s = choose.choice((0.0, 0.0, 0.0, 1e6))
        generation += round((pause_s + jump_s) * GENERATIONS_PER_S)
        before, waited = waited, counted(waited, generation)
        true_s += min(STEP_S, pause_s + jump_s)
        assert 0 <= waited.seconds - before.seconds <= STEP_S + 1e-9
        assert counted(waited, generation) == waited  # each generation counts once, whoever counts it
        assert counted(waited, generation - 1) == waited
    assert waited.seconds == pytest.approx(true_s)
    assert counted(Waited(generation, 0.0), generation + GENERATIONS_PER_S).seconds == 1.0  # after a quorum with a holder


def test_generations_grow_when_the_clock_steps_back() -> None:
    assert generation_of(50, [lone(ROOT, seen=40), lone(ROOT, 1, seen=10)]) == 50
    behind = generation_of(7, [lone(ROOT, seen=40), lone(ROOT, 1, seen=60)])
    assert 61 <= behind <= 61 + GENERATIONS_PER_S
    others = generation_of(7, [lone(ROOT, seen=60), lone(ROOT, 1, incarnation=2, seen=10)])
    assert others != behind  # found by a seed: a quorum of other incarnations had the generation of one that was gone


# ---- the machine


def actions_of(kind: type, actions: list[p.Action]) -> list[p.Action]:
    return [a for a in actions if isinstance(a, kind)]


def stranded_machine(entries: list[CommitRecord], held: str) -> tuple[StepMachine, Member]:
    machine = StepMachine(0, 1, 1, Log(entries), held, 99)
    (join,) = actions_of(p.Join, machine.on(p.Begin()))
    assert isinstance(join, p.Join)
    return machine, join.me


def test_the_machine_waits_with_evidence_looks_and_goes_on() -> None:
    entries = chain(*[BOTH] * 5)
    head = entries[-1]
    machine, me = stranded_machine(entries, "")
    (wait,) = machine.on(p.Formed(100, (me,)))
    assert wait == p.Wait(100, head, BOTH, 0.0) and machine.phase is Phase.WAITING
    (join,) = machine.on(p.WaitEnded(Evidence(head.hash, ended=BOTH)))
    assert isinstance(join, p.Join)
    (reload,) = machine.on(p.Formed(101, (join.me,)))
    assert reload == p.Reload(-1)  # nothing is held: a checkpoint, else the initial parameters
    (join,) = actions_of(p.Join, machine.on(p.Reloaded(entries[3].hash)))
    assert isinstance(join, p.Join) and join.me.looked == head.hash and join.me.lineage == entries[3].hash
    (exchange,) = actions_of(p.Exchange, machine.on(p.Formed(102, (join.me,))))
    assert isinstance(exchange, p.Exchange) and exchange.contribute
    (append,) = machine.on(p.RankDone(102, 0))
    assert isinstance(append, p.Append) and append.record.parent == entries[3].hash


def test_what_was_being_fetched_when_a_checkpoint_is_read_is_no_state_to_load() -> None:
    """The donor is declared ended while its process lives on and serves: its state may come while the checkpoint is read."""
    entries = chain(*[BOTH] * 5)
    head = entries[-1]
    machine, me = stranded_machine(entries, "")
    donor = Member(1, 0, head.step, head.hash, entries=len(entries))
    (fetch,) = actions_of(p.FetchState, machine.on(p.Formed(100, (me, donor))))
    assert isinstance(fetch, p.FetchState) and fetch.lineage == head.hash
    (join,) = actions_of(p.Join, machine.on(p.RankFailed(100, 0, "peer died")) and machine.on(p.LogRead(())))
    assert isinstance(join, p.Join) and join.me.fetching == head.hash
    machine.on(p.Formed(101, (join.me,)))
    (join,) = machine.on(p.WaitEnded(Evidence(head.hash, ended=BOTH)))
    assert isinstance(join, p.Join)
    (reload,) = actions_of(p.Reload, machine.on(p.Formed(102, (join.me,))))
    assert reload == p.Reload(-1) and machine.phase is Phase.RELOADING
    assert machine.on(p.Fetched(head.hash)) == []
    machine.on(p.Reloaded(entries[3].hash))
    assert machine.held == entries[3].hash


def test_behind_a_standing_record_the_rule_is_checked_again() -> None:
    """Before, a proposal went behind any record of an older generation, however much that superseded."""
    entries = chain(BOTH, BOTH)
    machine, me = stranded_machine(entries, entries[-1].hash)
    machine.on(p.Formed(100, (me,)))
    (append,) = machine.on(p.RankDone(100, 0))
    assert isinstance(append, p.Append)
    first = CommitRecord(3, 50, entries[-1].hash, ((1, 0),), {0: 0, 1: 1}, "run")
    again = machine.on(p.Appended(3, first))[-1]
    assert isinstance(again, p.Append) and again.index == 4  # one straggler's step may be superseded
    second = CommitRecord(4, 60, first.hash, ((1, 0),), {0: 0, 1: 2}, "run")
    assert isinstance(machine.on(p.Appended(4, second))[-1], p.Join)  # two may not
    assert machine.phase is Phase.JOINING


def test_a_holder_in_the_quorum_ends_the_wait() -> None:
    entries = chain(BOTH, BOTH, BOTH)
    machine, me = stranded_machine(entries, entries[0].hash)
    machine.on(p.Formed(100, (me,)))
    (join,) = machine.on(p.WaitEnded(Evidence(entries[-1].hash, waited_s=300.0)))
    assert isinstance(join, p.Join) and join.me.evidence is not None
    holder = Member(1, 0, 3, entries[-1].hash)
    actions = machine.on(p.Formed(101, (join.me, holder)))
    assert actions_of(p.WaitOver, actions) == [p.WaitOver(101, entries[-1])]
    assert actions_of(p.FetchState, actions) == [p.FetchState(entries[-1].hash, (holder,))]
    assert machine.evidence is None
