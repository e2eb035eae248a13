"""The step protocol under seeded faults: one lineage always, every batch exactly once, nobody redoes work.

A failing seed prints the line that replays it (`python -m helixrt.emulate.step_world --seed …`).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from helixrt.emulate.step_faults import FAULTS, STOP
from helixrt.emulate.step_node import Violation
from helixrt.emulate.step_world import StepWorld
from helixrt.protocol.step import messages as p
from helixrt.protocol.step import quorum, supersede
from helixrt.protocol.step.attempt import Attempt, Phase
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import StepRules
from helixrt.protocol.step.supersede import Ruling
from tests.emulate.sweeps import SweepOf, sweep_all

HARD_CASES = ("crashes", "superseded", "retried", "fetches", "repaired", "waits", "reloads", "excluded", "lost_steps")
SCHEDULES = (
    FAULTS,
    FAULTS,
    ("crash",),
    ("crash", "store"),
    ("crash", "pause"),
    ("crash", "partition"),
    ("crash", "links"),
    ("crash", "fence", "pause"),
    ("crash", "nonfinite"),
    ("crash", "resume"),
    ("crash", "pause", "clock"),
    ("outage",),
    ("outage", "crash", "pause"),
)


def world(seed: int) -> StepWorld:
    """2 to 5 replicas, 1 to 3 ranks each, and a mixture of faults, all from the seed."""
    return StepWorld(seed, 2 + seed % 4, 1 + seed // 4 % 3, 6, SCHEDULES[seed // 12 % len(SCHEDULES)])


def stopping_world(seed: int) -> StepWorld:
    faults = ((STOP,), (STOP, "crash"), (STOP, "crash", "pause"), (STOP, "crash", "resume"), (STOP, STOP, "outage"))
    return StepWorld(seed, 1 + seed % 4, 1 + seed // 4 % 2, 8, faults[seed // 8 % len(faults)])


@pytest.mark.system
def test_a_run_that_a_program_ends_early_ends_at_one_step_on_all_replicas(seed: int) -> None:
    """Whatever fails meanwhile, nothing follows the record that says so; unless the run is resumed."""
    sweep_all(SweepOf(stopping_world, ("stopped",), Violation), seed, 120, ("stopped",))


def reordering_world(seed: int) -> StepWorld:
    return StepWorld(seed, 2 + seed % 4, 1 + seed // 4 % 3, 6, SCHEDULES[seed // 12 % len(SCHEDULES)], orders=True)


@pytest.mark.system
def test_replicas_that_change_their_schedules_order_never_go_back_to_an_earlier_one(seed: int) -> None:
    """A restarted replica begins with the order that the newest record names for it, whatever failed."""
    sweep_all(SweepOf(reordering_world, ("switched", "crashes"), Violation), seed, 120, ("switched", "crashes"))


def skipping_world(seed: int) -> StepWorld:
    faults = (("partition",), ("partition", "outage"), ("partition", "fence", "pause"), FAULTS)
    return StepWorld(seed, 2 + seed % 3, 1 + seed // 3 % 2, 6, faults[seed // 6 % len(faults)], skips=0.3)


@pytest.mark.system
def test_batches_that_are_not_computed_do_not_bring_back_gradients_of_an_update(seed: int) -> None:
    """No work begins after such an update, and others may supersede it."""
    hard_cases = ("superseded", "excluded", "not_applied", "fetches")
    sweep_all(SweepOf(skipping_world, hard_cases, Violation), seed, 120, hard_cases)


def test_without_faults_every_order_gets_into_the_record_of_the_next_step() -> None:
    world = StepWorld(3, 2, 1, 12, ())
    given: list[int] = []

    def give() -> None:
        for replica, node in world.nodes.items():
            node.machine.on(p.OrderReady(f"for {replica}"))
        given.append(world.store.head.step)

    world.at(3.0, give)
    world.run()
    chain = Log(world.store.entries).chain()
    assert all(not record.orders for record in chain[: given[0] + 1])
    assert all(record.orders == {0: "for 0", 1: "for 1"} for record in chain[given[0] + 3 :])


def test_without_faults_the_run_stops_within_two_steps_of_the_request() -> None:
    world = StepWorld(7, 3, 1, 50, ())
    asked: list[int] = []

    def stop() -> None:
        world.nodes[1].machine.stop = "enough"
        asked.append(world.store.head.step)

    world.at(5.0, stop)
    verdict = world.run()
    assert verdict.stopped == 1 and asked[0] < world.store.head.step <= asked[0] + 2 and world.store.head.last == "enough"


def test_without_faults_nothing_is_retried() -> None:
    verdict = StepWorld(7, replicas=4, group_world_size=3, faults=()).run()
    assert (verdict.retried, verdict.superseded, verdict.fetches, verdict.left_out) == (0, 0, 0, 0)


def careless_append(self: StepMachine, event: p.Appended) -> list[p.Action]:
    """Believes that whatever stands in the log is what it has summed."""
    self._learn([event.standing])
    self.held = event.standing.hash
    return [p.Apply(event.standing), *self._next_step()]


def eager_apply(self: StepMachine, event: p.RankDone | p.RankFailed) -> list[p.Action]:
    """Takes the first rank that is done for all of them."""
    if self.attempt is None or event.generation != self.attempt.generation or self.phase is not Phase.EXCHANGING:
        return []
    if isinstance(event, p.RankFailed):
        self.epoch = -1
        self.phase = Phase.SETTLING
        return [p.ReadLog(len(self.log))]
    self.phase = Phase.COMMITTING
    return [p.Append(len(self.log), self.attempt.candidate)]


def anything_goes(*_: object, **__: object) -> Ruling:
    return Ruling(True)


def nobody_is_missed(log: Log, base: CommitRecord | None, life: int, *_: object, **__: object) -> Ruling:
    return Ruling(base is not None, look=base is None)


def impatient(*args: Any, **named: Any) -> Ruling:
    return supersede.rule(*args, **{**named, "after_s": named["after_s"] / 20})


def never_looks(*args: Any, **named: Any) -> Ruling:
    return supersede.rule(*args, **{**named, "all_looked": True})


def sums_again(self: StepMachine, attempt: Attempt) -> list[p.Action]:
    """Commits a sum that is not finite."""
    return self._commit()


BROKEN = {
    "the append believes what stands": (StepMachine, "_appended", careless_append, ("crash", "pause", "partition", "store")),
    "the first rank decides": (StepMachine, "_rank_answered", eager_apply, ("crash", "pause", "partition", "store")),
    "anything may be superseded": (quorum, "rule", anything_goes, ("outage",)),
    "holders are not waited for": (quorum, "rule", nobody_is_missed, ("outage",)),
    "the wait is a twentieth": (quorum, "rule", impatient, ("outage",)),
    "nobody looks for a checkpoint": (quorum, "rule", never_looks, ("outage",)),
    "a sum that is not finite counts": (StepMachine, "_not_finite", sums_again, ("nonfinite",)),
}


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("rule", BROKEN)
def test_the_world_notices_a_wrong_protocol(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    owner, name, broken, faults = BROKEN[rule]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(Violation):
        for seed in range(600):
            StepWorld(seed, replicas=2 + seed % 3, group_world_size=1 + seed % 2, steps=6, faults=faults).run()


def restart(world: StepWorld, replica: int) -> None:
    """It crashes and is back after 3 s."""
    node = world.nodes[replica]
    world.gone(node)
    world.seen_to_end(node)
    world.at(3.0, lambda: world.boot(replica, node.incarnation + 1))


def rejoined(world: StepWorld) -> bool:
    """Whether every replica that crashed has contributed in a later incarnation."""
    contributors = {c for record in Log(world.store.entries).chain() for c in record.contributors}
    return all(any(r == replica and incarnation > 0 for r, incarnation in contributors) for replica in world.crashed)


def stalls_s(world: StepWorld) -> list[float]:
    """The times between commits that follow each other."""
    times = [world.store.since_s[record.hash] for record in Log(world.store.entries).chain()]
    return [after - before for before, after in itertools.pairwise(times)]


def longest_stall_s(world: StepWorld) -> float:
    return max(stalls_s(world))


@pytest.mark.system
@pytest.mark.parametrize("fetch_steps", [1, 3, 10, 30, 100, 200])
def test_a_replica_comes_back_however_long_its_fetch_takes(fetch_steps: int, seed: int) -> None:
    """A step takes about 1.4 s; at most 5 sets of buckets and one snapshot are kept, which the world checks."""
    fetch_s = 1.4 * fetch_steps
    rules = StepRules(replay=4, hold_s=2.0 * fetch_s + 10)
    world = StepWorld(seed, 2 + seed % 3, 1, 40 + 6 * fetch_steps, (), rules, fetch_s=(fetch_s,))
    world.at(5.0, lambda: restart(world, seed % 2))
    world.run()
    assert rejoined(world)
    assert longest_stall_s(world) < rules.hold_s + 40
    assert bool(world.count["hold"]) is (fetch_steps > 30) or 3 <= fetch_steps <= 30


def test_nobody_waits_longer_than_stated_for_a_fetch(seed: int) -> None:
    """The others go on after `hold_s`, once; the replica catches up when there are no more steps to outrun it."""
    rules = StepRules(replay=4, hold_s=20.0)
    world = StepWorld(seed, 3, 1, 150, (), rules, fetch_s=(100.0,))
    world.at(5.0, lambda: restart(world, 1))
    world.run()
    assert world.count["hold"] and longest_stall_s(world) < rules.hold_s + 30
    assert sum(stall > 15 for stall in stalls_s(world)) <= 2  # the crash itself, and one wait


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
def test_a_cut_between_two_replicas_stops_nobody_else(replicas: int, seed: int) -> None:
    world = StepWorld(seed, replicas, 2, 60, (), cut=((0, 1),))
    world.until_all = False
    verdict = world.run(limit_s=2000.0)
    # A broken exchange takes up to 8 s, a quorum up to 12 s more; a fifth of the breaks blames nobody on one side.
    stalls = sorted(stalls_s(world))
    assert verdict.sat_out and stalls[-1] < 600 and stalls[-2] < 150 and sum(stalls) < 1200
    records = Log(world.store.entries).chain()[1:]
    others = {r for r in range(replicas) if r > 1}
    missing = [sorted(others - set(record.replicas)) for record in records if others - set(record.replicas)]
    assert len(missing) <= 3, missing
    assert all({0, 1} & set(record.replicas) for record in records)
    assert not any({0, 1} <= set(record.replicas) for record in records[1:])


def test_a_replica_that_nobody_reaches_sits_out(seed: int) -> None:
    world = StepWorld(seed, 4, 1, 60, (), cut=((0, 3), (1, 3), (2, 3)))
    world.until_all = False
    verdict = world.run(limit_s=2000.0)
    assert verdict.sat_out and all(record.replicas == (0, 1, 2) for record in Log(world.store.entries).chain()[3:])


def test_contributors_forget_a_fetch_that_no_longer_matters() -> None:
    """Found by seed 2424: a late fetch replaced the state of a replica that had become the only healthy one."""
    StepWorld(2424, replicas=2, group_world_size=1, steps=6).run()
