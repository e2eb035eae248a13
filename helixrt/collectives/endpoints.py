"""The endpoint a communicator gets: for every peer the best way there is, on the interface that leads to the others.

In: the run's secret, and where the run's store is. Out: an `Endpoint` that its communicator owns.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from helixrt.errors import ConfigError
from helixrt.protocol.hopping.messages import HoppingOptions
from helixrt.protocol.link.options import LinkOptions
from helixrt.record import FlightRecord
from helixrt.transport.contract import Endpoint

if TYPE_CHECKING:
    from helixrt.collectives.operations import AnyCommunicator
    from helixrt.protocol.collective.algorithms.layout import Tuning
    from helixrt.transport.named_rails import NamedRails

LOOPBACK = "127.0.0.1"
_RESTORE_BEATS = 2.0  # one attempt to restore a rail takes at most so many heartbeats


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How peers are reached; all ranks of a run have the same, but for the names of their NICs. Times in seconds."""

    transport: str = "auto"  # one of helixrt.transport.auto.TRANSPORTS
    rails: tuple[str, ...] = ()  # NICs by name (`named_rails`), the default first; (): the interface towards the others,
    # and every active RDMA port
    paths: int = 1  # through the network, of each rail; more need hopping
    hopping: HoppingOptions | None = None
    heartbeat_s: float | None = 1.0  # a peer that does not run, or cannot be reached, is lost within 1.5 of it; None: only
    # one that is gone
    hang_s: float | None = None  # a peer that can be reached is kept while its process is stopped or hangs for at most so long;
    # None: a peer that is stopped is lost as above

    def __post_init__(self) -> None:
        if self.paths < 1:
            raise ConfigError("paths", self.paths, "must be at least 1")
        if self.paths > 1 and self.hopping is None:
            raise ConfigError("paths", self.paths, "needs hopping, which chooses among the paths")


DEFAULT = Reach()


def open_endpoint(secret: bytes, host: str, reach: Reach = DEFAULT, record: FlightRecord | None = None) -> Endpoint:
    """An endpoint that listens at `host`, unless TCP rails are named; peers must know `secret`.

    `record` gets the history of rails and paths. Raises ConfigError for a transport or a rail that cannot be.
    """
    from helixrt.transport.auto import AutoEndpoint
    from helixrt.transport.choice import NATIVE
    from helixrt.transport.named_rails import NamedRails
    from helixrt.transport.native.endpoint import NativeEndpoint
    from helixrt.transport.native.links import LinksOptions
    from helixrt.transport.tcp.endpoint import EAGER_BYTES, TcpOptions
    from helixrt.transport.tcp.rails import TcpRail
    from helixrt.transport.verbs.devices import rails_here

    named = find_rails(reach)
    if reach.transport == NATIVE:
        return NativeEndpoint(secret, named.tcp or (TcpRail(host),), LinksOptions(period_s=reach.heartbeat_s), record)
    here = NamedRails(named.tcp or (TcpRail(host),), named.rdma or tuple(rails_here())).as_paths(reach.paths)
    link = LinkOptions(hopping=reach.hopping) if reach.hopping else LinkOptions(eager_bytes=EAGER_BYTES)
    if reach.hang_s is not None:
        link = replace(link, attempt_s=max(link.attempt_s, 2 * reach.hang_s))
    options = TcpOptions(
        record=record,
        link=link,
        restore_s=max(TcpOptions.restore_s, _RESTORE_BEATS * (reach.heartbeat_s or 0.0)),
    )
    return AutoEndpoint(
        secret,
        here.tcp,
        transport=reach.transport,
        heartbeat_s=reach.heartbeat_s,
        watch_processes=reach.hang_s is None,
        tcp=options,
        rdma=here.rdma,
    )


def communicator_over(endpoint: Endpoint, tuning: Tuning | None = None, name: str = "collectives") -> AnyCommunicator:
    """What carries out collectives over `endpoint`, which it owns."""
    from helixrt.collectives.communicator import Communicator
    from helixrt.collectives.native_communicator import NativeCommunicator
    from helixrt.transport.native.endpoint import NativeEndpoint

    if isinstance(endpoint, NativeEndpoint):
        return NativeCommunicator(endpoint, tuning, name)
    return Communicator(endpoint, tuning, name)


def find_rails(reach: Reach) -> NamedRails:
    """The NICs that were named. Raises ConfigError (rail) for one that this host has not, or that the transport cannot use."""
    from helixrt.transport.choice import NATIVE, TCP, VERBS
    from helixrt.transport.named_rails import named_rails

    named = named_rails(reach.rails)
    if named.rdma and reach.transport in (TCP, NATIVE):
        raise ConfigError("rail", named.rdma[0].device, f"is an RDMA port, which {reach.transport} does not use")
    if reach.transport == NATIVE and reach.hopping is not None:
        raise ConfigError("hopping", reach.hopping.policy.value, f"{NATIVE} has no hopping yet; use {TCP}")
    if named.tcp and reach.transport == VERBS:
        raise ConfigError("rail", named.tcp[0].device or named.tcp[0].address, f"is no RDMA port, and {VERBS} needs one")
    return named


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
