"""Whether this host's own network interfaces carry its rails.

In: a rail. Out: what is wrong on this host, in words; empty if nothing is. A socket does not tell: when an interface goes
down, its connections fall silent, exactly as if the path or the peer had failed.

Only an interface that is down, or an address that this host has no more, counts. An interface without a carrier does not: a
cable or a switch may be the cause, and no restart of a process, here or on another host, is known to help.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
from collections.abc import Sequence

from helixrt.transport.tcp.rails import TcpRail

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913  # of Linux
_IFF_UP = 0x1
_IFREQ = struct.Struct("@16s24s")  # name; an address, or flags
_IFCONF = struct.Struct("@iP")  # size of the buffer, and its place
_MOST_INTERFACES = 1024
_GONE_ERRORS = frozenset({errno.EADDRNOTAVAIL, errno.ENODEV, errno.ENXIO, errno.ENETDOWN})


def trouble(rail: TcpRail) -> str:
    """What of this host keeps the rail from working; empty: nothing, or it is not known."""
    try:
        with socket.socket(rail.family, socket.SOCK_DGRAM) as probe:
            name = rail.device or _interface_of(rail.address, probe)
            if name and (wrong := _trouble_of(name, probe)):
                return wrong
            probe.bind((rail.address, 0))
    except OSError as error:
        return f"{rail.address} is no address of this host any more" if error.errno in _GONE_ERRORS else ""
    return ""


def trouble_of_all(rails: tuple[TcpRail, ...]) -> str:
    """What keeps every one of the rails from working; empty if one works, or if there are none."""
    return of_all([trouble(rail) for rail in rails])


def of_all(troubles: Sequence[str]) -> str:
    """What is wrong with every one, each said once; empty if nothing is wrong with one, or if there are none."""
    return ", ".join(dict.fromkeys(troubles)) if all(troubles) else ""


def interface_trouble(name: str) -> str:
    """What of this host keeps the interface of that name from working; empty: nothing, or it is not known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return _trouble_of(name, probe)
    except OSError:
        return ""


def _trouble_of(name: str, probe: socket.socket) -> str:
    try:
        answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, _IFREQ.pack(name.encode()[:15], b""))
    except OSError as error:
        return f"network interface {name} does not exist any more" if error.errno == errno.ENODEV else ""
    (flags,) = struct.unpack_from("@H", answer, 16)
    return "" if flags & _IFF_UP else f"network interface {name} is down"


def _interface_of(address: str, probe: socket.socket) -> str:
    """The interface that has this IPv4 address, whether it is up or down; empty: none has, or it is an IPv6 address."""
    if probe.family != socket.AF_INET:
        return ""
    room = array.array("B", bytes(_IFREQ.size * _MOST_INTERFACES))
    answer = fcntl.ioctl(probe, _SIOCGIFCONF, _IFCONF.pack(len(room), room.buffer_info()[0]))
    used, _ = _IFCONF.unpack(answer)
    for name, found in _IFREQ.iter_unpack(room[:used].tobytes()):
        if socket.inet_ntoa(found[4:8]) == address:  # of a sockaddr_in: family, port, address
            return str(name.split(b"\0", 1)[0].decode().split(":", 1)[0])  # of an alias, its interface
    return ""
