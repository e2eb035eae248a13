"""Endpoints over the native engine: the suite of all endpoints, over TCP with one and two rails and in shared memory."""

from __future__ import annotations

import pytest

from helixrt.transport.contract import Endpoint
from helixrt.transport.native.endpoint import NativeEndpoint
from helixrt.transport.native.links import LinksOptions
from helixrt.transport.tcp.rails import TcpRail
from tests.transport.conformance import EndpointConformance, StopConformance


def tcp(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return NativeEndpoint(secret, options=LinksOptions(period_s=heartbeat_s, shared_memory=False))


def two_rails(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Loopback has a whole network of addresses."""
    rails = [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")]
    return NativeEndpoint(secret, rails, LinksOptions(period_s=heartbeat_s, shared_memory=False))


def memory(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return NativeEndpoint(secret, options=LinksOptions(period_s=heartbeat_s))


class TestTcp(EndpointConformance, StopConformance):
    make = staticmethod(tcp)
    ends_together = True


class TestTwoRails(EndpointConformance, StopConformance):
    make = staticmethod(two_rails)
    ends_together = True


class TestMemory(EndpointConformance, StopConformance):
    make = staticmethod(memory)
    ends_together = True
