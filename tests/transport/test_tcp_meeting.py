"""Meeting over TCP: who is late is waited for, who is silent is not."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from helixrt.errors import Retryable
from helixrt.transport.contract import Endpoint
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.rails import pack_address, parse_address
from tests.transport.worlds import LIMIT_S, SECRET, Attempt, World

HEARTBEAT_S = 0.2


def make(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return TcpEndpoint(secret, options=TcpOptions(period_s=heartbeat_s))


@pytest.fixture
def two() -> Iterator[World]:
    world = World(make, 2, HEARTBEAT_S)
    yield world
    world.close()


@pytest.mark.parametrize("me", [0, 1])
def test_a_peer_that_listens_and_says_nothing_for_many_periods_is_waited_for(two: World, me: int) -> None:
    """As one does that holds its interpreter lock: its kernel takes connections. It is about to connect."""
    attempt = two.attempt(me, 1, me, {1 - me: two.addresses[1 - me]}, LIMIT_S)
    until = time.monotonic() + 6 * HEARTBEAT_S
    while time.monotonic() < until:
        assert attempt.running()
        time.sleep(0.02)
    other = two.attempt(1 - me, 1, 1 - me, {me: two.addresses[me]}, LIMIT_S)
    assert attempt.finish() is None and other.finish() is None


def test_a_host_that_does_not_answer_is_given_up_long_before_the_deadline(two: World) -> None:
    """A full accept queue drops what comes, as a cut cable does."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        address = pack_address([deaf])
        error = two.attempt(0, 1, 0, {1: address}, LIMIT_S).finish()
        for filler in fillers:
            filler.close()
    assert isinstance(error, Retryable) and "rank 1: no sign of life" in str(error), error


@pytest.mark.parametrize("me", [0, 1])
def test_a_peer_that_is_behind_and_lives_is_waited_for(two: World, me: int) -> None:
    two.connect(1)
    two.driven = {1 - me}
    attempt = two.attempt(me, 2, me, {1 - me: two.addresses[1 - me]}, LIMIT_S)
    until = time.monotonic() + 4 * HEARTBEAT_S
    while time.monotonic() < until:
        two.settle(0.02)
        assert attempt.running()
    other = two.attempt(1 - me, 2, 1 - me, {me: two.addresses[me]}, LIMIT_S)
    assert attempt.finish() is None and other.finish() is None


def test_a_peer_that_answers_slowly_is_probed_less_often() -> None:
    """On a busy machine a probe takes long at both ends. Probes may take a fifth of the time, so that others can connect."""
    delay_s, tried_s, world = 0.06, 2.0, World(make, 2, None)
    for generation in range(1, 10):  # again, where the machine stood still for most of the time
        probes = probes_of(world, generation, delay_s, tried_s)
        assert probes <= tried_s / (5 * delay_s) + 2
        if probes >= 2:
            break
    world.close()
    assert probes >= 2


def probes_of(world: World, generation: int, delay_s: float, tried_s: float) -> int:
    """How many times rank 1 asks in so long for rank 0, which does not come."""
    probes, world.driven = 0, {0}
    (behind,) = parse_address(world.addresses[0])
    with socket.socket() as relay:
        relay.bind(("127.0.0.1", 0))
        relay.listen()
        relay.settimeout(0.01)
        # rank 0 dials, so all connections of rank 1 are probes
        attempt = world.attempt(1, generation, 1, {0: pack_address([relay])}, tried_s)
        while attempt.running():
            with suppress(TimeoutError), relay.accept()[0] as asking, socket.create_connection(behind) as answering:
                probes += 1
                time.sleep(delay_s)
                pass_on(world, asking, answering)
    assert "rank 0 had not come" in str(attempt.finish())
    return probes


def pass_on(world: World, one: socket.socket, other: socket.socket) -> None:
    """Until an end closes, while rank 0 is driven."""
    while True:
        world.endpoints[0].progress(time.monotonic())
        for source in select.select([one, other], [], [], 0.001)[0]:
            data = source.recv(4096)
            if not data:
                return
            (other if source is one else one).sendall(data)


def test_a_member_that_does_not_know_the_secret_is_given_up_too() -> None:
    """It lives, answers at its door and comes to ours, and nobody takes it for a member."""
    one, other = make(SECRET, HEARTBEAT_S), make(b"another secret", HEARTBEAT_S)
    attempts = [
        Attempt(lambda: one.connect(1, 0, {1: other.address()}, LIMIT_S)),
        Attempt(lambda: other.connect(1, 1, {0: one.address()}, LIMIT_S)),
    ]
    for attempt in attempts:
        assert "no sign of life" in str(attempt.finish())
    one.close()
    other.close()


def test_without_heartbeats_only_the_deadline_ends_it() -> None:
    silent, endpoint = make(SECRET, None), make(SECRET, None)
    with pytest.raises(Retryable, match="rank 1 had not come"):
        endpoint.connect(1, 0, {1: silent.address()}, 0.5)
    silent.close()
    endpoint.close()


def test_who_was_in_no_generation_yet_answers_at_its_door(two: World) -> None:
    two.driven = {1}
    attempt = two.attempt(0, 1, 0, {1: two.addresses[1]}, 4 * HEARTBEAT_S)
    assert "rank 1 had not come" in str(two.until(attempt))
