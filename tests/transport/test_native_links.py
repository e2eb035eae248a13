"""Native links meet: strangers block nobody, who is late is waited for, who is silent is not; and what travels, bit by bit."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from helixrt.errors import Cause, Retryable
from helixrt.transport.authentication import nonce
from helixrt.transport.contract import Endpoint
from helixrt.transport.native import admission, causes, handshake, links
from helixrt.transport.native.address import Address, dial_locally, parse_address
from helixrt.transport.native.endpoint import NativeEndpoint
from helixrt.transport.native.handshake import HandshakeError, Hello, OtherProtocol, Proofs, Purpose, Verdict
from helixrt.transport.native.links import LinksOptions
from helixrt.transport.native.memory import check_memory, make_memory
from helixrt.transport.tcp.rails import MAX_RAILS
from tests.transport.conformance import MIB
from tests.transport.native_worlds import over_memory, over_tcp
from tests.transport.worlds import LIMIT_S, SECRET, Attempt, Make, Message, World

pytestmark = pytest.mark.system  # they need the compiled library

HEARTBEAT_S = 0.2
PROTOCOL = 7  # of handshakes without an engine

by_both = pytest.mark.parametrize("make", [over_tcp, over_memory], ids=["tcp", "unix"])


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


def soon(world: World, done: Callable[[], bool]) -> None:
    """Drive until `done()`, of which no endpoint tells."""
    limit = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < limit
        world.settle(0.01)


def protocol(world: World) -> int:
    endpoint = world.endpoints[0]
    assert isinstance(endpoint, NativeEndpoint)
    return endpoint.links.protocol


def knock(world: World, rank: int = 0) -> socket.socket:
    """A stranger's connection to the rank: over its Unix socket if it has one."""
    address = parse_address(world.addresses[rank])
    if not address.name:
        return socket.create_connection(address.rails[0], timeout=LIMIT_S)
    sock, _ = dial_locally(address.name)
    assert sock is not None
    sock.settimeout(LIMIT_S)
    return sock


def greeting(world: World, generation: int = 1, number: int = 9, to: int = 0) -> bytes:
    """Of rank 1, or 0."""
    local = bool(parse_address(world.addresses[0]).name)
    hello = Hello(Purpose.RAIL, local, generation, 1 - to, to, 0, number, nonce())
    return handshake.pack_greeting(protocol(world)) + hello.pack()


# ---------------------------------------------------------------- strangers


@by_both
@pytest.mark.parametrize("words", ["http", "short", "noise", "greeted", "no proof", "out of bounds"])
def test_garbage_is_refused_and_counted(new_world: NewWorld, make: Make, words: str) -> None:
    two = new_world(make)
    hello = greeting(two)
    said = {
        "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
        "short": b"\x00",
        "noise": os.urandom(5000),
        "greeted": hello + os.urandom(64),
        "no proof": hello + bytes(32),
        "out of bounds": hello[:10] + b"\xff\xff" + hello[12:],
    }[words]
    with knock(two) as stranger:
        stranger.sendall(said)
        if words == "short":
            stranger.shutdown(socket.SHUT_WR)
        soon(two, lambda: two.endpoints[0].refused().strangers == 1)
    works(two)
    assert two.endpoints[1].refused().strangers == 0


@by_both
def test_who_hangs_up_before_the_first_word_is_no_stranger(new_world: NewWorld, make: Make) -> None:
    """A peer whose attempt is over closes its connections, whatever they have come to."""
    two = new_world(make)
    knock(two).close()
    with knock(two) as stranger:
        stranger.sendall(bytes(200))
        soon(two, lambda: two.endpoints[0].refused().strangers == 1)
    two.settle(0.1)
    assert two.endpoints[0].refused().strangers == 1
    works(two)


@by_both
def test_silence_is_refused_in_time(new_world: NewWorld, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    two = new_world(make)
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.2)
    with knock(two) as silent, knock(two) as slow:
        slow.sendall(greeting(two)[:7])
        soon(two, lambda: two.endpoints[0].refused().strangers == 2)
        assert silent.recv(1) == b""
    works(two)


@by_both
@pytest.mark.parametrize("says", ["nothing", "a part", "a greeting far ahead"])
def test_a_crowd_of_strangers_costs_little_and_blocks_nobody(new_world: NewWorld, make: Make, says: str) -> None:
    """A peer that comes early is parked while they are there; whatever generation they name, nothing is kept of them."""
    two = new_world(make)
    before = len(os.listdir("/proc/self/fd"))
    crowd = [knock(two) for _ in range(150)]
    try:
        for stranger in crowd:
            word = greeting(two, generation=2**40)
            with suppress(OSError):  # it was closed for a later one
                stranger.sendall({"nothing": b"", "a part": word[:11], "a greeting far ahead": word}[says])
        two.settle(0.1)
        assert len(os.listdir("/proc/self/fd")) - before - len(crowd) <= admission.MAX_HALF_OPEN
        early = two.attempt(1, 2, 1, {0: two.addresses[0]})
        two.settle(0.2)
        late = two.attempt(0, 2, 0, {1: two.addresses[1]})
        assert early.finish() is None and late.finish() is None
        works(two)
    finally:
        for stranger in crowd:
            stranger.close()
    soon(two, lambda: two.endpoints[0].refused().strangers >= 150 - admission.MAX_HALF_OPEN)


def test_64_strangers_who_keep_coming_block_nobody(new_world: NewWorld) -> None:
    two, over = new_world(over_tcp, connected=False), threading.Event()

    def come() -> None:
        crowd: list[socket.socket] = []
        while not over.is_set():
            crowd.append(knock(two))
            if len(crowd) > 64:
                crowd.pop(0).close()
            time.sleep(0.0005)
        for each in crowd:
            each.close()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        for generation in range(1, 6):
            two.connect(generation)
            works(two)
    finally:
        over.set()
        thread.join()


@by_both
def test_a_handshake_that_was_overheard_proves_nothing(new_world: NewWorld, make: Make) -> None:
    """The words of a good handshake, said again, meet another nonce."""
    two = new_world(make)
    word = greeting(two, generation=2)
    hello = word[handshake.GREETING_BYTES :]

    def say(proof: bytes | None) -> tuple[bytes, bytes]:
        """Greets and proves (properly if `proof` is None, else it is refused); the proof, and what came of it."""
        with knock(two) as connection:
            connection.sendall(word)
            answer = hear(connection, handshake.GREETING_BYTES + handshake.CHALLENGE_BYTES)
            asked = answer[handshake.GREETING_BYTES :]
            proof = proof or Proofs(SECRET, protocol(two), hello, asked).connector()
            connection.sendall(proof)
            connection.settimeout(0.2)
            try:
                return proof, connection.recv(handshake.VERDICT_BYTES)
            except TimeoutError:
                return proof, b"parked"  # it is of the next generation

    proof, came = say(None)
    assert came == b"parked" and two.endpoints[0].refused().strangers == 0
    assert say(proof)[1] == b""
    soon(two, lambda: two.endpoints[0].refused().strangers == 1)
    works(two)


def hear(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        assert more, f"closed after {len(got)} of {size} bytes"
        got += more
    return got


@pytest.mark.parametrize("number", [1, 2**31 - 1])
def test_a_connection_whose_number_cannot_be_is_refused_although_it_is_proved(new_world: NewWorld, number: int) -> None:
    """Rank 1 never dials rank 0; and rank 0 has not got as far as that number."""
    two, to = new_world(over_tcp), 0 if number == 1 else 1
    word = greeting(two, number=number, to=to)
    with knock(two, to) as connection:
        connection.sendall(word)
        answer = hear(connection, handshake.GREETING_BYTES + handshake.CHALLENGE_BYTES)
        proofs = Proofs(SECRET, protocol(two), word[handshake.GREETING_BYTES :], answer[handshake.GREETING_BYTES :])
        connection.sendall(proofs.connector())
        assert proofs.parse_verdict(hear(connection, handshake.VERDICT_BYTES)) == (Verdict.UNKNOWN, 1)
    works(two)


@by_both
@pytest.mark.parametrize("first", [0, 1])
def test_another_protocol_is_refused_with_a_line_that_names_both(
    new_world: NewWorld, make: Make, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends, whichever comes first."""
    numbers = [3, 4]
    monkeypatch.setattr(links, "library", lambda: SimpleNamespace(hx_protocol=lambda: numbers.pop(0)))
    two = new_world(make, connected=False)
    ranks = (first, 1 - first)
    attempts = [two.attempt(rank, 1, rank, {1 - rank: two.addresses[1 - rank]}) for rank in ranks]
    for rank, attempt in zip(ranks, attempts, strict=True):
        error = attempt.finish()
        assert isinstance(error, Retryable) and error.cause.peers == (1 - rank,)
        assert f"uses protocol {4 - rank} of the native data plane, and this rank protocol {3 + rank}" in str(error), error
        assert "\n" not in str(error)


def test_without_descriptors_callers_wait_and_links_go_on(new_world: NewWorld) -> None:
    two = new_world(over_memory)
    works(two)
    with socket.socket() as caller:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = os.dup(caller.fileno())  # all below it are taken
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            caller.connect(parse_address(two.addresses[0]).rails[0])
            caller.send(b"no greeting")
            two.settle(0.5)
            works(two)
        finally:
            os.close(highest)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        soon(two, lambda: two.endpoints[0].refused().strangers == 1)
    two.connect(2)
    works(two)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_is_a_stranger(new_world: NewWorld) -> None:
    two = new_world(over_memory)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            knock(two).recv(1)
        finally:
            os._exit(0)
    soon(two, lambda: two.endpoints[0].refused().strangers == 1)
    os.waitpid(child, 0)


# ---------------------------------------------------------------- who is late, silent or gone


@by_both
@pytest.mark.parametrize("me", [0, 1])
def test_a_peer_that_is_late_or_behind_is_waited_for(new_world: NewWorld, make: Make, me: int) -> None:
    two = new_world(make, heartbeat_s=HEARTBEAT_S, connected=False)
    for generation in (1, 2):
        attempt = two.attempt(me, generation, me, {1 - me: two.addresses[1 - me]}, LIMIT_S)
        until = time.monotonic() + 4 * HEARTBEAT_S
        while time.monotonic() < until:
            assert attempt.running()
            time.sleep(0.02)
        other = two.attempt(1 - me, generation, 1 - me, {me: two.addresses[me]}, LIMIT_S)
        assert attempt.finish() is None and other.finish() is None


def rails_at(world: World, rank: int, listening: socket.socket) -> bytes:
    """The rank's address, with another listener."""
    return Address((listening.getsockname()[:2],)).pack()


def test_a_kernel_that_takes_connections_is_alive_although_no_process_answers(new_world: NewWorld) -> None:
    """As that of a peer that holds its interpreter lock."""
    two = new_world(over_tcp, heartbeat_s=HEARTBEAT_S, connected=False)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as mute:
        error = two.attempt(0, 1, 0, {1: rails_at(two, 1, mute)}, 8 * HEARTBEAT_S).finish()
    assert isinstance(error, Retryable) and "rank 1 had not come" in str(error), error


def test_a_host_that_does_not_answer_is_given_up_long_before_the_deadline(new_world: NewWorld) -> None:
    """A full accept queue drops what comes, as a cut cable does."""
    two = new_world(over_tcp, heartbeat_s=HEARTBEAT_S, connected=False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        error = two.attempt(0, 1, 0, {1: rails_at(two, 1, deaf)}, LIMIT_S).finish()
        for filler in fillers:
            filler.close()
    assert isinstance(error, Retryable) and "rank 1: no sign of life" in str(error), error


def test_another_program_at_the_address_is_no_peer(new_world: NewWorld) -> None:
    two = new_world(over_tcp, connected=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        attempt = two.attempt(0, 1, 0, {1: rails_at(two, 1, other)}, LIMIT_S)
        taken, _ = other.accept()
        with taken:
            taken.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)
            assert "another program listens there" in str(attempt.finish())


def test_a_peer_that_answers_slowly_is_probed_less_often() -> None:
    """On a busy machine a probe takes long at both ends. Probes may take a fifth of the time, so that others can connect."""
    delay_s, tried_s, world = 0.06, 2.0, World(over_tcp, 2, None)
    for generation in range(1, 10):  # again, where the machine stood still for most of the time
        probes = probes_of(world, generation, delay_s, tried_s)
        assert probes <= tried_s / (5 * delay_s) + 2
        if probes >= 2:
            break
    world.close()
    assert probes >= 2


def probes_of(world: World, generation: int, delay_s: float, tried_s: float) -> int:
    """How many times rank 1 asks in so long for rank 0, which does not come."""
    probes, behind = 0, parse_address(world.addresses[0]).rails[0]
    with socket.create_server(("127.0.0.1", 0)) as relay:
        relay.settimeout(0.01)
        # rank 0 dials, so all connections of rank 1 are probes
        attempt = world.attempt(1, generation, 1, {0: rails_at(world, 0, relay)}, tried_s)
        while attempt.running():
            with suppress(TimeoutError), relay.accept()[0] as asking, socket.create_connection(behind) as answering:
                probes += 1
                time.sleep(delay_s)
                pass_on(asking, answering)
    assert "rank 0 had not come" in str(attempt.finish())
    return probes


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Until an end closes."""
    while True:
        for source in select.select([one, other], [], [], LIMIT_S)[0]:
            data = source.recv(4096)
            if not data:
                return
            (other if source is one else one).sendall(data)


@by_both
def test_a_member_that_does_not_know_the_secret_is_given_up_too(make: Make) -> None:
    """It lives, answers and comes to us, and is taken for no member."""
    one, other = make(SECRET, HEARTBEAT_S), make(b"another secret", HEARTBEAT_S)
    attempts = [
        Attempt(lambda: one.connect(1, 0, {1: other.address()}, LIMIT_S)),
        Attempt(lambda: other.connect(1, 1, {0: one.address()}, LIMIT_S)),
    ]
    for attempt in attempts:
        assert "no sign of life" in str(attempt.finish())
    one.close()
    other.close()


@by_both
def test_without_heartbeats_only_the_deadline_ends_it(make: Make) -> None:
    silent, endpoint = make(SECRET, None), make(SECRET, None)
    with pytest.raises(Retryable, match="rank 1 had not come"):
        endpoint.connect(1, 0, {1: silent.address()}, 0.5)
    silent.close()
    endpoint.close()


@by_both
def test_connecting_can_be_stopped(make: Make) -> None:
    silent, endpoint, asked = make(SECRET, None), make(SECRET, None), []
    with pytest.raises(Retryable, match="connecting was stopped"):
        endpoint.connect(1, 0, {1: silent.address()}, LIMIT_S, lambda: len(asked) > 3 or bool(asked.append(1)))
    silent.close()
    endpoint.close()


def test_a_peer_on_this_host_shares_memory_only_if_both_want_it() -> None:
    def alone(secret: bytes, heartbeat_s: float | None) -> Endpoint:
        return NativeEndpoint(secret, options=LinksOptions(period_s=heartbeat_s, shared_memory=False))

    makes = [over_memory, alone]
    two = World(lambda secret, heartbeat_s: makes.pop()(secret, heartbeat_s), 2)
    try:
        two.connect()
        works(two)
    finally:
        two.close()


# ---------------------------------------------------------------- what travels


def test_greetings_are_read_back_and_bounded() -> None:
    hello = Hello(Purpose.RAIL, True, 2**63 - 1, 7, 2**31 - 1, MAX_RAILS - 1, 2**31 - 1, nonce())
    assert handshake.parse_hello(hello.pack()) == hello and len(hello.pack()) == handshake.HELLO_BYTES
    probe = Hello(Purpose.PROBE, False, 0, 7, 8, 0, 0, nonce())
    assert handshake.parse_hello(probe.pack()) == probe
    good = {"generation": 1, "sender": 0, "receiver": 1, "rail": 0, "number": 1}
    bounds = {"generation": 2**63, "sender": 2**31, "receiver": 2**31, "rail": MAX_RAILS, "number": 2**31}
    for wrong_field in (*bounds.items(), ("number", 0)):
        with pytest.raises(HandshakeError):
            handshake.parse_hello(Hello(Purpose.RAIL, False, **{**good, **dict([wrong_field])}, nonce=nonce()).pack())
    with pytest.raises(HandshakeError):
        handshake.parse_hello(Hello(Purpose.PROBE, False, **good, nonce=nonce()).pack())
    for wrong in (b"\x09" + hello.pack()[1:], hello.pack()[:1] + b"\x02" + hello.pack()[2:]):
        with pytest.raises(HandshakeError):
            handshake.parse_hello(wrong)


def test_the_number_of_the_protocol_comes_first() -> None:
    handshake.check_greeting(handshake.pack_greeting(PROTOCOL), PROTOCOL)
    with pytest.raises(OtherProtocol, match=r"protocol 8 .* protocol 7"):
        handshake.check_greeting(handshake.pack_greeting(8), PROTOCOL)
    with pytest.raises(HandshakeError):
        handshake.check_greeting(b"HLXT\x01\0\0\0", PROTOCOL)


def test_verdicts_are_proved_too() -> None:
    hello = Hello(Purpose.RAIL, False, 3, 0, 1, 0, 1, nonce()).pack()
    good, bad = Proofs(SECRET, PROTOCOL, hello, bytes(32)), Proofs(b"another", PROTOCOL, hello, bytes(32))
    said = good.verdict(Verdict.STALE, 8)
    assert good.parse_verdict(said) == (Verdict.STALE, 8)
    for wrong in (bad.verdict(Verdict.STALE, 8), bytes([Verdict.WELCOME]) + said[1:], said[:1] + b"\x09" + said[2:]):
        with pytest.raises(HandshakeError):
            good.parse_verdict(wrong)
    with pytest.raises(HandshakeError):
        good.check_connector(bad.connector())
    good.check_connector(good.connector())
    others = (
        Proofs(SECRET, PROTOCOL, hello, bytes(31) + b"x"),
        Proofs(SECRET, PROTOCOL, hello[:-1] + b"x", bytes(32)),
        Proofs(SECRET, PROTOCOL + 1, hello, bytes(32)),
    )
    for proofs in others:
        with pytest.raises(HandshakeError):
            proofs.check_connector(good.connector())


def test_addresses_are_read_strictly() -> None:
    token = "0123456789abcdef" * 2
    address = Address((("127.0.0.1", 5), ("::1", 65535)), token, token)
    assert parse_address(address.pack()) == address
    assert parse_address(Address((("127.0.0.1", 5),)).pack()) == Address((("127.0.0.1", 5),))
    good = json.loads(address.pack())
    wrong: list[object] = [
        {**good, "native": 2},
        {**good, "rails": []},
        {**good, "rails": [["127.0.0.1", 5]] * (MAX_RAILS + 1)},
        {**good, "rails": [["a.example", 5]]},
        {**good, "rails": [["127.0.0.1", True]]},
        {**good, "rails": [["127.0.0.1", 0]]},
        {**good, "rails": [["127.0.0.1", 5, 6]]},
        {**good, "rails": {"127.0.0.1": 5}},
        {**good, "host": ""},
        {**good, "name": 5},
        {**good, "name": "x" * 32},
        {**good, "more": 1},
        [[[[]]]],
    ]
    for each in (*(json.dumps(one).encode() for one in wrong), b"\xff", b"[" * 4000, address.pack() + b" " * 5000):
        with pytest.raises(ValueError):
            parse_address(each)


def test_causes_travel_as_text_of_bounded_length() -> None:
    for cause in (Cause("why", "replica 3", "/logs/3"), Cause(""), Cause('ä"\n\0' * 3, "r", "l")):
        assert causes.parse_cause(causes.pack_cause(cause)) == Cause(cause.what, cause.rank, cause.log)
    for what in ("x" * 100_000, "ä" * 5000, '"\n' * 5000, "\0" * 5000, "\ud800" * 900):
        packed = causes.pack_cause(Cause(what, "rank" * 100, "log" * 100))
        assert len(packed.encode()) <= causes.CAUSE_BYTES
        assert causes.parse_cause(packed) is not None
    for text in ("lost rank 1: it has closed", "{", "{}", '{"what":1,"rank":"","log":""}', "[" * 1000):
        assert causes.parse_cause(text) is None


def test_memory_that_could_be_pulled_away_is_refused() -> None:
    good = make_memory(1 << 16)
    check_memory(good, 1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(good, size)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    pipe, other = os.pipe()
    for descriptor, size in ((good, 1 << 17), (unsealed, 1 << 16), (pipe, 1 << 16)):
        with pytest.raises(ValueError):
            check_memory(descriptor, size)
    for descriptor in (good, unsealed, pipe, other):
        os.close(descriptor)
