"""Endpoints over TCP: the suite of all endpoints, and what only TCP has: strangers, sockets and several rails."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from helixrt.errors import ConfigError
from helixrt.protocol.link.frames import Frame, Kind, pack
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord
from helixrt.record import Kind as Recorded
from helixrt.transport.authentication import nonce
from helixrt.transport.contract import Endpoint, Lost
from helixrt.transport.tcp import admission as tcp_admission
from helixrt.transport.tcp.connection import Connection
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.handshake import (
    CHALLENGE_BYTES,
    VERDICT_BYTES,
    HandshakeError,
    Hello,
    Proofs,
    Purpose,
    Verdict,
    parse_challenge,
    parse_hello,
)
from helixrt.transport.tcp.rails import MAX_RAILS, TcpRail, parse_address, rail_on
from tests.transport.conformance import MIB, EndpointConformance, NewWorld, TrafficConformance, size_at_random
from tests.transport.worlds import LIMIT_S, SECRET, Message, World


def tcp(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return TcpEndpoint(secret, options=TcpOptions(period_s=heartbeat_s))


def tcp_three_rails(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Loopback has a whole network of addresses."""
    link = LinkOptions(rest_s=0.01, retry_s=0.02, probe_s=0.1)
    rails = [TcpRail("127.0.0.1"), TcpRail("127.0.0.2"), TcpRail("127.0.0.3")]
    return TcpEndpoint(secret, rails, TcpOptions(period_s=heartbeat_s, link=link))


class TestTcpEndpoint(EndpointConformance):
    make = staticmethod(tcp)


@pytest.mark.slow
@pytest.mark.grid
class TestTcpEndpointOverThreeRails(TrafficConformance):
    make = staticmethod(tcp_three_rails)


class TestRails:
    @pytest.fixture
    def world(self) -> Iterator[NewWorld]:
        worlds: list[World] = []

        def new(ranks: int) -> World:
            worlds.append(World(tcp_three_rails, ranks))
            worlds[-1].connect()
            return worlds[-1]

        yield new
        for each in worlds:
            each.close()

    def test_messages_survive_rails_that_break_at_any_time(self, world: NewWorld, seed: int) -> None:
        """Sockets are shut at random in the middle of everything, also all of them; each message arrives once."""
        survive(world(3), random.Random(seed), rounds=5)

    def test_a_rail_that_broke_carries_again(self, world: NewWorld) -> None:
        two = world(2)
        for connection in connections(two.endpoints[0])[:1]:
            connection.sock.shutdown(socket.SHUT_RDWR)
        links = [peer.link for e, other in ((0, 1), (1, 0)) for peer in [endpoint(two, e)._peers[other]]]
        two.run(lambda: all(link.failbacks for link in links))
        assert all(rail.usable for link in links for rail in link.rails)
        two.exchange([Message(0, 1, 0, i, MIB) for i in range(6)], random.Random(1))

    def test_rails_that_are_left_and_that_return_are_in_the_flight_record(self) -> None:
        record = FlightRecord("rank 0")

        def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
            options = TcpOptions(period_s=heartbeat_s, link=LinkOptions(rest_s=0.01, retry_s=0.02), record=record)
            return TcpEndpoint(secret, [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")], options)

        two = World(make, 2)
        try:
            two.connect()
            connections(two.endpoints[0])[0].sock.shutdown(socket.SHUT_RDWR)
            two.run(lambda: [event.kind for event in record.events()].count(Recorded.RAIL_BACK) == 2)
        finally:
            two.close()
        left = [event.detail for event in record.events() if event.kind is Recorded.RAIL_LEFT]
        back = [event.detail for event in record.events() if event.kind is Recorded.RAIL_BACK]
        assert sorted((e["peer"], e["rail"], e["failure"], e["usable"]) for e in left) == [(0, 0, "path", 1), (1, 0, "path", 1)]
        assert sorted((e["peer"], e["rail"], e["usable"]) for e in back) == [(0, 0, 2), (1, 0, 2)]

    def test_a_rail_that_cannot_be_used_from_the_beginning_is_done_without(self) -> None:
        def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
            options = TcpOptions(period_s=heartbeat_s, missing_rail_s=0.2)
            return TcpEndpoint(secret, [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")], options)

        two = World(make, 2)
        try:
            said = json.loads(two.addresses[1])
            with socket.create_server(("127.0.0.2", 0), backlog=1) as mute:  # takes connections and never answers
                said["rails"][1][1] = mute.getsockname()[1]
                two.addresses[1] = json.dumps(said).encode()
                two.connect()
                two.exchange([Message(a, 1 - a, 0, i, 300_000) for a in (0, 1) for i in range(4)], random.Random(2))
        finally:
            two.close()


@pytest.mark.slow
@pytest.mark.parametrize("rails", [1, 2, 3])
def test_messages_survive_broken_rails_under_many_seeds(rails: int, seed: int) -> None:
    def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
        options = TcpOptions(period_s=heartbeat_s, link=LinkOptions(rest_s=0.01, retry_s=0.02, probe_s=0.1))
        return TcpEndpoint(secret, [TcpRail(f"127.0.0.{number + 1}") for number in range(rails)], options)

    for number in range(seed, seed + 8):
        print(f"replay alone with --seed {number}")
        rng = random.Random(number)
        three = World(make, 3, rng.choice([None, 5.0]))
        three.connect()
        try:
            survive(three, rng, rounds=4)
        finally:
            three.close()


def survive(world: World, rng: random.Random, rounds: int) -> None:
    """Messages of all sizes between all, while connections are shut now and then; nobody is lost."""
    turn, often = world.turn, rng.choice([0.005, 0.02, 0.1])

    def hurt() -> bool:
        if rng.random() < often:
            shut(world, rng)
        return turn()

    world.turn = hurt  # type: ignore[method-assign]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for op in range(rounds):
        messages = [Message(a, b, op, i, size_at_random(rng)) for a, b in pairs for i in range(5)]
        world.exchange(messages + [Message(a, b, op, 9, rng.randrange(MIB, 4 * MIB)) for a, b in pairs], rng)
    assert not any(world.ended(rank) for rank in range(3))


def endpoint(world: World, rank: int) -> TcpEndpoint:
    found = world.endpoints[rank]
    assert isinstance(found, TcpEndpoint)
    return found


def connections(one: Endpoint) -> list[Connection]:
    assert isinstance(one, TcpEndpoint)
    return [c for peer in one._peers.values() for c in peer.rails if c is not None]


def shut(world: World, rng: random.Random) -> None:
    """Some connections of some endpoint end, as when something between the hosts resets them."""
    living = connections(world.endpoints[rng.choice(sorted(world.driven))])
    for connection in rng.sample(living, min(len(living), rng.choice([1, 1, 2, 6]))):
        try:
            connection.sock.shutdown(rng.choice([socket.SHUT_RDWR, socket.SHUT_WR]))
        except OSError:
            pass  # the other end was faster


# ---------------------------------------------------------------- strangers


@pytest.fixture
def two() -> Iterator[World]:
    made = World(tcp, 2)
    made.connect()
    yield made
    made.close()


def knock(world: World, rank: int = 0) -> socket.socket:
    (host, port), *_ = parse_address(world.addresses[rank])
    return socket.create_connection((host, port), timeout=LIMIT_S)


def works(world: World) -> None:
    world.exchange([Message(0, 1, 77, 0, MIB), Message(1, 0, 77, 0, 10)], random.Random(3))


GREETING = Hello(Purpose.RAIL, 1, 1, 0, 0, 9, bytes(32)).pack()


@pytest.mark.parametrize(
    "words",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5, b"\x00", os.urandom(5000), GREETING + os.urandom(64), GREETING[:-1] + b"x"],
    ids=["http", "short", "noise", "greeted", "greeted-2"],
)
def test_garbage_is_refused_and_counted(two: World, words: bytes) -> None:
    with knock(two) as stranger:
        stranger.sendall(words)
        if len(words) < len(GREETING):
            stranger.shutdown(socket.SHUT_WR)
        elif words == GREETING[:-1] + b"x":
            stranger.sendall(bytes(32))  # no proof
        two.run(lambda: two.endpoints[0].refused().strangers == 1)
    works(two)
    assert two.endpoints[1].refused().strangers == 0


def test_who_hangs_up_before_the_first_word_is_no_stranger(two: World) -> None:
    """A peer whose attempt is over closes its connections, whatever they have come to."""
    knock(two).close()
    with knock(two) as stranger:
        stranger.sendall(bytes(200))
        two.run(lambda: two.endpoints[0].refused().strangers == 1)
    two.settle(0.1)
    assert two.endpoints[0].refused().strangers == 1
    works(two)


def test_silence_is_refused_in_time(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_admission, "HANDSHAKE_S", 0.2)
    with knock(two) as silent, knock(two) as slow:
        slow.sendall(GREETING[:7])
        two.run(lambda: two.endpoints[0].refused().strangers == 2)
        assert silent.recv(1) == b""
    works(two)


def test_a_crowd_of_strangers_costs_little_and_holds_up_nobody(two: World) -> None:
    before = len(os.listdir("/proc/self/fd"))
    crowd = [knock(two) for _ in range(150)]
    try:
        for stranger in crowd:
            stranger.sendall(GREETING[:7])
        two.settle(0.1)
        theirs = len(os.listdir("/proc/self/fd")) - before - len(crowd)
        assert theirs <= tcp_admission.MAX_HALF_OPEN
        two.connect(2)
        works(two)
    finally:
        for stranger in crowd:
            stranger.close()
    two.run(lambda: two.endpoints[0].refused().strangers >= 150)


def test_a_handshake_that_was_overheard_proves_nothing(two: World) -> None:
    """The words of a good handshake, said again, meet another nonce."""
    hello = Hello(Purpose.RAIL, 2, 1, 0, 0, 1, nonce()).pack()

    def say(proof: bytes | None) -> tuple[bytes, bytes]:
        """Greets and proves (properly if `proof` is None, else it is refused); the proof, and what came of it."""
        refused = proof is not None
        with knock(two) as connection:
            connection.sendall(hello)
            connection.setblocking(False)
            challenge = hear(two, connection, CHALLENGE_BYTES)
            proof = proof or Proofs(SECRET, hello, parse_challenge(challenge)).connector()
            connection.send(proof)
            if refused:
                two.run(lambda: two.endpoints[0].refused().strangers == 1)
            two.settle(0.05)
            try:
                return proof, connection.recv(VERDICT_BYTES)
            except BlockingIOError:
                return proof, b"parked"  # it is of the next generation

    proof, came = say(None)
    assert came == b"parked" and two.endpoints[0].refused().strangers == 0
    assert say(proof)[1] == b"" and two.endpoints[0].refused().strangers == 1
    works(two)


def hear(world: World, connection: socket.socket, size: int) -> bytes:
    got = b""

    def more() -> bool:
        nonlocal got
        try:
            got += connection.recv(size - len(got))
        except BlockingIOError:
            pass
        return len(got) == size

    limit = time.monotonic() + LIMIT_S
    while not more():
        assert time.monotonic() < limit
        world.settle(0.005)
    return got


def test_verdicts_are_proved_too() -> None:
    hello = Hello(Purpose.RAIL, 3, 0, 1, 0, 1, nonce()).pack()
    good, bad = Proofs(SECRET, hello, bytes(32)), Proofs(b"another", hello, bytes(32))
    said = good.verdict(Verdict.STALE, 8)
    assert good.parse_verdict(said) == (Verdict.STALE, 8)
    for wrong in (bad.verdict(Verdict.STALE, 8), bytes([Verdict.WELCOME]) + said[1:], said[:1] + b"\x09" + said[2:]):
        with pytest.raises(HandshakeError):
            good.parse_verdict(wrong)
    with pytest.raises(HandshakeError):
        good.check_connector(bad.connector())
    for proofs in (good, Proofs(SECRET, hello, bytes(31) + b"x"), Proofs(SECRET, hello[:-1] + b"x", bytes(32))):
        if proofs is good:
            proofs.check_connector(good.connector())
        else:
            with pytest.raises(HandshakeError):
                proofs.check_connector(good.connector())


def test_greetings_are_read_back() -> None:
    hello = Hello(Purpose.PROBE, 2**63, 7, 2**32 - 1, 31, 5, nonce())
    assert parse_hello(hello.pack()) == hello
    for wrong in (b"\x00" + hello.pack()[1:], hello.pack()[:5] + b"\x09" + hello.pack()[6:]):
        with pytest.raises(HandshakeError):
            parse_hello(wrong)


# ---------------------------------------------------------------- a peer that is none


@pytest.mark.parametrize(
    "said",
    [
        os.urandom(200),
        pack(Frame(Kind.DATA, 1, 1, 5, 0, 2**39)) + b"x" * 1000,  # long, and nobody posted it
        pack(Frame(Kind.BEAT, 2)),  # of a generation that is not there yet
        pack(Frame(Kind.BEAT, 1, acknowledged=10**9)),
    ],
    ids=["noise", "unasked", "ahead", "overacknowledged"],
)
def test_a_peer_that_says_what_no_peer_says_is_lost_and_no_other(said: bytes) -> None:
    three = World(tcp, 3)
    try:
        three.connect()
        connection = endpoint(three, 1)._peers[0].rails[0]
        assert connection is not None
        connection.sock.send(said)
        three.run(lambda: bool(three.ended(0)))
        (lost,) = three.ended(0)
        assert isinstance(lost, Lost) and lost.peer == 1
        three.exchange([Message(0, 2, 1, 0, MIB), Message(2, 1, 1, 0, MIB)], random.Random(4))
    finally:
        three.close()


def test_frames_of_an_older_generation_are_dropped_and_counted(two: World) -> None:
    two.connect(2)
    connection = endpoint(two, 1)._peers[0].rails[0]
    assert connection is not None
    connection.sock.send(pack(Frame(Kind.DATA, 1, 1, 5, 0, 10)) + b"stale data")
    two.run(lambda: two.endpoints[0].refused().stale == 1)
    inbox = two.receive(Message(1, 0, 5, 0, 10))
    works(two)
    inbox.check(bytes(10))
    assert not two.ended(0)


# ---------------------------------------------------------------- processes and modes


def test_a_forked_process_does_not_hold_the_connections_open(two: World) -> None:
    """Else nobody would notice the death of a rank whose loader workers live on."""
    ours = {connection.descriptor for e in two.endpoints for connection in connections(e)}
    assert ours
    child = os.fork()
    if child == 0:
        held = [descriptor for descriptor in ours if os.path.exists(f"/proc/self/fd/{descriptor}")]
        os._exit(1 if held else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    works(two)


def test_without_fault_tolerance_the_first_failure_ends_the_link() -> None:
    def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
        return TcpEndpoint(secret, options=TcpOptions(period_s=None, link=LinkOptions(fault_tolerance=False)))

    two = World(make, 2)
    try:
        two.connect()
        rng = random.Random(5)
        two.exchange([Message(a, 1 - a, 0, i, size_at_random(rng)) for a in (0, 1) for i in range(20)], rng)
        two.exchange([Message(a, 1 - a, 1, 0, 3 * MIB) for a in (0, 1)], rng)
        shut(two, random.Random(0))
        two.run(lambda: bool(two.ended(0)) and bool(two.ended(1)))
    finally:
        two.close()


# ---------------------------------------------------------------- settings and addresses


def test_rails_of_either_family() -> None:
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    two = World(lambda secret, heartbeat_s: TcpEndpoint(secret, [TcpRail("::1"), TcpRail("127.0.0.1")]), 2)
    try:
        two.connect()
        works(two)
    finally:
        two.close()


@pytest.mark.parametrize("rail", ["nowhere", "0.0.0.0", "224.0.0.1", "300.1.1.1", ""])
def test_a_rail_must_be_an_address(rail: str) -> None:
    with pytest.raises(ConfigError, match="rail"):
        TcpRail(rail)


def test_a_rail_must_be_ours() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        TcpEndpoint(SECRET, [TcpRail("127.0.0.1"), TcpRail("192.0.2.1")])
    with pytest.raises(ConfigError, match="nosuchif"):
        rail_on("nosuchif")
    assert rail_on("lo") == TcpRail("127.0.0.1", "lo") and rail_on("127.0.0.9") == TcpRail("127.0.0.9")


def test_settings_that_cannot_work() -> None:
    for secret in (b"", "text"):
        with pytest.raises(ConfigError, match="secret"):
            TcpEndpoint(secret)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rails"):
        TcpEndpoint(SECRET, [TcpRail()] * (MAX_RAILS + 1))
    with pytest.raises(ConfigError, match="period_s"):
        TcpOptions(period_s=0)


def test_addresses_are_read_strictly() -> None:
    good = {"tcp": 1, "rails": [["127.0.0.1", 5], ["::1", 65535]]}
    assert parse_address(json.dumps(good).encode()) == [("127.0.0.1", 5), ("::1", 65535)]
    wrong: list[object] = [
        {"tcp": 2, "rails": [["127.0.0.1", 5]]},
        {"tcp": 1, "rails": []},
        {"tcp": 1, "rails": [["127.0.0.1", 5]] * (MAX_RAILS + 1)},
        {"tcp": 1, "rails": [["a.example", 5]]},
        {"tcp": 1, "rails": [["127.0.0.1", True]]},
        {"tcp": 1, "rails": [["127.0.0.1", 0]]},
        {"tcp": 1, "rails": [["127.0.0.1", 5, 6]]},
        {"tcp": 1, "rails": {"127.0.0.1": 5}},
        {"tcp": 1, "rails": [["127.0.0.1", 5]], "more": 1},
        [[[[]]]],
    ]
    for each in (*(json.dumps(one).encode() for one in wrong), b"\xff", b"[" * 4000, json.dumps(good).encode() + b" " * 5000):
        with pytest.raises(ValueError):
            parse_address(each)
