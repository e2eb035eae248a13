"""Shared memory passes the suite of all endpoints, read directly and through the ring; and what only it can suffer.

A corrupt peer is the other endpoint's own segment, written by the test as no endpoint would.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import resource
import signal
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from helixrt.errors import Cause, Retryable
from helixrt.protocol.shared_memory.frames import OFFERS, Frame, Kind, SegmentError
from helixrt.protocol.shared_memory.messages import EAGER_BYTES
from helixrt.transport.contract import Endpoint, Lost, Received
from helixrt.transport.process_memory import Probe, ProcessMemory, Proof, address_of
from helixrt.transport.shared_memory import endpoint as shared_memory
from helixrt.transport.shared_memory import messages as shared_memory_messages
from helixrt.transport.shared_memory.address import parse_address
from helixrt.transport.shared_memory.endpoint import SharedMemoryEndpoint
from helixrt.transport.shared_memory.link import SharedMemoryLink
from helixrt.transport.shared_memory.segment import (
    Fence,
    OwnSegment,
    PeerSegment,
    RingReader,
    RingWriter,
    State,
    Word,
)
from tests.ranks_context import ranks_context
from tests.transport.conformance import MIB, EndpointConformance, StopConformance
from tests.transport.worlds import LIMIT_S, Inbox, Message, Process, World


def direct(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return SharedMemoryEndpoint(secret, heartbeat_s=heartbeat_s)


def through_the_ring(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return SharedMemoryEndpoint(secret, heartbeat_s=heartbeat_s, direct=False)


class TestReadDirectly(EndpointConformance, StopConformance):
    make = staticmethod(direct)


@pytest.mark.slow
@pytest.mark.grid
class TestThroughTheRing(EndpointConformance):
    make = staticmethod(through_the_ring)


@pytest.fixture
def two() -> Iterator[World]:
    world = World(direct, 2)
    world.connect()
    yield world
    world.close()


@pytest.fixture
def two_by_ring() -> Iterator[World]:
    world = World(through_the_ring, 2)
    world.connect()
    yield world
    world.close()


def link(world: World, me: int) -> SharedMemoryLink:
    endpoint = world.endpoints[me]
    assert isinstance(endpoint, SharedMemoryEndpoint)
    return endpoint._links[1 - me]


# ---------------------------------------------------------------- links with nothing to do


def test_a_quiet_link_is_left_alone_until_something_is_due(two: World) -> None:
    quiet = link(two, 0)
    now = time.monotonic() + 1000.0
    quiet.progress(now, False, False)
    assert quiet.quiet(now)
    two.endpoints[1].send(0, 5, 0, memoryview(b"x"))
    assert not quiet.quiet(now)
    quiet.progress(now, False, False)
    assert quiet.quiet(now)
    quiet.receive(5, 1, memoryview(bytearray(MIB)))
    assert quiet.quiet(now), "what it waits for is the peer's to send"
    quiet.close()
    assert quiet.quiet(now)


# ---------------------------------------------------------------- the way long messages take


def test_long_messages_are_read_directly_where_permitted(two: World, two_by_ring: World) -> None:
    assert link(two, 0).direct and link(two, 1).direct
    assert not link(two_by_ring, 0).direct


def _denied(*_: object) -> int:
    raise PermissionError("by policy")


@pytest.mark.parametrize("what, name", [(ProcessMemory, "read"), (os, "pidfd_open")])
def test_where_reading_is_not_permitted_the_ring_is_taken(what: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Yama's ptrace_scope, a seccomp filter; a kernel without pidfd."""
    monkeypatch.setattr(what, name, _denied)
    world = World(direct, 2)
    world.connect()
    assert not link(world, 0).direct and not link(world, 1).direct
    world.exchange([Message(s, 1 - s, 0, 0, 3 * MIB) for s in (0, 1)], random.Random(1))
    world.endpoints[1].close()
    world.receive(Message(1, 0, 1, 0, 1))
    world.driven = {0}
    world.run(lambda: bool(world.ended(0)))
    world.close()


def test_memory_that_cannot_be_read_directly_goes_through_the_ring(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device's mapping would: the kernel answers EFAULT."""
    monkeypatch.setattr(shared_memory_messages, "address_of", lambda data: 4096 if data.readonly else address_of(data))
    messages = [Message(s, 1 - s, 0, index, 3 * MIB + index) for s in (0, 1) for index in range(3)]
    two.exchange(messages, random.Random(1))
    assert not two.ended(0) and not two.ended(1)


@pytest.mark.parametrize("takes", [False, True])
def test_a_receive_whose_offer_is_withdrawn_while_it_is_read_still_waits(
    two: World, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    message, read, withdrawn = Message(0, 1, 5, 0, MIB), ProcessMemory.read, []
    content = message.content()  # stays readable: the offer alone says that it is withdrawn

    def meanwhile(self: ProcessMemory, address: int, into: int, size: int) -> int:
        if not withdrawn:
            two.endpoints[0].forget(message.op)
            withdrawn.append(True)
        return read(self, address, into, size)

    monkeypatch.setattr(ProcessMemory, "read", meanwhile)
    two.receive(message, takes=takes)
    two.send(message, content)
    two.run(lambda: bool(withdrawn) and not link(two, 1)._in.busy)
    assert not two.received([message])
    assert link(two, 1)._in.awaited() == (message.op, message.index)
    two.endpoints[0].close()
    two.run(lambda: bool(two.ended(1)))
    (end,) = two.ended(1)
    assert isinstance(end, Lost) and "before it sent message (5, 0)" in end.cause.what


def test_more_offers_than_the_table_holds(two: World) -> None:
    count = OFFERS + 30
    messages = [Message(0, 1, 0, index, EAGER_BYTES + 1) for index in range(count)]
    data = memoryview(bytes(EAGER_BYTES + 1))
    for message in messages:
        two.endpoints[0].send(1, message.op, message.index, data)
    inbox = Inbox(EAGER_BYTES + 1)
    for message in reversed(messages):
        two.endpoints[1].receive(0, message.op, message.index, inbox.view)
    two.run(lambda: len(two.outcomes[1]) >= count and len(two.outcomes[0]) >= count)
    assert two.received(messages) and two.sent(messages)


def test_process_memory_is_read_only_with_proof() -> None:
    process = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair()
    try:
        probe = Probe()
        memory = ProcessMemory(os.getpid(), process, ours.fileno())
        assert memory.proves(probe.proof)
        assert not memory.proves(Proof(probe.proof.pid, probe.proof.address, bytes(32)))
        assert not memory.proves(Proof(probe.proof.pid, 4096, probe.proof.nonce))
        assert not memory.proves(Proof(probe.proof.pid + 1, probe.proof.address, probe.proof.nonce))
        with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
            memory.read(4096, address_of(memoryview(bytearray(8))), 8)
        theirs.close()
        assert not memory.alive() and not memory.proves(probe.proof)
    finally:
        ours.close()
        os.close(process)


# ---------------------------------------------------------------- waking


@pytest.mark.system
@pytest.mark.parametrize("make", [direct, through_the_ring])
def test_no_wake_up_is_lost(make: Callable[[bytes, float | None], Endpoint]) -> None:
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


_ROUNDS = 1500


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


def _ping(make: Callable[[bytes, float | None], Endpoint], address: bytes, pipe: _Pipe, fork: bool = False) -> None:
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


# ---------------------------------------------------------------- processes


@pytest.mark.system
def test_death_shows_although_a_child_inherited_the_socket() -> None:
    world = World(direct, 1, heartbeat_s=30.0)
    pipe = _Pipe()
    other = ranks_context().Process(target=_ping, args=(direct, world.addresses[0], pipe, True))
    other.start()
    try:
        world.endpoints[0].connect(1, 0, {1: pipe.hear()}, LIMIT_S)
        inbox = Inbox(64)
        world.endpoints[0].receive(1, 0, 0, inbox.view)
        world.endpoints[0].send(1, 0, 0, inbox.view)
        world.run(lambda: Received(1, 0, 0) in world.outcomes[0])
        children = _children(other.pid)
        assert children
        os.kill(other.pid, signal.SIGKILL)
        world.run(lambda: bool(world.ended(0)), limit_s=30)  # before a heartbeat is missed
        assert isinstance(world.ended(0)[0], Lost)
        for child in children:
            os.kill(child, signal.SIGKILL)  # it was alive all the time
    finally:
        other.kill()
        other.join()
        world.close()


def _children(pid: int | None) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_a_forked_child_does_not_touch_its_parents_links(two: World) -> None:
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
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    inbox = two.receive(Message(0, 1, 0, 0, MIB))
    two.run(lambda: two.received([Message(0, 1, 0, 0, MIB)]))
    inbox.check(Message(0, 1, 0, 0, MIB).content())
    two.exchange([Message(0, 1, 1, 0, MIB), Message(1, 0, 1, 0, 5)], random.Random(3))


@pytest.mark.slow
@pytest.mark.parametrize("make", [direct, through_the_ring])
def test_killed_at_any_moment_of_a_copy(make: Callable[[bytes, float | None], Endpoint], seed: int) -> None:
    """The survivor hears of it, keeps its other link, and nothing is written beside the memory it gave."""
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
        echoed = Message(2, 0, 0, 1, size)
        inbox = world.receive(echoed)
        world.endpoints[0].send(2, 0, 0, memoryview(bytes(size)))
        killer = threading.Timer(rng.random() * 0.03, other.signal, (signal.SIGKILL,))
        killer.start()
        world.run(lambda world=world: bool(world.ended(0)), limit_s=30)
        killer.join()
        inbox.check_guards()
        assert isinstance(world.ended(0)[0], Lost)
        world.exchange([Message(0, 1, 9, 0, MIB), Message(1, 0, 9, 0, 10)], rng)
        world.close()
        other.end()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[-1] == descriptors[0]


def test_nothing_has_a_name_in_the_file_system() -> None:
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
    before = [set(os.listdir(place)) for place in places]
    world = World(direct, 2)
    world.connect()
    world.exchange([Message(0, 1, 0, 0, MIB)], random.Random(2))
    new = [name for place, names in zip(places, before, strict=True) for name in set(os.listdir(place)) - names]
    world.close()
    assert not [name for name in new if "helixrt" in name or "psm_" in name]


# ---------------------------------------------------------------- strangers


def _caller(world: World, rank: int) -> socket.socket:
    name = parse_address(world.addresses[rank])[1]
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.connect(b"\0helixrt-" + name.encode())
    return caller


@pytest.mark.parametrize("connected", [True, False])
def test_garbage_is_counted_and_disturbs_nobody(connected: bool, seed: int) -> None:
    rng, world = random.Random(seed), World(direct, 2)
    if connected:
        world.connect()
    callers = []
    for size in (1, 7, 57, 60, 400, 5000):
        callers.append(_caller(world, 0))
        callers[-1].send(rng.randbytes(size))
    hello = shared_memory.dial.__globals__["_HELLO"]
    magic = shared_memory.dial.__globals__["_MAGIC"]
    for generation in (0, 1):  # well said, and then no proof
        callers.append(_caller(world, 0))
        callers[-1].send(hello.pack(magic, generation, 1, 0, rng.randbytes(32)))
        callers[-1].send(rng.randbytes(32))
    with_descriptor = _caller(world, 0)
    callers.append(with_descriptor)
    socket.send_fds(with_descriptor, [b"here"], [0])
    if not connected:
        world.connect()
    world.run(lambda: world.endpoints[0].refused().strangers == len(callers))
    world.exchange([Message(s, 1 - s, 0, 0, size) for s in (0, 1) for size in (10,)], rng)
    for caller in callers:
        caller.close()
    world.close()


@pytest.mark.system
@pytest.mark.parametrize("event", ["killed", "stopped", "it closes", "stopped before it comes"])
def test_the_cause_names_the_peer_that_ended_and_not_one_that_gave_up(event: str) -> None:
    """While rank 2 has not come: rank 1, a process, is linked already, or comes as little."""
    heartbeat_s = 0.5
    here = World(direct, 3, heartbeat_s)
    other = Process(direct, 1, 10, heartbeat_s)
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


def test_without_descriptors_callers_wait_and_links_go_on(two: World) -> None:
    with socket.socket(socket.AF_UNIX, shared_memory.SOCKET) as caller:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = os.dup(caller.fileno())  # all below it are taken
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            caller.connect(shared_memory.abstract(parse_address(two.addresses[0])[1]))
            caller.send(b"no hello")
            before = two.turns
            two.settle(0.5)
            assert two.turns - before < 50, "the listener is not asked all the time"
            two.exchange([Message(s, 1 - s, 0, 0, MIB) for s in (0, 1)], random.Random(1))
        finally:
            os.close(highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        two.run(lambda: two.endpoints[0].refused().strangers == 1)
    two.connect(2)
    two.exchange([Message(s, 1 - s, 0, 0, MIB) for s in (0, 1)], random.Random(2))


def test_a_silent_stranger_is_shown_the_door(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_HANDSHAKE_S", 0.1)
    with _caller(two, 0) as caller:
        caller.settimeout(LIMIT_S)
        two.run(lambda: two.endpoints[0].refused().strangers == 1)
        assert caller.recv(1) == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_a_stranger(two: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            _caller(two, 0).recv(1)
        finally:
            os._exit(0)
    two.run(lambda: two.endpoints[0].refused().strangers == 1)
    os.waitpid(child, 0)


# ---------------------------------------------------------------- a corrupt peer


@pytest.fixture
def segments() -> Iterator[tuple[OwnSegment, PeerSegment]]:
    own = OwnSegment(1 << 16)
    theirs = PeerSegment(os.dup(own.descriptor))
    yield own, theirs
    theirs.close()
    own.close()


def test_no_end_can_pull_memory_from_under_the_other_or_write_in_it(segments: tuple[OwnSegment, PeerSegment]) -> None:
    own, theirs = segments
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(own.descriptor, size)
    with pytest.raises(PermissionError):
        mmap.mmap(own.descriptor, 4096)
    with pytest.raises(TypeError):
        theirs.words[0] = 1
    own.store(Word.READ, 2**64 - 1)
    assert theirs.load(Word.READ) == 2**64 - 1


def test_a_ring_gets_its_memory_as_it_is_used_and_all_of_it_once(two_by_ring: World) -> None:
    two, own = two_by_ring, link(two_by_ring, 0)._own
    used = [os.fstat(own.descriptor).st_blocks * 512]
    assert used[0] < shared_memory.RING_BYTES // 8
    file = os.dup(own.descriptor)
    rng = random.Random(1)
    for op in range(12):
        two.exchange([Message(0, 1, op, 0, 30_000), Message(0, 1, op, 1, 150_000)], rng)
        used.append(os.fstat(file).st_blocks * 512)
        assert used[-1] >= own.allocated
    assert used == sorted(used)
    assert own.allocated == own.ring_bytes and own.descriptor == -1
    assert own.ring_bytes <= used[-1] == os.fstat(file).st_size
    os.close(file)


@pytest.mark.parametrize("size", [60_000, 2 * MIB])
def test_no_memory_for_more_of_a_ring_ends_the_link_and_says_so(
    two_by_ring: World, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = two_by_ring
    inbox = two.receive(Message(0, 1, 0, 0, size))

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    two.send(Message(0, 1, 0, 0, size))
    two.run(lambda: bool(two.ended(0)) and bool(two.ended(1)))
    assert "no memory on this host for messages to rank 1" in two.ended(0)[0].cause.what
    assert "rank 0 gave the link up: no memory" in two.ended(1)[0].cause.what
    inbox.check_guards()
    monkeypatch.undo()
    two.connect(2)
    two.exchange([Message(0, 1, 0, 0, size)], random.Random(1))


def test_memory_that_is_no_segment_is_refused() -> None:
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 20)
    empty = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, 1033, 6)
    zeros = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(zeros, 1 << 20)
    fcntl.fcntl(zeros, 1033, 6)
    pipe, other = os.pipe()
    os.close(other)
    for descriptor in (unsealed, empty, zeros, pipe):
        with pytest.raises(SegmentError):
            PeerSegment(descriptor)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(descriptor)  # it was closed


_WRONG = [
    (Word.WRITTEN, 2**63),
    (Word.WRITTEN, 7),
    (Word.WRITTEN, shared_memory.RING_BYTES + 64),
    (Word.READ, 2**63),
    (Word.READ, 64 * 1000),
    (Word.READ, 1),
    (Word.EAGER_FREED, 2**64 - 1),
]


@pytest.mark.parametrize("word, value", _WRONG)
def test_a_position_that_cannot_be_loses_the_link(two: World, word: Word, value: int) -> None:
    """Also where the word only matters when the ring or the budget is full."""
    link(two, 0)._own.store(word, value)
    two.driven = {1}
    inbox = two.receive(Message(0, 1, 0, 0, 100))
    data = memoryview(bytes(EAGER_BYTES))
    for index in range(200):
        two.endpoints[1].send(0, 0, index, data)
    two.run(lambda: bool(two.ended(1)))
    (lost,) = two.ended(1)
    assert isinstance(lost, Lost) and "broke the rules" in lost.cause.what
    inbox.check(bytes(100))


_FRAMES = [
    Frame(99),
    Frame(Kind.EAGER, 0, 0, 100, size=50),
    Frame(Kind.EAGER, 0, 0, EAGER_BYTES + 64, size=EAGER_BYTES + 64),
    Frame(Kind.PIECE, 0, 0, 100, 0, size=64),
    Frame(Kind.PULL, 0, 0),
    Frame(Kind.TAKEN, 0, 0),
    Frame(Kind.TAKEN, 0, 0, size=10),
]


@pytest.mark.parametrize("frame", _FRAMES, ids=repr)
def test_a_frame_out_of_place_loses_the_link(two: World, frame: Frame) -> None:
    link(two, 0)._writer.put(frame)
    link(two, 0)._publish()
    two.driven = {1}
    two.run(lambda: bool(two.ended(1)))
    assert "broke the rules" in two.ended(1)[0].cause.what
    two.driven = {0, 1}
    two.run(lambda: bool(two.ended(0)))
    assert "gave the link up" in two.ended(0)[0].cause.what


@pytest.mark.parametrize("pieces", [[(0, 64), (0, 64)], [(64, 64)], [(0, 2048)], [(0, 0)]])
def test_pieces_stay_within_the_memory_that_waits_for_them(two_by_ring: World, pieces: list[tuple[int, int]]) -> None:
    two = two_by_ring
    inbox = two.receive(Message(0, 1, 0, 0, 1024))
    corrupt = link(two, 0)
    corrupt._writer.put(Frame(Kind.OFFER, 0, 0, 1024))
    for where, size in pieces:
        place = corrupt._writer.put(Frame(Kind.PIECE, 0, 0, 1024, where, size=size))
        assert place is not None
        place[:] = b"\xee" * size
    corrupt._publish()
    two.driven = {1}
    two.run(lambda: bool(two.ended(1)))
    inbox.check_guards()


def test_scribbled_memory_never_harms_the_reader(seed: int) -> None:
    """Random words and bytes in the peer's segment, in the middle of traffic: at worst the link is lost."""
    rng, world = random.Random(seed), World(through_the_ring if seed % 2 else direct, 2)
    world.connect()
    inboxes = [world.receive(Message(0, 1, 0, index, size)) for index, size in enumerate((100, 300_000, 5, 2 * MIB))]
    for index, size in enumerate((100, 300_000, 5, 2 * MIB)):
        world.send(Message(0, 1, 0, index, size))
    world.send(Message(1, 0, 0, 0, 300_000))
    for _ in range(40):
        world.turn()
        corrupt = link(world, 0)
        if corrupt.ended or link(world, 1).ended:
            break
        kind = rng.randrange(3)
        if kind == 0:
            value = rng.choice([0, 64, rng.randrange(2**16) * 64, rng.getrandbits(64)])
            corrupt._own.store(Word(rng.randrange(len(Word))), value)
        elif kind == 1:
            at = rng.randrange(0, len(corrupt._own.ring) - 64)
            corrupt._own.ring[at : at + 64] = rng.randbytes(64)
        else:
            corrupt._own.ring[: 64 * 64] = rng.randbytes(64 * 64)
    world.settle(0.02)
    for inbox in inboxes:
        inbox.check_guards()
    for rank in (0, 1):
        assert len(world.ended(rank)) <= 1
    world.close()


def test_a_wrong_cause_is_told_as_such(two: World) -> None:
    corrupt = link(two, 0)
    corrupt._own.cause[:4] = b"\xff" * 4
    corrupt._leave(State.ABORTED)
    two.driven = {1}
    two.run(lambda: bool(two.ended(1)))
    assert isinstance(two.ended(1)[0], Lost)


# ---------------------------------------------------------------- the ring


def test_a_ring_gives_what_was_put(seed: int) -> None:
    """Against a queue: random sizes, random turns of writer and reader."""
    rng = random.Random(seed)
    a, b = OwnSegment(1 << 14), OwnSegment(1 << 14)
    to_b, to_a = PeerSegment(os.dup(a.descriptor)), PeerSegment(os.dup(b.descriptor))
    writer, reader = RingWriter(a, to_a, Fence()), RingReader(b, to_b, Fence())
    expected: deque[tuple[Frame, bytes]] = deque()
    got = 0
    for number in range(3000):
        if rng.random() < 0.5:
            frame = Frame(Kind.EAGER, number, -number, size=rng.choice([0, 1, 64, rng.randrange(4096)]))
            room = writer.room()
            place = writer.put(frame)
            assert (place is None) == (frame.size > room)
            if place is not None:
                content = rng.randbytes(frame.size)
                place[:] = content
                expected.append((frame, content))
            if rng.random() < 0.7:
                writer.publish()
        else:
            while rng.random() < 0.7 and reader.more():
                frame, payload = reader.take()
                assert (frame, bytes(payload)) == expected.popleft()
                got += 1
            if rng.random() < 0.7:
                reader.release()
    assert got > 300
    for each in (to_a, to_b, a, b):
        each.close()
