"""A replica leaves: SIGTERM becomes the key that its leader looks for, and the departure is said to those who stay."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from helixrt.errors import Departed, Retryable
from helixrt.job.finish import ObservedMembership
from helixrt.job.leaving import Departure, TermSignal
from helixrt.protocol.step.lineage import CommitRecord, Log, genesis
from helixrt.protocol.step.machine import StepMachine
from helixrt.protocol.step.quorum import Member
from helixrt.replica.commands import Exit, RankCommand, Save
from helixrt.replica.membership import SoloMembership
from helixrt.replica.run_keys import ended_key, leave_key, saver_key
from helixrt.replica.store import MemoryRunStore
from tests.replica.stand_ins import MoodyStore

ROOT = genesis("run", 2)
FIRST = CommitRecord(1, 1, ROOT.hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")


@pytest.fixture
def before() -> Iterator[object]:
    """The handlers, which must be back afterwards."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield handlers
    assert [signal.getsignal(number) for number in numbers] == handlers


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_to_leave_and_sigterm_after_it_is_not_caught(number: signal.Signals) -> None:
    """A terminal that is closed may send SIGHUP several times."""
    store = MemoryRunStore()
    with TermSignal(store, 1, 2, "r1.pp0") as term:
        term.at_once = False
        os.kill(os.getpid(), number)
        assert store.wait(leave_key(1, 2), 30.0) == f"{number.name} to r1.pp0"
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("before")
def test_a_signal_that_is_ignored_stays_so() -> None:
    """SIGHUP under nohup."""
    own = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with TermSignal(MemoryRunStore(), 0, 0, "r0.pp0"):
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, own) is signal.SIG_IGN


@pytest.mark.usefixtures("before")
def test_before_the_loop_sigterm_ends_the_program_at_once() -> None:
    store = MemoryRunStore()
    with pytest.raises(Departed, match="SIGTERM to r0.pp0"), TermSignal(store, 0, 0, "r0.pp0"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert store.get(leave_key(0, 0)) is None


@pytest.mark.usefixtures("before")
def test_a_process_forked_from_the_rank_dies_of_its_own_sigterm() -> None:
    """Such as a worker of a loader: the rank does not leave."""
    store = MemoryRunStore()
    with TermSignal(store, 0, 0, "r0.pp0") as term:
        term.at_once = False
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert store.get(leave_key(0, 0)) is None


@pytest.mark.usefixtures("before")
def test_a_store_that_is_away_is_asked_again() -> None:
    store = MoodyStore(late=2)
    with TermSignal(store, 0, 0, "r0.pp0") as term:
        term.at_once = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert store.wait(leave_key(0, 0), 10.0)
    assert store.calls == [("put_if_absent", leave_key(0, 0))]


# ---------------------------------------------------------------- the departure


def leaving(members: tuple[Member, ...], store: MemoryRunStore, saves: bool = True) -> list[RankCommand]:
    """What replica 1 tells its ranks when it leaves after the first step, with these members of the newest quorum."""
    told: list[RankCommand] = []
    membership = ObservedMembership(SoloMembership(0.0))
    membership.members = members
    departure = Departure(1, 0, store, membership, saves, told.append, clock=itertools.count().__next__)
    assert departure.due() == ""
    store.put_if_absent(leave_key(1, 0), "drained by the user")
    assert departure.due() == "drained by the user"
    departure.carry_out(StepMachine(1, 0, 1, Log([ROOT, FIRST]), FIRST.hash, 10), departure.due())
    assert store.get(ended_key(1, 0)) is not None, "the others do not wait for it"
    with pytest.raises(Retryable):
        membership.join(members[0], 0.1)
    return told


def account(replica: int, lineage: str = ROOT.hash, incarnation: int = 0) -> Member:
    return Member(replica, incarnation, 0, lineage)


GONE = Exit("drained by the user; the replica left after step 1")


def test_while_another_one_stays_nothing_is_saved() -> None:
    assert leaving((account(0), account(1)), MemoryRunStore()) == [GONE]


OTHERS = ("alone", "the other leaves", "the other has ended", "the other holds nothing", "the other is behind")


@pytest.mark.parametrize("why", OTHERS)
def test_if_nobody_stays_the_state_is_saved_first(why: str) -> None:
    store = MemoryRunStore()
    other = {
        "alone": (),
        "the other holds nothing": (account(0, "", incarnation=1),),
        "the other is behind": (account(0, ROOT.hash, incarnation=1),),  # it fetches, or took part in the first step with zeros
    }.get(why, (account(0),))
    members = (*other, account(1))
    if why == "the other leaves":
        store.put_if_absent(leave_key(0, 0), "SIGTERM")
    if why == "the other has ended":
        store.put_if_absent(ended_key(0, 0), "yes")
    assert leaving(members, store) == [Save(FIRST, departs=True), GONE]


def test_of_replicas_that_leave_together_one_saves() -> None:
    store, members = MemoryRunStore(), (account(0, FIRST.hash), account(1, FIRST.hash))
    store.put_if_absent(leave_key(0, 0), "SIGTERM")
    store.put_if_absent(saver_key(FIRST.hash), "(0, 0)")
    assert leaving(members, store) == [GONE]
    later = MemoryRunStore()
    later.put_if_absent(saver_key(FIRST.hash), "(0, 0)")
    assert leaving((account(1),), later) == [Save(FIRST, departs=True), GONE], "of a replica that has gone it is not known"


def test_without_checkpoints_nothing_is_saved() -> None:
    assert leaving((account(1),), MemoryRunStore(), saves=False) == [GONE]
