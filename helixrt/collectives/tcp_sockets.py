"""The TCP sockets of this process, also those of libraries that do not tell their descriptors.

In: nothing. Out: each socket's inode, by which it is known again, and the addresses of both ends. Looking changes nothing: it
calls the C library, since a socket object makes what it is given non-blocking where the program has set a default timeout. Who
changes one does so in `held`.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

Address = tuple[str, int]  # of an IP address, as `ipaddress` writes it, and a port

_FOLDER = next((d for d in ("/proc/self/fd", "/dev/fd") if os.path.isdir(d)), "")
_LIBRARY = ctypes.CDLL(None)
_NAME_BYTES = 128  # of the C library's largest, sockaddr_storage


@dataclass(frozen=True)
class TcpSocket:
    """`remote`: None while it is not connected."""

    inode: int
    descriptor: int
    local: Address
    remote: Address | None

    @property
    def listens(self) -> bool:
        return _option(self.descriptor, socket.SO_ACCEPTCONN) == 1


def tcp_sockets() -> Iterator[TcpSocket]:
    """One after another; nothing where the system does not list descriptors."""
    for descriptor in map(int, os.listdir(_FOLDER) if _FOLDER else []):
        with suppress(OSError):  # closed since it was listed
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode) or _option(descriptor, socket.SO_TYPE) != socket.SOCK_STREAM:
                continue
            local = _name(_LIBRARY.getsockname, descriptor)
            if local is not None:
                yield TcpSocket(status.st_ino, descriptor, local, _name(_LIBRARY.getpeername, descriptor))


@contextmanager
def held(found: TcpSocket) -> Iterator[int]:
    """A descriptor of this very socket, whatever becomes of the one that it was found under. Raises OSError: it is gone."""
    descriptor = os.dup(found.descriptor)
    try:
        if os.fstat(descriptor).st_ino != found.inode:
            raise OSError("the descriptor is that of something else by now")
        yield descriptor
    finally:
        os.close(descriptor)


def set_option(descriptor: int, level: int, name: int, value: int) -> None:
    _LIBRARY.setsockopt(descriptor, level, name, ctypes.byref(ctypes.c_int(value)), ctypes.sizeof(ctypes.c_int))


def shut_down(descriptor: int) -> bool:
    """End the connection, whose descriptor stays open; whether there was one."""
    return bool(_LIBRARY.shutdown(descriptor, socket.SHUT_RDWR) == 0)


def plain(host: str, port: int) -> Address:
    """An IPv4 address that an IPv6 socket shows is the IPv4 address; zones of this host do not count."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), port


def _option(descriptor: int, name: int) -> int:
    value, size = ctypes.c_int(-1), ctypes.c_uint32(ctypes.sizeof(ctypes.c_int))
    _LIBRARY.getsockopt(descriptor, socket.SOL_SOCKET, name, ctypes.byref(value), ctypes.byref(size))
    return value.value


def _name(ask: ctypes._NamedFuncPointer, descriptor: int) -> Address | None:
    """None for what has none, or is no socket of the internet protocols."""
    raw, size = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_uint32(_NAME_BYTES)
    if ask(descriptor, raw, ctypes.byref(size)) != 0:
        return None
    family = int.from_bytes(raw.raw[:2], sys.byteorder) if sys.platform.startswith("linux") else raw.raw[1]
    port = int.from_bytes(raw.raw[2:4], "big")
    if family == socket.AF_INET:
        return plain(socket.inet_ntop(socket.AF_INET, raw.raw[4:8]), port)
    if family == socket.AF_INET6:
        return plain(socket.inet_ntop(socket.AF_INET6, raw.raw[8:24]), port)
    return None
