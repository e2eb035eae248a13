"""The store's process is killed at any moment of the step protocol, and another makes the store again from its journal.

Whatever else fails: one lineage, every batch once, and a committed step is lost only where the rules allow it, as without such
losses. A failing seed prints the line that replays it.
"""

from __future__ import annotations

import random

import pytest

from helixrt.emulate.step_faults import FAULTS, REMADE
from helixrt.emulate.step_journal import StepJournal
from helixrt.emulate.step_node import Violation
from helixrt.emulate.step_world import StepWorld
from helixrt.protocol.step.lineage import Log
from tests.emulate.sweeps import SWEEP_LIMIT_S, SWEEP_SEEDS, SweepOf, sweep_all

SEEDS = 60
CASES = ("remade", "crashes", "superseded", "waits", "reloads", "fetches")
SCHEDULES = (
    (REMADE,),
    (REMADE, "crash"),
    (REMADE, "crash", "pause"),
    (REMADE, "crash", "fence", "partition"),
    (REMADE, REMADE, "outage"),
    (*FAULTS, REMADE, REMADE),
)


def world(seed: int) -> StepWorld:
    return StepWorld(seed, 2 + seed % 4, 1 + seed // 4 % 3, 6, SCHEDULES[seed // 12 % len(SCHEDULES)])


SWEEP = SweepOf(world, CASES, Violation)


@pytest.mark.system
def test_no_step_is_lost_with_the_stores_process(seed: int) -> None:
    sweep_all(SWEEP, seed, SEEDS, ("remade", "crashes"))


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_LIMIT_S)
def test_no_step_is_lost_with_the_stores_process_in_thousands_of_seeds(sweep_part: int, seed: int) -> None:
    sweep_all(SWEEP, seed, SWEEP_SEEDS, CASES)


def test_a_store_that_is_made_again_costs_time_and_nothing_else(seed: int) -> None:
    """Nothing else fails: no record is superseded, no replica starts again."""
    for number in range(seed, seed + 12):
        there = StepWorld(number, 2 + number % 3, 1, 8, (REMADE,))
        verdict = there.run()
        log = Log(there.store.entries)
        assert (verdict.superseded, verdict.crashes, verdict.lost_steps) == (0, 0, 0), there.fail("a step was lost")
        assert len(log.chain()) == len(log)


def test_the_store_that_is_made_again_is_the_one_of_before(seed: int) -> None:
    """At the end of some run, from its whole journal: log, ended incarnations, holder entries and counters of waiting."""
    there = StepWorld(seed, 4, 1, 6, (REMADE, "crash", "outage", "pause"))
    there.run()
    store = there.store
    before = (list(store.entries), set(store.ended), list(store.holders), dict(store.waited))
    journal = there.calls.journal
    assert journal is not None
    journal.make_again(len(journal.data))
    assert (store.entries, store.ended, store.holders, store.waited) == before


def test_the_world_notices_a_journal_that_lacks_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is made again without its newest record, as one would be whose journal is written behind the answers."""
    whole = StepJournal.make_again

    def forgets(self: StepJournal, written: int) -> None:
        lines = self.data[:written].splitlines(keepends=True)
        newest = max(number for number, line in enumerate(lines) if b'["log/' in line)
        kept = lines[:newest] if newest > 2 else lines
        whole(self, sum(map(len, kept)))

    monkeypatch.setattr(StepJournal, "make_again", forgets)
    with pytest.raises(Violation):
        for seed in range(300):
            StepWorld(seed, 2 + seed % 3, 1, 6, (REMADE, "crash")).run()


def test_a_cut_journal_never_has_a_change_in_part() -> None:
    """Every cut of the journal of a run gives a store that the run went through."""
    there = StepWorld(11, 3, 1, 4, (REMADE, "crash"))
    there.run()
    journal = there.calls.journal
    assert journal is not None
    data, entries = journal.data, list(there.store.entries)
    draw = random.Random(11)
    first = data.index(b"\n") + 1
    for cut in sorted((draw.randint(first, len(data)) for _ in range(40)), reverse=True):
        journal.data = data
        journal.make_again(cut)
        assert there.store.entries == entries[: len(there.store.entries)]
