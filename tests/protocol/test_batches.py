"""What leaders see in the digests of batches: ranks of a stream that differ, equal streams, an order that changed."""

from __future__ import annotations

import itertools
import random

import pytest

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.batches import LOOK_BACK, PARTIAL, BatchRules, BatchWatch, combined, of_record
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member, StepRules

PP2_DP2 = BatchRules((0, 1, 0, 1))  # two stages, each of two ranks that read streams of their own


def record(step: int, replicas: int = 2, advance: int = 1) -> CommitRecord:
    contributors = tuple((replica, 0) for replica in range(replicas))
    return CommitRecord(step, step, "", contributors, {replica: step * advance for replica in range(replicas)})


def votes(rules: BatchRules, *replicas: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Of each group rank, where replica r's streams gave `replicas[r]`."""
    return {rank: tuple(streams[stream] for streams in replicas) for rank, stream in enumerate(rules.streams)}


def test_ranks_of_one_stream_that_differ_are_named_at_that_step() -> None:
    watch = BatchWatch(PP2_DP2, 1)
    assert watch.problem(record(1), votes(PP2_DP2, (1, 2), (3, 4))) == ""
    wrong = votes(PP2_DP2, (5, 6), (7, 8))
    wrong[3] = (6, 9)
    assert "ranks 1 and 3 of replica 1 have read different batches for step 2" in watch.problem(record(2), wrong)


def test_a_rank_that_does_not_know_its_digest_differs_from_none() -> None:
    unknown: dict[int, tuple[int, ...]] = {rank: () for rank in range(4)}
    assert BatchWatch(PP2_DP2, 1).problem(record(1), unknown) == "" and of_record(unknown, (0, 1), PP2_DP2) == {}
    one = votes(PP2_DP2, (1, 2), (3, 4)) | {2: (0, 3)}
    assert BatchWatch(PP2_DP2, 1).problem(record(1), one) == "" and of_record(one, (0, 1), PP2_DP2).keys() == {1}


@pytest.mark.parametrize("advance", [1, 2, 4, 100])
def test_two_streams_that_give_the_same_are_refused_after_eight_positions(advance: int) -> None:
    rules, chance = BatchRules((0,)), random.Random(advance)
    watch, steps = BatchWatch(rules, advance), max(2, LOOK_BACK // advance)
    for step in range(1, steps + 1):
        same = chance.randrange(1, 1 << 60)
        said = watch.problem(record(step, 3, advance), votes(rules, (same,), (chance.randrange(1 << 60),), (same,)))
        assert ("stream 0/0 and stream 2/0 have given the same batches" in said) == (step == steps), said
    assert watch.said() == ""


@pytest.mark.parametrize("why", ["allowed", "one differs", "other positions", "one was away", "constant", "not all is known"])
def test_streams_that_are_alike_for_another_reason_are_not_refused(why: str) -> None:
    rules = BatchRules((0,), same=why == "allowed")
    watch, said = BatchWatch(rules, 1), []
    for step in range(1, 4 * LOOK_BACK):
        digest = 7 if why == "constant" else step
        digest |= PARTIAL if why == "not all is known" else 0
        other = 1000 if why == "one differs" and step % LOOK_BACK == 0 else digest
        now = record(step, 1 if why == "one was away" and step % LOOK_BACK == 0 else 2)
        if why == "other positions":
            now = CommitRecord(step, step, "", now.contributors, {0: step, 1: step + 1})
        assert watch.problem(now, votes(rules, (digest,), (other,))) == ""
        said.append(watch.said())
    assert [*filter(None, said)] == (
        ["stream 0/0 has given the same batch in all steps so far: nothing is known of its order"] if why == "constant" else []
    )


def test_streams_of_one_replica_are_compared_too() -> None:
    rules = BatchRules((0, 1))
    watch = BatchWatch(rules, 1)
    said = [watch.problem(record(step, 1), votes(rules, (step, step))) for step in range(1, LOOK_BACK + 1)]
    assert said[-1].startswith("stream 0/0 and stream 0/1 have given the same") and set(said[:-1]) == {""}


def test_one_digest_of_a_replica_depends_on_each_stream_and_their_order() -> None:
    found = {combined(order) for order in itertools.permutations((1, 2, 3))} | {combined((1, 2, 4)), combined((1, 2))}
    assert len(found) == 8 and 0 not in found and combined((5,)) == 5 and combined((1, 0)) == 0


# ---------------------------------------------------------------- in the machine


def machine(rules: BatchRules, log: Log, ranks: int = 1) -> StepMachine:
    made = StepMachine(0, 1, ranks, log, log.head.hash, 9, StepRules(batches=rules))
    made.on(p.Begin())
    return made


def exchanged(made: StepMachine, *done: p.RankDone) -> list[p.Action]:
    """What the last vote gives, in a quorum of this replica and replica 1."""
    held = made.log.head
    other = Member(1, 0, held.step, held.hash, entries=len(made.log))
    made.on(p.Formed(done[0].generation, (made._me(), other)))
    return [action for vote in done for action in made.on(vote)]


def test_the_record_has_the_digests_of_its_contributors() -> None:
    made = machine(BatchRules((0, 0)), Log([genesis("run", 2)]), ranks=2)
    (append,) = exchanged(made, *(p.RankDone(5, rank, batches=(11, 12)) for rank in range(2)))
    assert isinstance(append, p.Append) and append.record.batches == {0: 11, 1: 12}
    assert CommitRecord.from_json(append.record.to_json()) == append.record
    made = machine(BatchRules((0, 0)), Log([genesis("run", 2)]), ranks=2)
    differ = (p.RankDone(5, 0, batches=(1, 2)), p.RankDone(5, 1, batches=(1, 3)))
    assert isinstance(exchanged(made, *differ)[-1], p.Refuse)


def after_one_step(digest: int) -> Log:
    first = genesis("run", 2)
    step = CommitRecord(1, 3, first.hash, ((0, 0), (1, 0)), {0: 4, 1: 4}, "run", batches={0: digest, 1: 9})
    return Log([first, step])


@pytest.mark.parametrize("strict", [False, True])
def test_batches_that_are_others_when_they_are_read_again_are_told_and_stay_in_the_records(strict: bool) -> None:
    rules = BatchRules((0,), strict=strict)
    assert exchanged(machine(rules, after_one_step(8)), p.RankDone(5, 0, batches=(1, 2), read_again=(4, 8)))[0] == p.Append(
        2, exchanged(machine(rules, after_one_step(8)), p.RankDone(5, 0, batches=(1, 2)))[0].record
    )
    made = machine(rules, after_one_step(8))
    told, *more = exchanged(made, p.RankDone(5, 0, batches=(1, 2), read_again=(4, 7)))
    if strict:
        assert isinstance(told, p.Refuse) and "before position 4" in told.reason and not more
        return
    assert isinstance(told, p.Tell) and "before position 4" in told.text and isinstance(more[0], p.Append)
    made.on(p.Appended(2, more[0].record))
    (append,) = exchanged(made, p.RankDone(6, 0, batches=(3, 4), read_again=(4, 7)))
    assert append.record.unsure == {0: 4}


def test_what_was_read_again_of_another_position_or_is_not_known_says_nothing() -> None:
    for again in ((3, 7), (4, 0), None):
        made = machine(BatchRules((0,)), after_one_step(8))
        (append,) = exchanged(made, p.RankDone(5, 0, batches=(1, 2), read_again=again))
        assert isinstance(append, p.Append) and made.unsure == -1
