"""The short way through the rules of a quorum gives what the rules give, or nothing."""

from __future__ import annotations

import random

from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.quorum import Member, Overflow, StepRules, Unusable, assess, by_the_rules, usual


def a_log(chance: random.Random) -> Log:
    log = Log([genesis("run", 4)])
    for generation in range(1, chance.randrange(1, 6)):
        parent = log.head if chance.random() < 0.8 else chance.choice(log.entries)
        log.append(CommitRecord(parent.step + 1, generation, parent.hash, ((0, 0), (1, 0)), {0: 1}, "run"))
    return log


def a_member(chance: random.Random, replica: int, log: Log, odd: float) -> Member:
    record = chance.choice(log.entries) if chance.random() < odd else log.head
    base = chance.choice([record.hash, log.head.hash])
    return Member(
        replica,
        chance.randrange(2),
        record.step,
        record.hash if chance.random() > odd / 4 else "",
        entries=len(log),
        unusable=Unusable(base, 0) if chance.random() < odd / 2 else None,
        overflow=Overflow(base, (0, 1)) if chance.random() < odd / 2 else None,
        blames=((chance.randrange(4), 0),) if chance.random() < odd / 2 else (),
        breaks=chance.randrange(3),
        sits_until=chance.choice([0, 5, 15]) if chance.random() < odd else 0,
        pauses=chance.randrange(2),
        overtaken=chance.randrange(4),
        held_since=chance.randrange(2),
    )


def test_it_gives_what_the_rules_give(seed: int) -> None:
    taken = 0
    for number in range(2000):
        chance = random.Random(seed + number)
        log, odd = a_log(chance), chance.choice([0.0, 0.1, 0.5])
        members = [a_member(chance, replica, log, odd) for replica in chance.sample(range(4), chance.randrange(1, 5))]
        rules, life, steps = StepRules(overtaken=2), 0, chance.choice([0, log.head.step])
        expected = by_the_rules(members, log, 10, rules, life, steps)
        found = usual(members, log, 10)
        assert found is None or found == expected, f"seed {seed + number}: {members}"
        assert assess(members, log, 10, rules, life, steps) == expected
        taken += found is not None
    assert taken > 400
