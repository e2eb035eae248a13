"""Quorums over a real lighthouse, and over the run's store alone: members in threads, one dies, one comes back."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import pytest

from helixrt.errors import Retryable
from helixrt.protocol.step.quorum import Member
from helixrt.replica.contracts import Formed, Membership
from helixrt.replica.lighthouse_beats_private import library
from helixrt.replica.lost_members import GONE, MOST
from helixrt.replica.membership import SoloMembership, TorchftMembership, serve_lighthouse
from helixrt.replica.run_keys import asks_key, ended_key
from helixrt.replica.store import MemoryRunStore, TcpRunStore, host_store
from helixrt.replica.store_membership import StoreMembership, newest_incarnations
from helixrt.timeouts import Timeouts, derive
from helixrt.transport.monitor.client import unsupported as monitor_unsupported
from tests.leaks import name_of
from tests.waiting import until

TIMEOUTS = dataclasses.replace(derive(5), heartbeat_period_s=0.1, heartbeat_s=1.0, exchange_s=5, join_s=20, start_s=30)
DEADLINE_S = 60.0


def needs_torchft() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed (extra: ft)")


class StoreWorld:
    """A run's store and the members that tests make."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS) -> None:
        self.timeouts = timeouts
        self.server, self.address = host_store()
        self.store = TcpRunStore(self.address)
        self.epoch_s = time.time() - 100
        self.made: list[StoreMembership] = []

    def member(self, replica: int, incarnation: int = 0) -> tuple[StoreMembership, Member]:
        membership = StoreMembership(replica, incarnation, TcpRunStore(self.address), self.timeouts, self.epoch_s)
        self.made.append(membership)
        return membership, account(replica, incarnation)

    def saw_end(self, replica: int, incarnation: int) -> None:
        self.store.put_if_absent(ended_key(replica, incarnation), "yes")

    def nowhere(self) -> Membership:
        """A member whose service cannot be reached."""
        self.made.append(StoreMembership(0, 0, TcpRunStore("127.0.0.1:9", 0.5), self.timeouts, 0.0))
        return self.made[-1]

    def script(self) -> str:
        """Python that makes `m`, a member."""
        return f"""
from helixrt.replica.store import TcpRunStore
from helixrt.replica.store_membership import StoreMembership
from helixrt.timeouts import Timeouts
m = StoreMembership(0, 0, TcpRunStore({self.address!r}), {TIMEOUTS!r}, 0.0)
"""

    def close(self) -> None:
        for membership in self.made:
            membership.close()


def account(replica: int, incarnation: int) -> Member:
    return Member(replica, incarnation, 3, "abc", "def", 7, (f"http://h{replica}:1", "x"))


class World:
    """A lighthouse and the members that tests make."""

    def __init__(self, timeouts: Timeouts = TIMEOUTS) -> None:
        self.timeouts, self.store = timeouts, MemoryRunStore()
        self.server, self.address = serve_lighthouse(timeouts)
        self.epoch_s = time.time() - 100
        self.made: list[TorchftMembership] = []

    def member(self, replica: int, incarnation: int = 0) -> tuple[TorchftMembership, Member]:
        membership = TorchftMembership(replica, incarnation, self.address, self.store, self.timeouts, self.epoch_s)
        self.made.append(membership)
        return membership, account(replica, incarnation)

    def saw_end(self, replica: int, incarnation: int) -> None:
        self.store.put_if_absent(ended_key(replica, incarnation), "yes")

    def nowhere(self) -> Membership:
        self.made.append(TorchftMembership(0, 0, "http://127.0.0.1:9", self.store, TIMEOUTS, 0.0))
        return self.made[-1]

    def script(self) -> str:
        return f"""
from helixrt.replica.membership import TorchftMembership
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import Timeouts
m = TorchftMembership(0, 0, {self.address!r}, MemoryRunStore(), {TIMEOUTS!r}, 0.0)
"""

    def close(self) -> None:
        for membership in self.made:
            membership.close()
        self.server.shutdown()


WORLDS = {"torchft": World, "store": StoreWorld}
AnyWorld = World | StoreWorld


@pytest.fixture(params=WORLDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "torchft":
        needs_torchft()
    return str(request.param)


@pytest.fixture
def world(kind: str) -> Iterator[AnyWorld]:
    world = WORLDS[kind]()
    yield world
    world.close()


@pytest.fixture
def calm(kind: str) -> Iterator[AnyWorld]:
    """Whose members all live, also where their signs of life are seconds late."""
    world = WORLDS[kind](replace(TIMEOUTS, heartbeat_s=300.0, join_s=300.0))
    yield world
    world.close()


@pytest.fixture
def lighthouse() -> Iterator[World]:
    needs_torchft()
    world = World()
    yield world
    world.close()


def join_all(members: Sequence[tuple[Membership, Member]]) -> list[Formed]:
    """Join from a thread each; the results in the members' order."""
    results: list[Formed | BaseException | None] = [None] * len(members)

    def join(index: int) -> None:
        try:
            results[index] = members[index][0].join(members[index][1], DEADLINE_S)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=join, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S + 5)
    formed = []
    for result in results:
        assert isinstance(result, Formed), result
        formed.append(result)
    return formed


def announce_all(members: Sequence[tuple[Membership, Member]]) -> None:
    for membership, _ in members:
        membership.announce()
    time.sleep(3 * TIMEOUTS.heartbeat_period_s)  # the first heartbeats arrive


def test_members_agree_and_generations_grow(calm: AnyWorld) -> None:
    world = calm
    members = [world.member(r) for r in range(4)]
    announce_all(members)
    last = 0
    for _ in range(20):
        formed = join_all(members)
        assert len(set(formed)) == 1
        assert formed[0].members == tuple(me for _, me in members)
        assert formed[0].generation > last
        last = formed[0].generation
    assert 0 < last < (time.time() - world.epoch_s + 1) * 1e6


def test_the_first_quorum_waits_for_all_that_announced(calm: AnyWorld) -> None:
    world = calm
    members = [world.member(r) for r in range(3)]
    announce_all(members)
    early: list[Formed] = []
    threads = [threading.Thread(target=lambda m=m: early.append(m[0].join(m[1], DEADLINE_S))) for m in members[:2]]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    early.append(members[2][0].join(members[2][1], DEADLINE_S))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert [len(f.members) for f in early] == [3, 3, 3]


def test_survivors_form_without_the_dead_and_take_back_the_restarted(world: AnyWorld) -> None:
    members = [world.member(r) for r in range(3)]
    announce_all(members)
    first = join_all(members)[0]
    members[2][0].close()  # its heartbeat stops, as a killed process's does
    second = join_all(members[:2])[0]
    assert [m.replica for m in second.members] == [0, 1]
    restarted = world.member(2, incarnation=1)
    returned: list[Formed] = []
    waiting = threading.Thread(target=lambda: returned.append(restarted[0].join(restarted[1], DEADLINE_S)))
    waiting.start()
    deadline = time.monotonic() + DEADLINE_S
    generations = [first.generation, second.generation]
    while waiting.is_alive():
        assert time.monotonic() < deadline
        latest = join_all(members[:2])[0]
        generations.append(latest.generation)
        if len(latest.members) == 3:
            break
    waiting.join(DEADLINE_S)
    assert returned[0] == latest
    assert latest.members[2] == restarted[1]
    assert generations == sorted(set(generations))


def taken_in(members: Sequence[tuple[Membership, Member]], other: tuple[Membership, Member]) -> Formed:
    """The quorum of these and one that comes. A request in its name that was sent before it asked may keep it out of one."""
    returned: list[Formed] = []
    waiting = threading.Thread(target=lambda: returned.append(other[0].join(other[1], DEADLINE_S)))
    waiting.start()
    deadline = time.monotonic() + DEADLINE_S
    while len((latest := join_all(members)[0]).members) <= len(members):
        assert time.monotonic() < deadline
    waiting.join(DEADLINE_S)
    assert returned == [latest]
    return latest


@pytest.mark.system
def test_nobody_waits_for_a_member_that_the_driver_saw_end(kind: str) -> None:
    """Its heart even beats on, and so do those of its successors, which come and go for as long as the run lasts."""
    world = WORLDS[kind](replace(TIMEOUTS, heartbeat_s=300.0, join_s=300.0))
    try:
        members = [world.member(r) for r in range(3)]
        announce_all(members)
        join_all(members)
        for incarnation in range(MOST + 2):
            world.saw_end(2, incarnation)
            for _ in range(2):
                assert [m.replica for m in join_all(members[:2])[0].members] == [0, 1]
            successor = world.member(2, incarnation + 1)
            for _ in range(2):
                assert taken_in(members[:2], successor).members[2] == successor[1]
        for membership in world.made:
            membership.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("helixrt-lost-member")]
        until(lambda: not [thread for thread in os.listdir("/proc/self/task") if name_of(int(thread)) == "torchft-lhclnt"])
    finally:
        world.close()


def test_of_many_that_ended_the_lighthouse_forgets_some(lighthouse: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = lighthouse
    monkeypatch.setattr("helixrt.replica.lost_members.MOST", 1)
    members = [world.member(r) for r in range(4)]
    announce_all(members)
    join_all(members)
    for replica in (3, 2):
        members[replica][0].close()
        world.saw_end(replica, 0)
    for _ in range(4):  # one of these waits until the heartbeats of the two are too old
        assert [m.replica for m in join_all(members[:2])[0].members] == [0, 1]
    assert len(members[0][0]._lost._others) <= 2


def test_the_others_wait_for_a_restarted_member_only_once_it_has_reached_the_lighthouse(lighthouse: World) -> None:
    membership, me = lighthouse.member(0, 1)
    connect, said = membership._connect, list[str | None]()
    membership._connect = lambda: (said.append(lighthouse.store.get(asks_key(0, 1))), connect())[1]  # type: ignore[method-assign]
    assert membership.join(me, DEADLINE_S).members == (me,)
    assert said[0] is None and lighthouse.store.get(asks_key(0, 1)) == "yes"


def test_a_member_that_others_speak_for_learns_that_it_is_over(lighthouse: World) -> None:
    world = lighthouse
    membership, me = world.member(1)
    created = SimpleNamespace(seconds=round(world.epoch_s) + 1, nanos=0)
    spoken = SimpleNamespace(participants=[SimpleNamespace(replica_id="1", data={GONE: 0})], created=created)
    membership._client = SimpleNamespace(quorum=lambda **request: (world.saw_end(1, 0), spoken)[1])
    with pytest.raises(Retryable, match="saw incarnation 0 of replica 1 end; it is over"):
        membership.join(me, 1.0)


def test_a_restarted_replica_is_not_confused_with_its_living_predecessor(world: AnyWorld) -> None:
    old, new = world.member(0), world.member(0, incarnation=1)
    announce_all([old, new])
    world.saw_end(0, 0)  # as a successor says before it asks
    results: list[object] = []

    def join(membership: Membership, me: Member) -> None:
        try:
            results.append(membership.join(me, DEADLINE_S).members)
        except Retryable as error:
            results.append(str(error))

    threads = [threading.Thread(target=join, args=pair) for pair in (old, new)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S + 5)
    assert (new[1],) in results
    assert [re.search("incarnation 0 .*is over", result) for result in results if isinstance(result, str)] not in ([], [None])


@pytest.mark.system
def test_a_lost_service_and_a_late_quorum_are_retryable(world: AnyWorld) -> None:
    silent, me = world.member(0)
    other, _ = world.member(1)
    announce_all([(silent, me), (other, me)])
    with pytest.raises(Retryable, match="no quorum formed"):
        silent.join(me, 0.3)
    nowhere = world.nowhere()
    with pytest.raises(Retryable, match="cannot be reached"):
        nowhere.join(me, 1.0)
    nowhere.close()
    nowhere.close()


def test_over_the_store_who_has_waited_for_as_long_as_a_join_may_take_goes_on_without_who_does_not_ask() -> None:
    """It lives, as its signs of life show: its leader is stuck, or reads a state."""
    world = StoreWorld(replace(TIMEOUTS, join_s=1.0, step_s=0.9, exchange_s=0.9))
    try:
        asking, silent = world.member(0), world.member(1)
        announce_all([asking, silent])
        assert asking[0].join(asking[1], world.timeouts.join_s).members == (asking[1],)
    finally:
        world.close()


def test_the_newest_incarnation_stands_for_a_replica() -> None:
    old, other = Member(1, 0, 5, "a"), Member(0, 2, 5, "a")
    new = replace(old, incarnation=1)
    assert newest_incarnations([new, other, old]) == (other, new)


@pytest.mark.system
def test_a_process_that_forgets_to_close_ends_well(world: AnyWorld) -> None:
    script = f"""{world.script()}
from helixrt.protocol.step.quorum import Member
m.announce()
m.join(Member(0, 0, 0, ""), 10)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


def test_one_replica_needs_no_server() -> None:
    now = [1000.0]
    solo = SoloMembership(900.0, clock=lambda: now[0])
    me = Member(0, 0, 0, "")
    first, second = solo.join(me, 1), solo.join(me, 1)
    assert first == Formed(100_000_000, (me,)) and second.generation == 100_000_001
    solo.close()
    with pytest.raises(Retryable):
        solo.join(me, 1)


# ---------------------------------------------------------------- heartbeats do not depend on the rank's interpreter

_MEMBER = """
import ctypes, json, sys
from helixrt.protocol.step.quorum import Member
from helixrt.replica.membership import TorchftMembership
from helixrt.replica.store import MemoryRunStore
from helixrt.timeouts import Timeouts
from helixrt.transport.monitor.client import lease

lighthouse, timeouts, monitors = json.loads(sys.argv[1])
membership = TorchftMembership(1, 0, lighthouse, MemoryRunStore(), Timeouts(**timeouts), 0.0)
mine = lease("127.0.0.1")
mine.know(b"secret")
membership.depend_on([address.encode() for address in monitors], b"secret")
membership.announce()
print(mine.address().decode(), flush=True)
for line in sys.stdin:
    if line == "join\\n":
        me = Member(1, 0, 3, "abc", "def", 7, ())
        print(json.dumps([m.replica for m in membership.join(me, 60.0).members]), flush=True)
    else:
        print("holds", flush=True)
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # with the interpreter lock, until something is said
        print("held", flush=True)
"""


_STAGE = """
import sys
from helixrt.transport.monitor.client import lease

mine = lease("127.0.0.1")
mine.know(b"secret")
mine.start()
print(mine.address().decode(), flush=True)
sys.stdin.read()
"""


class Rank:
    """A process of replica 1 that says one line when it is ready."""

    def __init__(self, script: str, argument: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said = self.hear()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, word: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def silence_s(world: World) -> float:
    """Since the last heartbeat of replica 1, as the lighthouse's own page tells."""
    with urllib.request.urlopen(f"{world.address}/status", timeout=DEADLINE_S) as page:
        (seen,) = re.findall(r"\b1: seen ([0-9.]+)s ago", page.read().decode())
    return float(seen)


def until_withdrawn(world: World, withdrawn: bool) -> None:
    until(lambda: (silence_s(world) > TIMEOUTS.heartbeat_limit_s) == withdrawn)


@dataclass(frozen=True)
class Replica:
    """Replica 1: its leader, which is a member only while its other rank runs as well."""

    world: World
    leader: Rank
    stage: Rank


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    needs_torchft()
    world, stage = World(replace(TIMEOUTS, step_s=120.0)), Rank(_STAGE)  # a held interpreter is no stuck one
    leader = Rank(_MEMBER, json.dumps([world.address, asdict(world.timeouts), [stage.said]]))
    yield Replica(world, leader, stage)
    leader.end()
    stage.end()
    world.close()


@pytest.mark.system
@pytest.mark.parametrize("held_s", [2.5, pytest.param(5.0, marks=pytest.mark.slow)])
def test_a_replica_whose_leader_holds_its_interpreter_lock_stays_a_member(replica: Replica, held_s: float) -> None:
    until_withdrawn(replica.world, False)
    replica.leader.tell("hold")
    assert replica.leader.hear() == "holds"
    time.sleep(held_s)  # for longer than the limit of a heartbeat
    until_withdrawn(replica.world, False)  # its heartbeats go on; where the machine is busy, one of them may be late
    replica.leader.tell("")
    assert replica.leader.hear() == "held"


@pytest.mark.system
@pytest.mark.parametrize("which", ["leader", "stage"])
def test_a_replica_with_a_stopped_rank_is_withdrawn_and_comes_back(replica: Replica, which: str) -> None:
    world, rank = replica.world, replica.leader if which == "leader" else replica.stage
    mine, me = world.member(0, incarnation=which == "stage")
    mine.announce()
    until_withdrawn(world, False)
    rank.process.send_signal(signal.SIGSTOP)
    until_withdrawn(world, True)
    replica.leader.tell("join")  # to ask for a quorum is a sign of life at the lighthouse: it must not
    assert [m.replica for m in mine.join(me, DEADLINE_S).members] == [0]
    assert silence_s(world) > TIMEOUTS.heartbeat_limit_s
    rank.process.send_signal(signal.SIGCONT)
    while [m.replica for m in mine.join(me, DEADLINE_S).members] != [0, 1]:
        time.sleep(0.02)
    assert json.loads(replica.leader.hear()) == [0, 1]
    mine.close()


def come_together(alone: tuple[Membership, Member], leader: tuple[Membership, Member]) -> None:
    """Both are in one quorum in the end: on a busy machine the leader's other rank may count as frozen for a moment."""
    returned: list[Formed] = []

    def join() -> None:
        while not returned:
            try:
                returned.append(leader[0].join(leader[1], DEADLINE_S))
            except Retryable as error:
                assert "one of its ranks is" in str(error), error

    waiting = threading.Thread(target=join, daemon=True)
    waiting.start()
    while len((latest := alone[0].join(alone[1], DEADLINE_S)).members) < 2:
        time.sleep(0.02)
    waiting.join(DEADLINE_S)
    assert returned == [latest]


@pytest.mark.system
def test_a_replica_with_a_stopped_rank_is_withdrawn_over_the_store_too() -> None:
    if monitor_unsupported() is not None:
        pytest.skip(f"no monitor processes here: {monitor_unsupported()}")
    world, stage = StoreWorld(), Rank(_STAGE)
    try:
        (alone, me), (leader, other) = world.member(0), world.member(1)
        leader.depend_on([stage.said.encode()], b"secret")
        announce_all([(alone, me), (leader, other)])
        come_together((alone, me), (leader, other))
        stage.process.send_signal(signal.SIGSTOP)
        assert [m.replica for m in alone.join(me, DEADLINE_S).members] == [0]
        with pytest.raises(Retryable, match="one of its ranks is"):
            leader.join(other, 0.2)
        stage.process.send_signal(signal.SIGCONT)
        come_together((alone, me), (leader, other))
    finally:
        stage.end()
        world.close()


def test_the_heartbeats_process_loads_no_torch() -> None:
    needs_torchft()
    code = f"""
import sys
from helixrt.replica.lighthouse_beats_private import beat_of
beat = beat_of({library()!r}, "http://127.0.0.1:9", "0:0", 0.2)
beat()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
