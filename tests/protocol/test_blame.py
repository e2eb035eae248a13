"""Who sits out after broken exchanges: every member decides alike, and the run goes on."""

from __future__ import annotations

import dataclasses
import random

from helixrt.protocol.step.blame import BlameRules, pause_generations, sitting_out
from helixrt.protocol.step.quorum import Member
from helixrt.protocol.step.supersede import GENERATIONS_PER_S

RULES = BlameRules()


def member(replica: int, *blames: int, breaks: int = 1, incarnation: int = 0, sits_until: int = 0) -> Member:
    blamed = tuple((other, 0) for other in blames)
    return Member(replica, incarnation, 3, "base", blames=blamed, breaks=breaks if blames else 0, sits_until=sits_until)


ALL = (0, 1, 2, 3)


def test_whom_a_majority_blames_sits_out_at_once() -> None:
    members = [member(0, 2), member(1, 2), member(2, 0), member(3)]
    assert sitting_out(members, ALL, 10, RULES) == {2}
    assert sitting_out([member(0, 2), member(1), member(2), member(3)], ALL, 10, RULES) == frozenset()


def test_without_a_majority_nothing_happens_for_a_few_breaks() -> None:
    for breaks, out in ((1, set()), (2, set()), (3, {2})):
        members = [member(0, 2, breaks=breaks), member(1), member(2, 0, breaks=breaks)]
        assert sitting_out(members, (0, 1, 2), 10, RULES) == out, breaks


def test_without_a_majority_who_is_behind_sits_out_else_the_higher_id() -> None:
    members = [member(0, 2, breaks=3), member(1), member(2, 0, breaks=3)]
    assert sitting_out(members, (0, 1, 2), 10, RULES) == {2}
    assert sitting_out(members, (1, 2), 10, RULES) == {0}  # replica 0 is behind


def test_one_that_sat_out_before_and_breaks_the_exchange_again_sits_out_at_once() -> None:
    returned = dataclasses.replace(member(0, 2), pauses=1)
    assert sitting_out([returned, member(1), member(2, 0)], (0, 1, 2), 10, RULES) == {0}
    bystander = dataclasses.replace(member(1), pauses=1)
    assert sitting_out([member(0, 2), bystander, member(2, 0)], (0, 1, 2), 10, RULES) == frozenset()


def test_blame_of_an_earlier_incarnation_says_nothing_of_the_next() -> None:
    members = [member(0, 2, breaks=5), member(1, 2, breaks=5), member(2, incarnation=1)]
    assert sitting_out(members, (0, 1, 2), 10, RULES) == frozenset()


def test_who_sits_stays_out_until_its_generation() -> None:
    members = [member(0), member(1, sits_until=20), member(2)]
    assert sitting_out(members, (0, 1, 2), 19, RULES) == {1}
    assert sitting_out(members, (0, 1, 2), 20, RULES) == frozenset()


def test_the_only_holder_of_the_base_takes_part_and_its_accusers_do_not() -> None:
    members = [member(0), member(1, 0), member(2, 0)]
    assert sitting_out(members, (0,), 10, RULES) == {1, 2}


def test_pauses_grow_up_to_a_limit() -> None:
    seconds = [pause_generations(n, RULES) / GENERATIONS_PER_S for n in (1, 2, 3, 9, 99)]
    assert seconds == [2.0, 4.0, 8.0, 60.0, 60.0]


def test_somebody_always_holds_the_base_and_order_does_not_matter(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(3000):
        count = choose.randint(1, 6)
        members = [
            member(
                r,
                *choose.sample(range(count), choose.randint(0, count)),
                breaks=choose.randint(1, 5),
                sits_until=choose.choice((0, 0, 0, 99)),
            )
            for r in range(count)
        ]
        holders = choose.sample(range(count), choose.randint(1, count))
        out = sitting_out(members, holders, 10, RULES)
        assert set(holders) - out, (members, holders)
        shuffled = choose.sample(members, count)
        assert sitting_out(shuffled, holders, 10, RULES) == out
        blamed = {b for m in members for b, _ in m.blames if b != m.replica}
        accusing = {m.replica for m in members if m.blames}
        assert out <= blamed | accusing | {m.replica for m in members if m.sits_until > 10}
        calm = [dataclasses.replace(m, blames=(), sits_until=0) for m in members]
        assert not sitting_out(calm, holders, 10, RULES)
