"""Rails as TCP sees them: local addresses or interfaces, their sockets, and how peers get them.

In: addresses or interfaces of this machine. Out: sockets bound to them, and an address of at most 4 KiB that
names host and port of each rail's listener. A peer's address is checked field by field before use.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import ipaddress
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.protocol.link.messages import Failure

MAX_RAILS = 32
MAX_ADDRESS_BYTES = 4096
_BACKLOG = 512
_SIOCGIFADDR = 0x8915  # of Linux
_DEVICE_ERRORS = frozenset({errno.ENODEV, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENXIO})
_GONE_ERRORS = frozenset({errno.ECONNREFUSED})


@dataclass(frozen=True)
class TcpRail:
    """One way out of this host. `address` is a local IP address; with `device` sockets stay on that interface, whatever
    the routes say, where the system allows it."""

    address: str = "127.0.0.1"
    device: str = ""

    def __post_init__(self) -> None:
        try:
            parsed = ipaddress.ip_address(self.address)
        except ValueError as error:
            raise ConfigError("rail", self.address, "must be an IP address of this host") from error
        if parsed.is_unspecified or parsed.is_multicast:
            raise ConfigError("rail", self.address, "must be one address of this host, which its peers can reach")

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ipaddress.ip_address(self.address).version == 6 else socket.AF_INET


@dataclass(frozen=True)
class SocketTuning:
    """What is asked of the kernel for every connection, beside small frames at once (TCP_NODELAY)."""

    send_bytes: int = 0  # its buffer; 0: the kernel tunes it, which was fastest on loopback
    receive_bytes: int = 0
    local_congestion: str = "reno"  # its congestion control between two ends on loopback; empty: the system's own
    user_timeout_s: float = 60.0  # data that is not acknowledged, or not read, for so long breaks the connection; at least
    # two heartbeat periods, which detect a path that fails; a peer may hold its interpreter lock for so long


def rail_on(name: str) -> TcpRail:
    """The rail over an interface (then bound to it), or over an IP address. Raises ConfigError."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return TcpRail(name)
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigError("rail", name, f"must be an IP address or an interface with one ({error.strerror})") from error
    return TcpRail(socket.inet_ntoa(answer[20:24]), name)


def listen(rail: TcpRail, tuning: SocketTuning) -> socket.socket:
    """A listening socket on a free port of the rail. Raises ConfigError."""
    sock = _bound(rail, tuning)
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError("rail", rail.address, f"cannot listen there: {error.strerror}") from error
    return sock


def dial(rail: TcpRail, tuning: SocketTuning, host: str, port: int) -> tuple[socket.socket | None, int]:
    """Begin to connect from the rail. The socket, or None and the error number."""
    try:
        sock = _bound(rail, tuning)
    except ConfigError as error:
        cause = error.__cause__
        return None, (cause.errno or errno.EIO) if isinstance(cause, OSError) else errno.EIO
    try:
        code = sock.connect_ex((host, port))
    except OSError:  # an address of another family
        code = errno.EAFNOSUPPORT
    if code in (0, errno.EINPROGRESS):
        return sock, 0
    sock.close()
    return None, code


def _bound(rail: TcpRail, tuning: SocketTuning) -> socket.socket:
    sock = socket.socket(rail.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if rail.device:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, rail.device.encode() + b"\0")
            except PermissionError:
                pass  # the source address alone selects the way
        for option, size, name in (
            (socket.SO_SNDBUF, tuning.send_bytes, "wmem_max"),
            (socket.SO_RCVBUF, tuning.receive_bytes, "rmem_max"),
        ):
            if 0 < size <= _limit(name):
                sock.setsockopt(socket.SOL_SOCKET, option, size)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what a listener has, its connections have
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(tuning.user_timeout_s * 1000))
        if tuning.local_congestion and ipaddress.ip_address(rail.address).is_loopback:
            _without_pacing(sock, tuning.local_congestion)
        sock.bind((rail.address, 0))
    except OSError as error:
        sock.close()
        raise ConfigError("rail", rail.address, f"cannot be used: {error.strerror}") from error
    return sock


def _without_pacing(sock: socket.socket, congestion: str) -> None:
    """Of a connection to be made. Some systems' congestion control (BBR) sends by the clock, whose timers take a third of all
    the processor time where there is no network in between."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError:  # the system offers or allows another
        pass


@functools.cache
def _limit(name: str) -> int:
    """Of the kernel, for a socket's buffer; with less than wanted its own tuning comes further."""
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):  # not available, as in network namespaces of older kernels
        return 0


def failure_of(code: int) -> Failure:
    """The class of a socket error."""
    if code in _GONE_ERRORS:
        return Failure.PEER_GONE
    return Failure.DEVICE if code in _DEVICE_ERRORS else Failure.PATH


# ---------------------------------------------------------------- addresses


def pack_address(listeners: Sequence[socket.socket]) -> bytes:
    rails = [list(listener.getsockname()[:2]) for listener in listeners]
    packed = json.dumps({"tcp": 1, "rails": rails}, separators=(",", ":")).encode()
    assert len(packed) <= MAX_ADDRESS_BYTES
    return packed


def parse_address(raw: bytes) -> list[tuple[str, int]]:
    """Host and port of each rail. Raises ValueError with the wrong field."""
    if len(raw) > MAX_ADDRESS_BYTES:
        raise ValueError(f"an address of {len(raw)} bytes: at most {MAX_ADDRESS_BYTES}")
    try:
        said = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("an address that is no JSON") from error
    if not isinstance(said, dict) or said.keys() != {"tcp", "rails"} or said["tcp"] != 1:
        raise ValueError("an address that is not TCP's")
    rails = said["rails"]
    if not isinstance(rails, list) or not 1 <= len(rails) <= MAX_RAILS:
        raise ValueError(f"an address without 1 to {MAX_RAILS} rails")
    found = []
    for rail in rails:
        if not isinstance(rail, list) or len(rail) != 2 or not isinstance(rail[0], str) or type(rail[1]) is not int:
            raise ValueError("an address with a rail that is no host and port")
        ipaddress.ip_address(rail[0])
        if not 0 < rail[1] < 65536:
            raise ValueError(f"an address with port {rail[1]}")
        found.append((rail[0], rail[1]))
    return found
