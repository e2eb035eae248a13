"""The endpoint a communicator gets: for every peer the best way there is, on the interface that leads to the others.

In: the run's secret, and where the run's store is. Out: an `Endpoint` that its communicator owns.
"""

from __future__ import annotations

import socket

import torch.distributed as dist

from helixrt.record import FlightRecord
from helixrt.transport.contract import Endpoint

LOOPBACK = "127.0.0.1"


def open_endpoint(
    secret: bytes,
    host: str,
    transport: str = "auto",
    heartbeat_s: float | None = 1.0,
    record: FlightRecord | None = None,
) -> Endpoint:
    """An endpoint that binds to `host`; peers must know `secret`. Raises ConfigError for a transport that cannot be.

    A peer that is silent for 1.5 `heartbeat_s` is lost; None: only one that is gone. `record` is told of rails that are
    left and that return.
    """
    from helixrt.transport.auto import AutoEndpoint
    from helixrt.transport.tcp import TcpOptions

    return AutoEndpoint(secret, host, transport=transport, heartbeat_s=heartbeat_s, tcp=TcpOptions(record=record))


def interface_towards(address: str) -> str:
    """This machine's address on the way to `host:port`; nothing is sent."""
    host, _, port = address.rpartition(":")
    family, kind, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def towards(store: dist.Store) -> str:
    """The interface on the way to a c10d store; loopback if it is no server's (a file, this process's memory)."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return interface_towards(f"{store.host}:{store.port}")
    return LOOPBACK
