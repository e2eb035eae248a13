"""Native endpoints for tests, and their connections as the process has them: the engine shows them to nobody."""

from __future__ import annotations

import os
import socket
import stat

from helixrt.transport.contract import Endpoint
from helixrt.transport.native.address import parse_address
from helixrt.transport.native.endpoint import NativeEndpoint
from helixrt.transport.native.links import LinksOptions
from helixrt.transport.tcp.rails import TcpRail
from tests.transport.worlds import World


def over_tcp(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return NativeEndpoint(secret, options=LinksOptions(period_s=heartbeat_s, shared_memory=False))


def over_two_rails(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    """Loopback has a whole network of addresses."""
    rails = [TcpRail("127.0.0.1"), TcpRail("127.0.0.2")]
    return NativeEndpoint(secret, rails, LinksOptions(period_s=heartbeat_s, shared_memory=False))


def over_memory(secret: bytes, heartbeat_s: float | None) -> Endpoint:
    return NativeEndpoint(secret, options=LinksOptions(period_s=heartbeat_s))


def connections(world: World, rank: int, rail: int | None = None) -> list[int]:
    """Descriptors of this process that are the rank's connected end of a rail (of each one), where its peer dialled."""
    address = parse_address(world.addresses[rank])
    wanted: list[object] = list(address.rails) if rail is None else [address.rails[rail]]
    if address.name:
        wanted.append(b"\0helixrt-native-" + address.name.encode())
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                here = sock.getsockname()
                sock.getpeername()
                if (here[:2] if isinstance(here, tuple) else here) in wanted:
                    found.append(int(name))
        except OSError:
            pass
    return found


def shut(descriptor: int, how: int = socket.SHUT_RDWR) -> None:
    """As when something between the hosts resets the connection; the descriptor stays its owner's."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.shutdown(how)
    except OSError:
        pass  # the other end was faster
