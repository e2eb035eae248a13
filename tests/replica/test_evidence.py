"""Holder entries, ends, the counter of waiting and the fence, over a store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from helixrt.errors import StartAgain
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.supersede import GENERATIONS_PER_S
from helixrt.replica.evidence import Holders
from helixrt.replica.run_keys import accepted_key, ended_key
from helixrt.replica.store import MemoryRunStore

ROOT = genesis("run", 2)
BOTH = ((0, 0), (1, 0))


def log_of(steps: int) -> Log:
    entries = [ROOT]
    for step in range(1, steps + 1):
        entries.append(CommitRecord(step, step, entries[-1].hash, BOTH, {0: step, 1: step}, "run"))
    return Log(entries)


def test_an_incarnation_that_has_ended_is_stopped_and_its_successor_says_so() -> None:
    store = MemoryRunStore()
    old, new = Holders(store, 1, 0), Holders(store, 1, 1)
    old.check_fence()
    new.end_predecessors()
    new.check_fence()
    with pytest.raises(StartAgain, match="incarnation 0 of replica 1 was declared ended"):
        old.check_fence()


def test_evidence_names_holders_on_the_chain_and_who_has_ended() -> None:
    store, log = MemoryRunStore(), log_of(3)
    Holders(store, 1, 1).claim(log.entries[1].hash, log)
    Holders(store, 1, 2).claim("of another chain", log)
    store.put_if_absent(ended_key(0, 0), "yes")
    found = Holders(store, 0, 1).evidence(log, log.head, BOTH, 100)
    assert found.head == log.head.hash and found.holders == ((1, 1),) and found.ended == ((0, 0),)
    assert found.waited_s == 0.0 and not found.accepted
    store.put_if_absent(ended_key(1, 1), "yes")
    store.put_if_absent(accepted_key(log.head.hash), "yes")
    found = Holders(store, 0, 1).evidence(log, log.head, BOTH, 200)
    assert found.ended == ((0, 0), (1, 1)) and found.accepted


def test_whoever_fetched_from_one_that_ended_is_among_the_holders() -> None:
    """The entry is written between two reads: ended is read first, so the later read of entries has it."""
    log = log_of(3)

    class Racing(MemoryRunStore):
        def get(self, key: str) -> str | None:
            value = super().get(key)
            if key == ended_key(0, 0) and value is None:  # right after this answer: it serves a fetch, then ends
                self.put_if_absent("holders/0", f'[1, 5, "{log.head.hash}"]')
                self.put_if_absent(ended_key(0, 0), "yes")
            return value

    found = Holders(Racing(), 2, 1).evidence(log, log.head, ((0, 0),), 100)
    assert (1, 5) in found.holders and (1, 5) not in found.ended


def test_one_entry_on_the_chain_is_enough_and_entries_of_several_stand_side_by_side() -> None:
    store, log = MemoryRunStore(), log_of(2)
    one, other = Holders(store, 0, 1), Holders(store, 1, 1)
    one.claim(ROOT.hash, log)
    other.claim(ROOT.hash, log)
    one.claim(log.head.hash, log)
    assert store.get("holders/2") is None and store.get("holders/1") is not None
    superseding = CommitRecord(2, 9, log.entries[1].hash, ((0, 0),), {0: 2, 1: 1}, "run")
    claimed = Holders(store, 0, 2)
    claimed.claim(log.head.hash, log)
    log.append(superseding)
    claimed.claim(superseding.hash, log)  # the first one is off the chain now
    assert store.get("holders/3") is not None


@pytest.mark.parametrize("members", [1, 3])
def test_each_quorum_is_counted_once_whoever_counts_it(members: int) -> None:
    store, log = MemoryRunStore(), log_of(3)
    views = [Holders(store, replica, 1) for replica in range(members)]
    ask: Callable[[Holders, int], float] = lambda view, at: view.evidence(log, log.head, (), at).waited_s  # noqa: E731
    for second in range(0, 50, 5):
        waited = {ask(view, second * GENERATIONS_PER_S) for view in views}
        assert waited == {float(second)}
    assert ask(views[0], 10_000 * GENERATIONS_PER_S) == 55.0  # an outage counts as ten seconds at most
    views[0].wait_over(log.head, 10_001 * GENERATIONS_PER_S)
    assert ask(views[-1], 10_003 * GENERATIONS_PER_S) == 2.0
    fresh, of_before = log_of(4), f"waited/{log.head.hash}/"
    assert any(key.startswith(of_before) for key in store._values)
    assert views[0].evidence(fresh, fresh.head, (), 20_000 * GENERATIONS_PER_S).waited_s == 0.0  # another head
    assert not any(key.startswith(of_before) for key in store._values), "the store of a long run would grow"
