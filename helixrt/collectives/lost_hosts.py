"""Connections to a server end, with an error, soon after its host was lost or cut off.

In: the address of a server that this process has connections to. Out: options on them: the kernel gives a connection up
`SILENT_S` after the last sign of the other host. By itself it goes on for a quarter of an hour, or without end where an answer
is awaited. For connections of libraries that neither do this nor tell their descriptors (torch's clients of a c10d store): all
descriptors of the process are looked at. A process that is stopped is not noticed, since its kernel answers.

It calls the C library: a socket object would own the descriptor, and make it non-blocking where the program has set a default
timeout.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Any

SILENT_S = 10.0

_ADDRESS_BYTES = 128  # of the C library's largest, sockaddr_storage


def end_when_lost(server: tuple[Any, ...]) -> None:
    """`server`: as `socket.getpeername` gives it. Does nothing on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        return
    options = (
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000)),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S / 2)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(SILENT_S / 10), 1)),
    )
    library, address = ctypes.CDLL(None), (_plain(str(server[0])), int(server[1]))
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if _peer(library, descriptor) == address:
            for level, name, value in options:
                size = ctypes.sizeof(ctypes.c_int)
                library.setsockopt(descriptor, level, name, ctypes.byref(ctypes.c_int(value)), size)


def _peer(library: ctypes.CDLL, descriptor: int) -> tuple[str, int] | None:
    """Host and port of the other end; None for what is no connection of the internet protocols."""
    address, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if library.getpeername(descriptor, address, ctypes.byref(size)) != 0:
        return None
    family, port = int.from_bytes(address.raw[:2], sys.byteorder), int.from_bytes(address.raw[2:4], "big")
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, address.raw[4:8]), port
    if family == socket.AF_INET6:
        return _plain(socket.inet_ntop(socket.AF_INET6, address.raw[8:24])), port
    return None


def _plain(host: str) -> str:
    """Alike for the two forms of an IPv4 address, and without the interface of a link-local one."""
    return host.removeprefix("::ffff:").partition("%")[0]
