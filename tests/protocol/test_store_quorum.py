"""Quorums over a simulated store: members die, stop, give up and come again while their operations interleave at random."""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from helixrt.protocol.store_quorum import (
    MOST_S,
    Delete,
    Get,
    Id,
    Operation,
    Over,
    Pause,
    PutIfAbsent,
    Quorum,
    QuorumRules,
    Reply,
    Set,
    Stamp,
    StoreQuorum,
    may_form,
)

RULES = QuorumRules(silent_s=1.0, join_s=4.0)
BEAT_S = 0.1
SEEDS, SLOW_SEEDS = 40, 400


@dataclass
class World:
    """One store and one clock. A step of the world is one operation of one member, or a pause of the clock."""

    random: random.Random
    now_s: float = 0.0
    values: dict[str, str] = field(default_factory=dict)
    members: dict[Id, Process] = field(default_factory=dict)
    formed: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # generation -> the accounts that a member accepted
    clock_skew_us: int = 0

    def execute(self, operation: Operation) -> Reply:
        value: str | None = None
        match operation:
            case Get(key):
                value = self.values.get(key)
            case Set(key, new):
                self.values[key] = new
            case PutIfAbsent(key, new):
                value = self.values.setdefault(key, new)
            case Delete(key):
                self.values.pop(key, None)
            case Stamp():
                value = str(int(self.now_s * 1e6) + self.clock_skew_us)
        return Reply(value, self.now_s)

    def start(self, replica: int, incarnation: int) -> Process:
        process = self.members[replica, incarnation] = Process(self, (replica, incarnation))
        return process

    def end(self, member: Id, told: bool) -> None:
        """The process is killed; `told`: the driver says so."""
        del self.members[member]
        if told:
            self.values[ended(*member)] = "yes"

    def turn(self) -> None:
        """One operation of a random member that can go on; the clock goes on where none can, and now and then."""
        able = [m for m in self.members.values() if m.wakes_s <= self.now_s]
        if able and self.random.random() < 0.97:
            self.random.choice(able).turn()
        else:
            self.now_s += 0.01


def ended(replica: int, incarnation: int) -> str:
    return f"ended/{replica}/{incarnation}"


class Process:
    """Joins again and again. Its signs of life come between its operations, but not while it is stopped."""

    def __init__(self, world: World, me: Id) -> None:
        self.world, self.me = world, me
        self.quorums = StoreQuorum(me, RULES, ended)
        self.running: Generator[Operation, Reply, Any] = self.quorums.announce()
        self.reply: Reply | None = None
        self.announced = False
        self.account: Mapping[str, Any] = {}
        self.accepted: list[Quorum] = []
        self.over = ""
        self.wakes_s = self.beat_s = 0.0
        self.rests = False  # joins no more
        self.asked: set[str] = set()  # keys of its operations

    def turn(self) -> None:
        if self.announced and self.world.now_s >= self.beat_s:
            self.beat_s = self.world.now_s + BEAT_S
            self.world.execute(self.quorums.beat())
            return
        if self.rests or self.over:
            self.wakes_s = self.world.now_s + BEAT_S
            return
        try:
            operation = next(self.running) if self.reply is None else self.running.send(self.reply)
        except StopIteration as end:
            self.announced = True
            if end.value is not None:
                self.accept(end.value)
            self.ask()
            return
        except Over as over:
            self.over = str(over)
            return
        self.reply = self.world.execute(operation)
        self.asked |= {operation.key} if isinstance(operation, Get | Set | PutIfAbsent) else set()
        if isinstance(operation, Pause):
            self.wakes_s = min(self.world.now_s + operation.seconds, self.beat_s)

    def accept(self, quorum: Quorum) -> None:
        seen = self.accepted[-1].generation if self.accepted else 0
        assert quorum.generation > seen, f"{self.me} accepted {quorum.generation} after {seen}"
        assert self.account in quorum.accounts
        first = self.world.formed.setdefault(quorum.generation, quorum.accounts)
        assert first == quorum.accounts, f"two member lists of generation {quorum.generation}"
        self.accepted.append(quorum)

    def ask(self) -> None:
        seen = self.accepted[-1].generation if self.accepted else 0
        self.account = {"replica": self.me[0], "incarnation": self.me[1], "step": len(self.accepted), "seen": seen}
        self.running, self.reply = self.quorums.join(self.account), None

    def give_up(self) -> None:
        """As a caller whose time is over, who then asks again."""
        if self.announced and not self.over:
            self.world.execute(self.quorums.withdraw())
            self.ask()


def members_of(quorum: Quorum) -> list[Id]:
    return [(account["replica"], account["incarnation"]) for account in quorum.accounts]


def settle(world: World, limit_s: float) -> Quorum:
    """Until all living members have accepted the same newest quorum, of which they are the members."""
    until = world.now_s + limit_s
    living = sorted(world.members)
    while world.now_s < until:
        for _ in range(20):
            world.turn()
        newest = [process.accepted[-1] for process in world.members.values() if process.accepted]
        best = max(newest, key=lambda quorum: quorum.generation, default=None)
        if best is not None and members_of(best) == living and all(q == best for q in newest) and len(newest) == len(living):
            return best
    raise AssertionError(f"no common quorum of {living} within {limit_s} s")


def disturb(world: World, incarnations: dict[int, int]) -> None:
    what, replica = (
        world.random.choice(["kill", "kill", "stop", "give up", "skew", "start"]),
        world.random.choice(list(incarnations)),
    )
    me = (replica, incarnations[replica])
    if what == "start" or me not in world.members:
        incarnations[replica] += 1  # the one before may still run
        world.start(replica, incarnations[replica])
    elif what == "kill" and len(world.members) > 1:
        world.end(me, told=world.random.random() < 0.5)
    elif what == "stop":
        stopped = world.members[me]
        stopped.wakes_s = stopped.beat_s = world.now_s + world.random.choice([0.5, 2.0, 8.0])
    elif what == "give up":
        world.members[me].give_up()
    elif what == "skew":
        world.clock_skew_us = world.random.randint(-5_000_000, 5_000_000)


@pytest.mark.parametrize("seed", [*range(SEEDS), *(pytest.param(s, marks=pytest.mark.slow) for s in range(SEEDS, SLOW_SEEDS))])
def test_members_agree_whatever_dies_stops_or_comes_again(seed: int) -> None:
    world = World(random.Random(seed))
    replicas = world.random.randint(1, 5)
    incarnations = dict.fromkeys(range(replicas), 0)
    for replica in range(replicas):
        world.start(replica, 0)
    for _ in range(world.random.randint(0, 12)):
        for _ in range(world.random.randint(0, 600)):
            world.turn()
        disturb(world, incarnations)
    for replica, incarnation in incarnations.items():  # at last one of each replica runs
        if (replica, incarnation) not in world.members:
            incarnations[replica] += 1
            world.start(replica, incarnations[replica])
    for member in [m for m in world.members if m[1] < incarnations[m[0]]]:
        world.end(member, told=False)
    settle(world, 30.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("told", [True, False])
def test_a_dead_member_is_dropped_within_the_limit(seed: int, told: bool) -> None:
    world = World(random.Random(seed))
    for replica in range(3):
        world.start(replica, 0)
    settle(world, 30.0)
    world.end((1, 0), told)
    before = world.now_s
    assert members_of(settle(world, RULES.silent_s * 2)) == [(0, 0), (2, 0)]
    if told:
        assert world.now_s - before < RULES.silent_s / 2


@pytest.mark.parametrize("seed", range(6))
def test_a_member_that_lives_and_does_not_ask_is_waited_for_as_long_as_the_rule_says(seed: int) -> None:
    world = World(random.Random(seed))
    for replica in range(3):
        world.start(replica, 0)
    settle(world, 30.0)
    resting = world.members[2, 0]
    before, resting.rests = world.now_s, True
    others = [process for member, process in world.members.items() if member[0] != 2]
    accepted = [len(process.accepted) for process in others]
    while any(members_of(process.accepted[-1]) != [(0, 0), (1, 0)] for process in others):
        assert world.now_s < before + 2 * RULES.join_s
        world.turn()
    assert world.now_s - before > RULES.join_s / 2
    assert all(len(process.accepted) - many <= 2 for process, many in zip(others, accepted, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_a_joiner_is_in_the_next_quorum_but_one(seed: int) -> None:
    world = World(random.Random(seed))
    world.start(0, 0), world.start(1, 0)
    settle(world, 30.0)
    joiner = world.start(2, 0)
    while not joiner.announced:
        world.turn()
    asked = None
    while not joiner.accepted:
        world.turn()
        if asked is None and "ask/2:0" in " ".join(world.values):
            asked = max(world.formed, default=0)
    later = [generation for generation in sorted(world.formed) if asked is not None and generation > asked]
    assert later.index(joiner.accepted[0].generation) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_nobody_misses_a_round_in_quiet_times(seed: int) -> None:
    world = World(random.Random(seed))
    for replica in range(4):
        world.start(replica, 0)
    settle(world, 30.0)
    counts = {process: len(process.accepted) for process in world.members.values()}
    first = max(process.accepted[-1].generation for process in world.members.values())
    while min(len(process.accepted) - many for process, many in counts.items()) < 50:
        world.turn()
    found = [[q for q in process.accepted if q.generation > first][:49] for process in world.members.values()]
    assert all(quorums == found[0] for quorums in found) and all(len(q.accounts) == 4 for q in found[0])


def test_the_operations_of_a_quorum_grow_with_the_members_and_not_with_their_square() -> None:
    """Different keys are counted, since the number of looks at one depends on how long the others take."""
    most: dict[int, list[int]] = {}
    for replicas in (4, 8, 16, 32):
        world = World(random.Random(replicas))
        for replica in range(replicas):
            world.start(replica, 0)
        processes = list(world.members.values())
        while min(len(process.accepted) for process in processes) < 6:
            for process in processes:
                if process.wakes_s <= world.now_s:
                    process.turn()
                if len(process.accepted) == 1:
                    process.asked.clear()  # of the start
            world.now_s += 0.0005
        assert all(len(quorum.accounts) == replicas for process in processes for quorum in process.accepted[1:])
        most[replicas] = sorted(len(process.asked) for process in processes)
    assert all(counts[-3] <= 40 for counts in most.values()), most  # of five quorums; without those that look at all others
    assert most[32][-1] <= 40 + 3 * 32


@pytest.mark.parametrize(("replicas", "request_s"), [(40, 0.0005), (4, 0.02), (12, 0.01)])
def test_quorums_form_where_each_request_takes_its_time(replicas: int, request_s: float) -> None:
    """Also where a look at all others takes longer than the time between two looks."""
    world = World(random.Random(replicas))
    for replica in range(replicas):
        world.start(replica, 0)
    processes = list(world.members.values())
    while min(len(process.accepted) for process in processes) < 4:
        process = min(processes, key=lambda each: each.wakes_s)
        world.now_s = max(world.now_s, process.wakes_s)
        process.turn()
        process.wakes_s = max(process.wakes_s, world.now_s + request_s)
        assert world.now_s < 30.0
    assert all(len(process.accepted[-1].accounts) == replicas for process in processes)


def test_old_rounds_are_emptied_and_a_joiner_finds_the_newest() -> None:
    world = World(random.Random(0))
    world.start(0, 0)
    while len(world.members[0, 0].accepted) < 300:
        world.turn()
    rounds = [value for key, value in world.values.items() if key.startswith("quorum/formed/")]
    assert sum(value != "-" for value in rounds) <= 64
    world.start(1, 0)
    assert members_of(settle(world, 5.0)) == [(0, 0), (1, 0)]


def test_a_member_that_was_stopped_for_many_rounds_does_not_begin_an_old_one() -> None:
    world = World(random.Random(1))
    for replica in range(2):
        world.start(replica, 0)
    settle(world, 30.0)
    stopped = world.members[1, 0]
    stopped.wakes_s = stopped.beat_s = 1e9
    many = len(world.members[0, 0].accepted)
    while len(world.members[0, 0].accepted) < many + 200:
        world.turn()
    stopped.wakes_s = stopped.beat_s = world.now_s
    settle(world, 5.0)


@pytest.mark.parametrize("seed", range(4))
def test_generations_follow_the_time_while_the_clock_of_the_proposer_is_behind(seed: int) -> None:
    """They are the clock of pauses and of waiting."""
    world = World(random.Random(seed))
    for replica in range(3):
        world.start(replica, 0)
    before, begin_s = settle(world, 30.0).generation, world.now_s
    assert before < 1e6 * begin_s
    world.clock_skew_us = -3_600_000_000
    process, pause_us = world.members[2, 0], 2_000_000
    while process.accepted[-1].generation < before + pause_us:
        assert world.now_s < begin_s + 2 * pause_us / 1e6
        world.turn()
    assert world.now_s > begin_s + 0.8 * pause_us / 1e6
    world.end((0, 0), told=True)  # another one proposes
    before, begin_s = settle(world, 30.0).generation, world.now_s
    while process.accepted[-1].generation < before + pause_us:
        assert world.now_s < begin_s + 2 * pause_us / 1e6
        world.turn()
    world.now_s += 1000.0  # no member was scheduled
    before, rounds = process.accepted[-1].generation, len(process.accepted)
    while len(process.accepted) == rounds:
        world.turn()
    assert before < process.accepted[-1].generation < before + 1.5e6 * MOST_S


def test_an_incarnation_that_ended_or_has_a_successor_is_over() -> None:
    world = World(random.Random(2))
    first = world.start(0, 0)
    settle(world, 30.0)
    world.start(0, 1)
    while not first.over:
        world.turn()
    assert first.over == "replica 0 was started again; incarnation 0 is over"
    del world.members[0, 0]
    world.values[ended(0, 1)] = "yes"
    while not world.members[0, 1].over:
        world.turn()
    assert "the driver saw incarnation 1 of replica 0 end" in world.members[0, 1].over


def test_the_rule() -> None:
    me, other, third = (0, 0), (1, 0), (2, 0)
    assert not may_form(me, None, [other], [], 0.0, 4.0)  # the first round waits for who announced itself
    assert may_form(me, None, [other], [other], 0.0, 4.0)
    assert may_form(me, (me, other), [third], [], 0.0, 4.0)  # `other` does not live, and `third` was no member
    assert not may_form(me, (me, other), [other], [third], 3.9, 4.0) and may_form(me, (me, other), [other], [], 4.0, 4.0)
    assert not may_form(me, (other,), [third], [], 0.0, 4.0)  # of the last quorum nobody lives: as in the first round


def test_accounts_travel_as_json() -> None:
    world = World(random.Random(3))
    process = world.start(0, 0)
    settle(world, 30.0)
    assert json.loads(json.dumps(process.accepted[-1].accounts)) == [dict(account) for account in process.accepted[-1].accounts]
