"""Connections to a server end, with an error, soon after its host was lost or cut off.

In: what makes connections, and the address of the server. Out: options on the connections that came with it: the kernel gives
one up `SILENT_S` after the last sign of the other host. By itself it goes on for a quarter of an hour, or without end where an
answer is awaited. For connections of libraries that neither do this nor tell their descriptors (torch's clients of a c10d
store). Connections that the program had before, also to that server, are left alone. A process that is stopped is not noticed,
since its kernel answers.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from helixrt.collectives.tcp_sockets import held, plain, set_option, tcp_sockets

SILENT_S = 10.0

_Made = TypeVar("_Made")


def ends_when_lost(server: tuple[Any, ...], make: Callable[[], _Made]) -> _Made:
    """What `make` makes, which connects to `server`, as `socket.getpeername` gives it. On other systems than Linux, no more."""
    if not sys.platform.startswith("linux"):
        return make()
    address = plain(str(server[0]), int(server[1]))
    before = {found.inode for found in tcp_sockets() if found.remote == address}
    made = make()
    for found in tcp_sockets():
        if found.remote == address and found.inode not in before:
            with suppress(OSError), held(found) as descriptor:
                _give_up_when_lost(descriptor)
    return made


def _give_up_when_lost(descriptor: int) -> None:
    set_option(descriptor, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT_S * 1000))
    set_option(descriptor, socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    set_option(descriptor, socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S / 2))
    set_option(descriptor, socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(int(SILENT_S / 10), 1))
