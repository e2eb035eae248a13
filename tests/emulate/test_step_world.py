"""The step protocol under seeded faults: one lineage always, every batch exactly once, nobody redoes work.

A failing seed prints the line that replays it (`python -m helixrt.emulate.step_world --seed …`).
"""

from __future__ import annotations

from collections import Counter

import pytest

from helixrt.emulate.step_world import FAULTS, StepWorld, Violation
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.machine import Phase, StepMachine
from tests.emulate.sweeps import SWEEP_LIMIT_S, sweep_all

SEEDS = 1_000
SLOW_SEEDS, PARTS = 20_000, 8
HARD_CASES = ("crashes", "superseded", "retried", "fetches", "repaired")
SCHEDULES = (FAULTS, FAULTS, ("crash",), ("crash", "store"), ("crash", "pause"), ("crash", "partition"))


def world(seed: int) -> StepWorld:
    """2 to 5 replicas, 1 to 3 rings, and a mixture of faults, all from the seed."""
    return StepWorld(seed, 2 + seed % 4, 1 + seed // 4 % 3, 6, SCHEDULES[seed // 12 % len(SCHEDULES)])


def sweep(seeds: range) -> tuple[Counter[str], list[str]]:
    totals: Counter[str] = Counter()
    violations = []
    for seed in seeds:
        try:
            verdict = world(seed).run()
        except Violation as broken:
            violations.append(str(broken))
            continue
        totals.update({what: getattr(verdict, what) for what in HARD_CASES})
    return totals, violations


def test_many_seeds_keep_one_lineage_and_every_batch_once(seed: int) -> None:
    sweep_all(sweep, seed, SEEDS, HARD_CASES)


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_LIMIT_S)
@pytest.mark.parametrize("part", range(PARTS))
def test_20000_seeds_keep_one_lineage_and_every_batch_once(part: int, seed: int) -> None:
    sweep_all(sweep, seed, SLOW_SEEDS // PARTS, HARD_CASES)


def test_a_seed_replays_exactly() -> None:
    assert world(4242).run() == world(4242).run()


def test_without_faults_nothing_is_retried() -> None:
    verdict = StepWorld(7, replicas=4, rings=3, faults=()).run()
    assert (verdict.retried, verdict.superseded, verdict.fetches, verdict.left_out) == (0, 0, 0, 0)


def careless_append(self: StepMachine, event: p.Appended) -> list[p.Action]:
    """Believes that whatever stands in the log is what it has summed."""
    self._learn([event.standing])
    self.held = event.standing.hash
    return [p.Apply(event.standing), *self._next_step()]


def eager_apply(self: StepMachine, event: p.RingDone | p.RingFailed) -> list[p.Action]:
    """Takes the first ring that is done for all of them."""
    if self.attempt is None or event.generation != self.attempt.generation or self.phase is not Phase.EXCHANGING:
        return []
    if isinstance(event, p.RingFailed):
        self.epoch = -1
        self.phase = Phase.SETTLING
        return [p.ReadLog(len(self.log))]
    self.phase = Phase.COMMITTING
    return [p.Append(len(self.log), self.attempt.candidate)]


@pytest.mark.parametrize(("method", "broken"), [("_appended", careless_append), ("_ring", eager_apply)])
def test_the_world_notices_a_wrong_protocol(monkeypatch: pytest.MonkeyPatch, method: str, broken: object) -> None:
    monkeypatch.setattr(StepMachine, method, broken)
    with pytest.raises((Violation, AssertionError, KeyError)):
        for seed in range(200):
            StepWorld(seed, replicas=3, rings=2, steps=6).run()


def test_contributors_forget_a_fetch_that_no_longer_matters() -> None:
    """Found by seed 2424: a late fetch replaced the state of a replica that had become the only healthy one."""
    StepWorld(2424, replicas=2, rings=1, steps=6).run()
