"""Which initial state a run begins with: one digest, whoever forms the first quorums and whoever is lost meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helixrt.job.genesis import KEY, GenesisDigest, differing
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Assessment, Member, assess
from helixrt.replica.store import MemoryRunStore

ROOT = genesis("run", 4)


def digest_of(store: MemoryRunStore, replica: int, value: str, ranks: int = 1) -> GenesisDigest:
    made = [GenesisDigest(store, f"{replica}/0", rank, ranks, f"{value}{rank}", 1.0) for rank in range(ranks)]
    return made[0]


def holder(replica: int, of: GenesisDigest) -> Member:
    return Member(replica, 0, 0, ROOT.hash, initial=of.mine)


def test_the_lowest_replica_of_the_first_quorum_decides() -> None:
    store, said = MemoryRunStore(), list[str]()
    own = {replica: digest_of(store, replica, "b" if replica == 1 else "a") for replica in (1, 2, 3)}
    members = [holder(replica, own[replica]) for replica in (3, 1, 2)]  # replica 0 is late
    events = {m.replica: own[m.replica].agree(members, m, ROOT.hash, said.append) for m in members}
    assert store.get(KEY) == own[1].mine
    assert isinstance(events[1], p.JoinFailed) and events[2] == events[3] == p.Reloaded("")
    assert len(said) == 2 and "begins with other initial values than the run" in said[0]
    assert own[1].holds() and not own[2].holds()
    late = digest_of(store, 0, "a")
    assert not late.holds(), "who comes later does not decide, however low its number"


def test_without_digests_nothing_is_compared() -> None:
    store = MemoryRunStore()
    none = GenesisDigest(store, "0/0", 0, 1, "", 1.0)
    assert none.holds() and none.mine == "" and store.get(KEY) is None
    assert none.agree([Member(0, 0, 0, ROOT.hash)], Member(0, 0, 0, ROOT.hash), ROOT.hash, print) is None


def test_the_digest_of_a_replica_is_that_of_all_its_ranks() -> None:
    store = MemoryRunStore()
    assert digest_of(store, 0, "a", ranks=2).mine != digest_of(store, 1, "a", ranks=3).mine
    assert digest_of(store, 2, "a", ranks=2).mine == digest_of(store, 3, "a", ranks=2).mine


@pytest.mark.parametrize("seed", range(100))
def test_whatever_quorums_form_all_holders_of_the_genesis_have_one_digest(seed: int) -> None:
    """Quorums of random subsets; members are lost and start again; some answer to a quorum late."""
    chance = random.Random(seed)
    store = MemoryRunStore()
    values = {replica: chance.choice("abc") for replica in range(4)}
    life = dict.fromkeys(values, 0)
    own: dict[int, GenesisDigest] = {}
    account: dict[int, Member] = {}

    def start(replica: int) -> None:
        made = GenesisDigest(store, f"{replica}/{life[replica]}", 0, 1, values[replica], 1.0)
        holds = made.holds()
        own[replica] = made
        account[replica] = Member(replica, life[replica], 0, ROOT.hash if holds else "", initial=made.mine if holds else "")

    for replica in values:
        start(replica)
    went_on = 0
    for _ in range(12):
        inside = chance.sample(sorted(values), chance.randint(1, 4))
        members = [account[replica] for replica in inside]
        found = {}
        for member in chance.sample(members, len(members)):
            if chance.random() < 0.1:  # lost before it answers
                life[member.replica] += 1
                start(member.replica)
                continue
            found[member.replica] = own[member.replica].agree(members, member, ROOT.hash, lambda text: None)
        for replica, event in found.items():
            if event == p.Reloaded(""):
                account[replica] = replace(account[replica], lineage="", step=-1, initial="")
        if found and all(event is None for event in found.values()):
            went_on += 1
            view = assess(members, Log([ROOT]))
            holding = {m.initial for m in members if m.lineage == ROOT.hash and m.initial}
            assert len(holding) <= 1 and holding <= {store.get(KEY)}
            if isinstance(view, Assessment):  # who is behind has fetched it
                for replica in view.behind:
                    account[replica] = replace(account[replica], lineage=ROOT.hash, step=0)
        elif found:
            assert len({event is None for event in found.values()}) == 1, "all members go on, or none does"
    assert went_on > 0


def test_a_quorum_is_compared_by_what_its_members_hold() -> None:
    members = [Member(0, 0, 0, ROOT.hash, initial="a"), Member(1, 0, -1, "", initial="b"), Member(2, 0, 0, ROOT.hash)]
    assert differing(members, ROOT.hash, "a") == ()
    assert differing(members, ROOT.hash, "c") == (0,)


def test_gradients_of_a_state_that_is_given_up_are_not_preserved() -> None:
    """The work on the own initial values had begun; after the agreed ones were fetched it is done anew."""
    machine = StepMachine(1, 0, 1, Log([ROOT]), ROOT.hash, 10)
    assert any(isinstance(action, p.Work) for action in machine.on(p.Begin()))
    actions = machine.on(p.Reloaded(""))
    (join,) = actions
    assert isinstance(join, p.Join) and join.me.lineage == ""
    healthy = Member(0, 0, 0, ROOT.hash)
    actions = machine.on(p.Formed(5, (healthy, join.me)))
    assert any(isinstance(action, p.FetchState) for action in actions)
    machine.on(p.Fetched(ROOT.hash))
    machine.on(p.RankFailed(5, 0, "the other one is lost"))
    actions = machine.on(p.LogRead(()))
    (join,) = [action for action in actions if isinstance(action, p.Join)]
    actions += machine.on(p.Formed(9, (replace(join.me),)))
    assert any(isinstance(action, p.Work) for action in actions), "the batch is worked on with the fetched state"
