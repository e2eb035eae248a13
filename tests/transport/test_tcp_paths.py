"""Several paths over one NIC: one connection each, told apart by its port, and a policy that hops between them."""

from __future__ import annotations

import random
import socket

import pytest

from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.protocol.link.options import LinkOptions
from helixrt.transport.contract import Endpoint
from helixrt.transport.tcp.endpoint import TcpEndpoint, TcpOptions
from helixrt.transport.tcp.rails import TcpRail
from tests.transport.conformance import MIB, TrafficConformance
from tests.transport.worlds import Message, World

PATHS = 3


def hopping(policy: PolicyName, rate_bytes_per_s: float) -> LinkOptions:
    options = HoppingOptions(
        unloaded=Unloaded(rate_bytes_per_s, 0.0), policy=policy, message_bytes=256 << 10, depth_bytes=512 << 10
    )
    return LinkOptions(rest_s=0.01, retry_s=0.02, probe_s=0.1, hopping=options)


def restless(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Its paths are said to be faster than any loopback, so that every RTT is a congested one."""
    options = TcpOptions(period_s=heartbeat_s, link=hopping(PolicyName.FLOWBENDER, 1e12))
    return TcpEndpoint(secret, [TcpRail()] * PATHS, options)


def calm(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    options = TcpOptions(period_s=heartbeat_s, link=hopping(PolicyName.HOPPER, 1e8))
    return TcpEndpoint(secret, [TcpRail()] * PATHS, options)


@pytest.mark.slow
@pytest.mark.grid
class TestTcpEndpointThatHopsAllTheTime(TrafficConformance):
    make = staticmethod(restless)


@pytest.mark.slow
@pytest.mark.grid
class TestTcpEndpointWithPaths(TrafficConformance):
    make = staticmethod(calm)


def ports(world: World) -> set[tuple[int, int]]:
    """Of the connections between the two, as seen from rank 0."""
    one = world.endpoints[0]
    assert isinstance(one, TcpEndpoint)
    socks = [connection.sock for connection in one._peers[1].rails if connection is not None]
    return {(sock.getsockname()[1], sock.getpeername()[1]) for sock in socks}


def test_a_rail_named_three_times_is_three_ways_through_the_network() -> None:
    two = World(calm, 2)
    try:
        two.connect()
        assert len(ports(two)) == PATHS
        two.exchange([Message(a, 1 - a, 0, i, MIB) for a in (0, 1) for i in range(6)], random.Random(1))
    finally:
        two.close()


def test_hops_and_broken_connections_together_lose_and_double_nothing(seed: int) -> None:
    rng = random.Random(seed)
    two = World(restless, 2)
    try:
        two.connect()
        for op in range(4):
            two.exchange([Message(a, 1 - a, op, i, rng.choice((300, MIB))) for a in (0, 1) for i in range(8)], rng)
            one = two.endpoints[rng.randrange(2)]
            assert isinstance(one, TcpEndpoint)
            (peer,) = one._peers.values()
            living = [connection for connection in peer.rails if connection is not None]
            rng.choice(living).sock.shutdown(socket.SHUT_RDWR)
        links = [peer.link for one in two.endpoints if isinstance(one, TcpEndpoint) for peer in one._peers.values()]
        assert len(links) == 2
        two.run(lambda: all(link._paths is not None and link._paths.policy.switches > 0 for link in links))
    finally:
        two.close()
