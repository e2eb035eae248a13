"""The processes of a replica become its next incarnation together, in whatever order they come, are lost and come again.

One world: processes of several starts (attempts) of one replica, the controller and its launcher, a store and a clock. A drawn
list of numbers says what happens next: a process looks, ends, or is lost; the starter begins the next attempt when all have
gone, or while some still live; the server polls. Then the newest attempt is left alone, and must run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import Retryable
from helixrt.job import policies
from helixrt.job.claims import Claim
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.controller import Controller
from helixrt.job.external_launcher import ExternalLauncher, Patience
from helixrt.job.places import coordinates
from helixrt.job.policies import FATAL_EXIT, LEFT_EXIT, RELOAD_EXIT, Options, Phase
from helixrt.job.starters import Place
from helixrt.replica.contracts import RankExit, RankSpec
from helixrt.replica.run_keys import ended_key, exit_key, formed_key, running_key, spec_key
from helixrt.replica.store import MemoryRunStore

SILENT_S = 90.0


@dataclass
class Process:
    claim: Claim
    who: str
    attempt: int
    rank: int
    incarnation: int | None = None  # formed
    spec: RankSpec | None = None


class RecordingLauncher(ExternalLauncher):
    """Keeps the exits that it reports."""

    def poll(self) -> list[RankExit]:
        exits = super().poll()
        self.exits = [*getattr(self, "exits", []), *exits]
        return exits


@dataclass
class World:
    """One replica of `ranks` ranks. `same_name`: its starter cannot tell one start from another."""

    ranks: int
    same_name: bool
    store: MemoryRunStore = field(default_factory=MemoryRunStore)
    now_s: float = 0.0
    attempt: int = 0
    processes: list[Process] = field(default_factory=list)  # that live
    to_come: list[int] = field(default_factory=list)  # ranks of the newest attempt without a process yet
    ended: int = 0

    def __post_init__(self) -> None:
        mesh = MeshConfig(1, 1, dp_shard=self.ranks)
        plain = JobConfig(mesh=mesh).to_plain()

        def specs(replica: int, incarnation: int) -> list[RankSpec]:
            return [RankSpec("r", at, incarnation, "h:1", "", "", "", 0.0, plain) for at in coordinates(mesh, replica)]

        def clock() -> float:
            return self.now_s

        options = Options(1, self.ranks, max_restarts=1000, fatal_restarts=1000, backoff_s=0.01, backoff_max_s=0.01)
        self.launcher = RecordingLauncher(self.store, mesh, Patience(SILENT_S, 1e9, 0.0), clock)
        self.controller = Controller(self.launcher, self.store, specs, options, clock=clock)
        self.controller._feed(policies.Began())
        self.begin()

    def begin(self) -> None:
        """The starter begins the next attempt. A starter that was lost itself may have left processes of the one before; with
        one name for all of its starts nobody could tell these apart."""
        assert not (self.processes and self.same_name)
        self.attempt += 1
        self.to_come = list(range(self.ranks))

    def come(self, number: int) -> None:
        if self.to_come:
            rank = self.to_come.pop(number % len(self.to_come))
            who = f"{self.attempt}.{rank}"
            place = Place("h:1", 0, "", rank, self.ranks, "" if self.same_name else str(self.attempt))
            self.processes.append(Process(Claim(self.store, place, who), who, self.attempt, rank))

    def look(self, process: Process) -> None:
        if process.incarnation is None:
            try:
                process.incarnation = process.claim.look()
            except Retryable:
                self.lose(process, RELOAD_EXIT)
                return
        if process.incarnation is not None and process.spec is None:
            text = self.store.get(spec_key(0, process.incarnation, process.rank))
            process.spec = None if text is None else RankSpec.from_plain(json.loads(text))
        if process.spec is not None and self.store.get(ended_key(0, process.spec.incarnation)) is not None:
            self.lose(process, RELOAD_EXIT)  # as its watch has it
        elif process.spec is not None and process.rank == 0:
            self.store.put_if_absent(running_key(0, process.spec.incarnation), "yes")

    def lose(self, process: Process, code: int) -> None:
        """It ends: with a word for `code`, killed without one for 0. Then the starter ends the others, soon."""
        self.processes.remove(process)
        if code and process.claim.incarnation is not None:
            told = json.dumps({"code": code, "why": process.who})
            self.store.put_if_absent(exit_key(0, process.claim.incarnation, process.rank), told)

    def poll(self) -> None:
        self.now_s += 0.1
        self.controller._round(self.launcher.poll())

    def step(self, number: int) -> None:
        choice, rest = number % 12, number // 12
        living = self.processes[rest % len(self.processes)] if self.processes else None
        if choice <= 1:
            self.poll()
        elif choice <= 3 or living is None:
            self.come(rest)
        elif choice <= 9:
            self.look(living)
        elif choice == 10:
            self.lose(living, (0, 0, FATAL_EXIT, LEFT_EXIT, RELOAD_EXIT)[rest % 5])
        if not self.newest() and not self.whole() or choice == 11 and not self.same_name:
            self.begin()
        self.check()

    def newest(self) -> list[Process]:
        return [process for process in self.processes if process.attempt == self.attempt]

    def whole(self) -> bool:
        """No process of the newest attempt is lost."""
        return len(self.newest()) + len(self.to_come) == self.ranks

    def again(self) -> None:
        """The starter ends what is left, and begins the next attempt."""
        for process in list(self.processes):
            self.lose(process, 0)
        self.begin()

    def check(self) -> None:
        reported = [(e.coordinate, e.incarnation) for e in getattr(self.launcher, "exits", [])]
        assert len(reported) == len(set(reported)), "no rank ends twice"
        for incarnation in range(self.attempt + 1):
            text = self.store.get(formed_key(0, incarnation))
            if text is not None:
                members = [name.split(".") for name in json.loads(text)]
                assert [int(rank) for _, rank in members] == list(range(self.ranks))
                assert len({attempt for attempt, _ in members}) == 1, f"processes of different attempts: {members}"

    def settle(self) -> None:
        """What is left of a broken attempt is ended; the next one is left alone, and must run."""
        for process in [p for p in self.processes if p.attempt < self.attempt]:
            self.lose(process, 0)
        if not self.whole():
            self.again()
        for _ in range(80 + 4 * self.ranks):
            self.come(0)
            for process in list(self.processes):
                self.look(process)
            if not self.whole():  # one was ended for what came before: torchrun starts all again
                self.again()
            self.poll()
            self.check()
            if self.running():
                return

    def running(self) -> bool:
        """The newest attempt runs, as the controller knows."""
        state = self.controller.state.replicas[0]
        specs = [process.spec for process in self.newest()]
        return len(specs) == self.ranks and None not in specs and state.phase is Phase.RUNNING


DRAWN = st.lists(st.integers(0, 12 * 20 - 1), min_size=20, max_size=120)


@settings(deadline=None)
@given(ranks=st.integers(1, 4), same_name=st.booleans(), numbers=DRAWN)
def test_whatever_comes_is_lost_and_comes_again_the_newest_attempt_runs_alone(
    ranks: int, same_name: bool, numbers: list[int]
) -> None:
    world = World(ranks, same_name)
    for number in numbers:
        world.step(number)
    world.settle()
    assert len(world.processes) == ranks and {p.attempt for p in world.processes} == {world.attempt}
    found = [p.spec for p in world.processes]
    assert all(spec is not None for spec in found), "every rank was told that it may begin"
    incarnations = {spec.incarnation for spec in found if spec is not None}
    assert len(incarnations) == 1, "all ranks are one incarnation"
    places = {p.rank: p.spec.coordinate.dp_shard for p in world.processes if p.spec is not None}
    assert places == {rank: rank for rank in range(ranks)}
    state = world.controller.state.replicas[0]
    assert (state.phase, state.incarnation) == (Phase.RUNNING, incarnations.pop())
    assert world.store.get(ended_key(0, state.incarnation)) is None
    over = {(e.coordinate, e.incarnation) for e in world.launcher.exits}
    assert all(incarnation < state.incarnation for _, incarnation in over)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_order_in_which_the_ranks_come_and_look(ranks: int) -> None:
    orders = list(permutations(range(ranks)))
    for coming in orders:
        for looking in orders:
            store = MemoryRunStore()
            claims = {rank: Claim(store, Place("h:1", 0, "", rank, ranks, "a"), str(rank)) for rank in coming}
            for _ in range(3):
                found = {rank: claims[rank].look() for rank in looking}
            assert found == {rank: 0 for rank in range(ranks)}


def processes(store: MemoryRunStore, attempt: str, start: int = 0) -> Callable[[int], Claim]:
    return lambda rank: Claim(store, Place("h:1", 0, "", rank, 2, attempt), f"{attempt}.{start}.{rank}")


def test_a_rank_leaves_a_claim_whose_process_has_gone() -> None:
    """The starter gives both starts one name (a static rendezvous): rank 0 of the first claims and is lost."""
    store = MemoryRunStore()
    assert processes(store, "a")(0).look() is None
    again = processes(store, "a", start=1)
    second, first = again(1), again(0)
    assert second.look() is None and second.incarnation == 0, "the only claim there is"
    assert first.look() is None and first.incarnation == 1
    assert second.look() is None and second.incarnation == 1
    assert first.look() == 1 and second.look() == 1
    assert store.get(formed_key(0, 0)) is None


def test_a_rank_of_another_start_waits_for_its_own() -> None:
    store = MemoryRunStore()
    old, new = processes(store, "a"), processes(store, "b")
    assert old(0).look() is None
    late = new(1)
    assert late.look() is None and late.incarnation is None and "rank 0 of this start" in late.missing()
    first = new(0)
    assert first.look() is None and late.look() is None and (first.look(), late.look()) == (1, 1)


def test_a_claim_that_another_has_followed_is_given_up() -> None:
    store = MemoryRunStore()
    stale, new = processes(store, "a")(0), processes(store, "a", start=1)(0)
    assert stale.look() is None and new._claim() == 1
    store.put_if_absent(ended_key(0, 0), "yes")  # as the server does then
    with pytest.raises(Retryable, match="has begun in place of this process"):
        stale.look()


def test_a_replica_that_comes_after_the_server_has_ended_its_turns_takes_the_present_one() -> None:
    """It waited in a queue for hours; meanwhile the server has given up the lives that nobody began."""
    store, clock = MemoryRunStore(), [0.0]
    mesh = MeshConfig(1, 1, dp_shard=2)
    launcher = ExternalLauncher(store, mesh, Patience(SILENT_S, 100.0, 0.0), lambda: clock[0])
    plain = JobConfig(mesh=mesh).to_plain()
    for incarnation in range(20):
        for at in coordinates(mesh, 0):
            launcher.start(RankSpec("r", at, incarnation, "h:1", "", "", "", 0.0, plain))
        if incarnation < 19:
            clock[0] += 2000.0
            launcher.kill(0)
            assert len(launcher.poll()) == 2
    late = processes(store, "a")
    first, second = late(0), late(1)
    assert first.look() is None and second.look() is None and (first.look(), second.look()) == (19, 19)
    launcher.poll()
    assert store.get(spec_key(0, 19, 0)) is not None and store.get(spec_key(0, 19, 1)) is not None


def test_a_claim_that_the_server_ends_while_it_waits_is_followed_by_another() -> None:
    store = MemoryRunStore()
    first = processes(store, "a")(0)
    assert first.look() is None and first.incarnation == 0
    store.put_if_absent(ended_key(0, 0), "yes")
    assert first.look() is None and first.incarnation == 1
    second = processes(store, "a")(1)
    assert second.look() is None and (first.look(), second.look()) == (1, 1)
