"""Endpoints over the native engine: the suite of all endpoints, over TCP with one and two rails and in shared memory; and what
only they have: rails that are restored, and peers whose processes end or stop."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.record import FlightRecord
from helixrt.record import Kind as Recorded
from helixrt.transport.contract import Endpoint, Lost, PeerAborted, Received
from helixrt.transport.native.address import parse_address
from helixrt.transport.native.endpoint import NativeEndpoint
from helixrt.transport.native.links import LinksOptions
from helixrt.transport.tcp.rails import MAX_RAILS, TcpRail
from tests.ranks_context import ranks_context
from tests.transport.conformance import MIB, EndpointConformance, StopConformance, size_at_random
from tests.transport.native_worlds import connections, over_memory, over_tcp, over_two_rails, shut
from tests.transport.worlds import LIMIT_S, SECRET, Inbox, Make, Message, Process, World

pytestmark = pytest.mark.system  # they need the compiled library

MAKES = {"tcp": over_tcp, "two rails": over_two_rails, "memory": over_memory}
every_way = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


class TestTcp(EndpointConformance, StopConformance):
    make = staticmethod(over_tcp)
    ends_together = True


@pytest.mark.grid
class TestTwoRails(EndpointConformance, StopConformance):
    make = staticmethod(over_two_rails)
    ends_together = True


class TestMemory(EndpointConformance, StopConformance):
    make = staticmethod(over_memory)
    ends_together = True


@pytest.fixture
def new_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def new(make: Make, ranks: int = 2, heartbeat_s: float | None = None, connected: bool = True) -> World:
        worlds.append(World(make, ranks, heartbeat_s))
        if connected:
            worlds[-1].connect()
        return worlds[-1]

    yield new
    for each in worlds:
        each.close()


NewWorld = Callable[..., World]


def works(world: World) -> None:
    world.exchange([Message(0, 1, 77, 0, MIB), Message(1, 0, 77, 0, 10)], random.Random(3))


# ---------------------------------------------------------------- rails


@every_way
def test_a_connection_that_was_cut_is_made_again(new_world: NewWorld, make: Make) -> None:
    """Also when there is no other one: long messages are under way, and each arrives once."""
    two = new_world(make)
    messages = [Message(a, 1 - a, 0, i, 3 * MIB) for a in (0, 1) for i in range(4)]
    inboxes = [two.receive(message) for message in messages]
    for message in messages:
        two.send(message)
    for cut in range(3):
        limit = time.monotonic() + LIMIT_S
        while not (found := connections(two, 1)):  # the last one is being made again
            assert time.monotonic() < limit
            two.settle(0.01)
        shut(random.Random(cut).choice(found))
        two.settle(0.05)
    two.run(lambda: two.received(messages) and two.sent(messages))
    for message, inbox in zip(messages, inboxes, strict=True):
        inbox.check(message.content())
    assert not two.ended(0) and not two.ended(1)


@every_way
def test_messages_survive_connections_that_break_at_any_time(new_world: NewWorld, make: Make, seed: int) -> None:
    rng, three = random.Random(seed), new_world(make, 3)
    turn, often = three.turn, rng.choice([0.005, 0.02])

    def hurt() -> bool:
        if rng.random() < often and (found := connections(three, rng.choice([1, 2]))):
            shut(rng.choice(found), rng.choice([socket.SHUT_RDWR, socket.SHUT_WR]))
        return turn()

    three.turn = hurt  # type: ignore[method-assign]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for op in range(3):
        messages = [Message(a, b, op, i, size_at_random(rng)) for a, b in pairs for i in range(5)]
        three.exchange(messages + [Message(a, b, op, 9, rng.randrange(MIB, 4 * MIB)) for a, b in pairs], rng)
    assert not any(three.ended(rank) for rank in range(3))


def test_rails_that_are_left_and_that_return_are_in_the_flight_record() -> None:
    record = FlightRecord("rank 0")

    def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
        rails = [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")]
        return NativeEndpoint(secret, rails, LinksOptions(period_s=heartbeat_s, shared_memory=False), record)

    two = World(make, 2)
    try:
        two.connect()
        (cut,) = connections(two, 1, rail=0)
        shut(cut)
        limit = time.monotonic() + LIMIT_S
        while [event.kind for event in record.events()].count(Recorded.RAIL_BACK) < 2:
            assert time.monotonic() < limit
            two.settle(0.01)
    finally:
        two.close()
    left = [event.detail for event in record.events() if event.kind is Recorded.RAIL_LEFT]
    back = [event.detail for event in record.events() if event.kind is Recorded.RAIL_BACK]
    assert sorted((e["peer"], e["rail"], e["usable"]) for e in left) == [(0, 0, 1), (1, 0, 1)], left
    assert sorted((e["peer"], e["rail"], e["usable"]) for e in back) == [(0, 0, 2), (1, 0, 2)]


def test_a_rail_that_cannot_be_used_from_the_beginning_is_done_without() -> None:
    def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
        options = LinksOptions(period_s=heartbeat_s, shared_memory=False, missing_rail_s=0.2)
        return NativeEndpoint(secret, [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")], options)

    two = World(make, 2)
    try:
        with socket.create_server(("127.0.0.2", 0), backlog=1) as mute:  # takes connections and never answers
            port = parse_address(two.addresses[1]).rails[1][1]
            two.addresses[1] = two.addresses[1].replace(b"%d" % port, b"%d" % mute.getsockname()[1])
            two.connect()
            two.exchange([Message(a, 1 - a, 0, i, 300_000) for a in (0, 1) for i in range(4)], random.Random(2))
    finally:
        two.close()


def test_rails_of_either_family() -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    options = LinksOptions(period_s=None, shared_memory=False)
    two = World(lambda secret, heartbeat_s: NativeEndpoint(secret, [TcpRail("::1"), TcpRail("127.0.0.1")], options), 2)
    try:
        two.connect()
        works(two)
    finally:
        two.close()


# ---------------------------------------------------------------- generations and ends


@every_way
def test_fifty_generations_leave_no_descriptor_and_no_thread(new_world: NewWorld, make: Make) -> None:
    two = new_world(make)

    def life(generations: range) -> tuple[int, int]:
        """The least of descriptors and of threads after each: those of the one before may take a moment to go."""
        counts = []
        for generation in generations:
            two.connect(generation)
            two.exchange([Message(0, 1, 0, 0, 1000), Message(1, 0, 0, 0, 1000)], random.Random(generation))
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        return min(descriptors for descriptors, _ in counts), min(threads for _, threads in counts)

    assert life(range(2, 12)) == life(range(12, 42)) == life(range(42, 52))


@every_way
def test_the_loss_of_one_peer_ends_the_generation_for_all_with_its_cause(new_world: NewWorld, make: Make) -> None:
    four = new_world(make, 4)
    four.driven = {0, 1, 2}
    four.endpoints[3].abort(Cause("ran out of luck", "replica 3", "/logs/3"))
    four.run(lambda: all(four.ended(rank) for rank in (0, 1, 2)))
    for rank in (0, 1, 2):
        (end,) = four.ended(rank)
        assert isinstance(end, PeerAborted) and end.cause == Cause("ran out of luck", "replica 3", "/logs/3")


@every_way
def test_a_forked_process_does_not_hold_connections_and_touches_nothing(new_world: NewWorld, make: Make) -> None:
    """Else nobody would notice the end of a rank whose loader workers live on."""
    two = new_world(make)
    ours = connections(two, 1)
    assert ours
    two.send(Message(0, 1, 0, 0, MIB))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            two.endpoints[0].abort(Cause("the child's"))
            for endpoint in two.endpoints:
                assert not endpoint.descriptors() and endpoint.next_deadline() is None and not endpoint.progress(0.0)
                endpoint.forget(0)
                endpoint.close()
            code = 2 if connections(two, 1) or connections(two, 0) else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    inbox = two.receive(Message(0, 1, 0, 0, MIB))
    two.run(lambda: two.received([Message(0, 1, 0, 0, MIB)]))
    inbox.check(Message(0, 1, 0, 0, MIB).content())
    works(two)


def test_nothing_has_a_name_in_the_file_system(new_world: NewWorld) -> None:
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
    before = [set(os.listdir(place)) for place in places]
    two = new_world(over_memory)
    works(two)
    new = [name for place, names in zip(places, before, strict=True) for name in set(os.listdir(place)) - names]
    assert not [name for name in new if "helixrt" in name or "psm_" in name]


# ---------------------------------------------------------------- processes


@pytest.mark.system
@every_way
@pytest.mark.parametrize("event", ["killed", "stopped", "it closes"])
def test_the_cause_names_the_peer_that_ended_and_not_one_that_gave_up(make: Make, event: str) -> None:
    """While rank 2 has not come: rank 1, a process, is linked already."""
    the_cause_names(make, event)


@pytest.mark.system
def test_a_local_peer_that_is_stopped_before_it_comes_is_named() -> None:
    """On another host only its kernel can be seen, which takes connections."""
    the_cause_names(over_memory, "stopped before it comes")


def the_cause_names(make: Make, event: str) -> None:
    heartbeat_s = 0.5
    here = World(make, 3, heartbeat_s)
    other = Process(make, 1, 10, heartbeat_s)
    try:
        here.addresses[1] = other.hear()
        if event != "stopped before it comes":
            other.tell(here.addresses[0])
        attempt = here.attempt(0, 1, 0, {1: here.addresses[1], 2: here.addresses[2]})
        if event != "stopped before it comes":
            assert other.hear() == "connected"
        if event == "it closes":
            other.tell("close")
        else:
            other.signal(signal.SIGKILL if event == "killed" else signal.SIGSTOP)
        error = attempt.finish()
        assert isinstance(error, Retryable)
        assert error.cause.peers == ((2,) if event == "it closes" else (1,)), error
    finally:
        other.end()
        here.close()


class _Pipe:
    """Says one thing to the process that made it."""

    def __init__(self) -> None:
        self._here, self._there = ranks_context().Pipe(duplex=False)

    def hear(self) -> bytes:
        assert self._here.poll(LIMIT_S)
        said = self._here.recv_bytes()
        self._here.close(), self._there.close()
        return said

    def say(self, what: bytes) -> None:
        self._there.send_bytes(what)

    def __getstate__(self) -> object:
        return self._there

    def __setstate__(self, there: object) -> None:
        self._there = there  # type: ignore[assignment]


_ROUNDS = 1500


def _ping(make: Make, address: bytes, pipe: _Pipe, fork: bool = False) -> None:
    """A process that answers each of rank 0's messages."""
    world = World(make, 1)
    pipe.say(world.addresses[0])
    endpoint = world.endpoints[0]
    endpoint.connect(1, 1, {0: address}, LIMIT_S)
    if fork and ctypes.PyDLL(None).fork() == 0:  # not Python's, which would close the endpoint's descriptors
        time.sleep(LIMIT_S)
        os._exit(0)
    memory = memoryview(bytearray(64))
    for op in range(_ROUNDS):
        endpoint.receive(0, op, 0, memory)
        world.run(lambda op=op: Received(0, op, 0) in world.outcomes[0][-2:])
        endpoint.send(0, op, 0, memory)
    world.run(lambda: False)


@pytest.mark.system
@pytest.mark.parametrize("make", [over_tcp, over_memory])
def test_no_wake_up_is_lost(make: Make) -> None:
    """Both ends sleep after every message, with no heartbeat that would wake them by and by."""
    world = World(make, 1)
    other = ranks_context().Process(target=_ping, args=(make, world.addresses[0], pipe := _Pipe()))
    other.start()
    try:
        world.endpoints[0].connect(1, 0, {1: pipe.hear()}, LIMIT_S)
        inbox = Inbox(64)
        for op in range(_ROUNDS):
            world.endpoints[0].receive(1, op, 0, inbox.view)
            world.endpoints[0].send(1, op, 0, inbox.view)
            world.run(lambda op=op: Received(1, op, 0) in world.outcomes[0][-2:])
    finally:
        other.kill()
        other.join()
        world.close()


@pytest.mark.system
def test_death_shows_although_a_child_inherited_the_socket() -> None:
    world = World(over_memory, 1, heartbeat_s=30.0)
    pipe = _Pipe()
    other = ranks_context().Process(target=_ping, args=(over_memory, world.addresses[0], pipe, True))
    other.start()
    children = []
    try:
        world.endpoints[0].connect(1, 0, {1: pipe.hear()}, LIMIT_S)
        inbox = Inbox(64)
        world.endpoints[0].receive(1, 0, 0, inbox.view)
        world.endpoints[0].send(1, 0, 0, inbox.view)
        world.run(lambda: Received(1, 0, 0) in world.outcomes[0])
        with open(f"/proc/{other.pid}/task/{other.pid}/children") as file:
            children = [int(word) for word in file.read().split()]
        assert children
        os.kill(other.pid or 0, signal.SIGKILL)
        world.run(lambda: bool(world.ended(0)), limit_s=30)  # before a heartbeat is missed
        assert isinstance(world.ended(0)[0], Lost)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)  # it was alive all the time
        other.kill()
        other.join()
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("make", [over_tcp, over_memory])
def test_killed_at_any_moment_of_a_copy(make: Make, seed: int) -> None:
    """The survivors hear of it, go on in the next generation, and nothing is written beside the memory they gave."""
    rng, size = random.Random(seed), 32 * MIB
    descriptors = []
    for _ in range(8):
        world = World(make, 2, heartbeat_s=30.0)
        other = Process(make, 2, size, 30.0)
        address = other.hear()
        other.tell(world.addresses[0])
        attempts = [
            world.attempt(0, 1, 0, {1: world.addresses[1], 2: address}),
            world.attempt(1, 1, 1, {0: world.addresses[0]}),
        ]
        assert [attempt.finish() for attempt in attempts] == [None, None]
        inbox = world.receive(Message(2, 0, 0, 1, size))
        world.endpoints[0].send(2, 0, 0, memoryview(bytes(size)))
        killer = threading.Timer(rng.random() * 0.03, other.signal, (signal.SIGKILL,))
        killer.start()
        world.run(lambda world=world: bool(world.ended(0)) and bool(world.ended(1)), limit_s=30)
        killer.join()
        inbox.check_guards()
        assert isinstance(world.ended(0)[0], Lost)
        world.connect(2)
        world.exchange([Message(0, 1, 9, 0, MIB), Message(1, 0, 9, 0, 10)], rng)
        world.close()
        other.end()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] == descriptors[0]


# ---------------------------------------------------------------- settings


def test_settings_that_cannot_work() -> None:
    for secret in (b"", "text"):
        with pytest.raises(ConfigError, match="secret"):
            NativeEndpoint(secret)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rails"):
        NativeEndpoint(SECRET, [TcpRail()] * (MAX_RAILS + 1))
    with pytest.raises(ConfigError, match="period_s"):
        LinksOptions(period_s=0)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        NativeEndpoint(SECRET, [TcpRail("127.0.0.1"), TcpRail("192.0.2.1")])


def test_ranks_and_generations_that_are_none() -> None:
    one = over_tcp(SECRET, None)
    try:
        for generation, me, peers in ((-1, 0, {}), (2**63, 0, {}), (1, -1, {}), (1, 0, {0: b""}), (1, 0, {-1: b""})):
            with pytest.raises(ValueError, match="generation|rank"):
                one.connect(generation, me, peers, 1.0)
        one.connect(5, 0, {}, 1.0)
        with pytest.raises(ValueError, match="generation 4"):
            one.connect(4, 0, {}, 1.0)
    finally:
        one.close()
