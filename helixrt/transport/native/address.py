"""Where a rank of the native data plane is found: the rails' listeners, its host, and its Unix socket on that host.

In: listening sockets. Out: an address of at most 4 KiB for the run's store; a peer's is checked field by field before use.
Two ranks share memory when their hosts have the same identity and the peer's Unix socket answers: it is named in the abstract
space of the network namespace, so whoever connects to it is on the same machine.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.transport.shared_memory.address import host_identity
from helixrt.transport.shared_memory.handshake import credentials
from helixrt.transport.tcp.rails import MAX_ADDRESS_BYTES, MAX_RAILS

_BACKLOG = 512
_SOCKET = int(socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


@dataclass(frozen=True)
class Address:
    """`host` and `name` are empty where shared memory is not offered."""

    rails: tuple[tuple[str, int], ...]  # host and port of each rail
    host: str = ""
    name: str = ""  # of the Unix socket

    def pack(self) -> bytes:
        said = {"native": 1, "host": self.host, "name": self.name, "rails": [list(rail) for rail in self.rails]}
        packed = json.dumps(said, separators=(",", ":")).encode()
        assert len(packed) <= MAX_ADDRESS_BYTES
        return packed


def parse_address(raw: bytes) -> Address:
    """Raises ValueError with the wrong field."""
    if len(raw) > MAX_ADDRESS_BYTES:
        raise ValueError(f"an address of {len(raw)} bytes: at most {MAX_ADDRESS_BYTES}")
    try:
        said = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("an address that is no JSON") from error
    if not isinstance(said, dict) or said.keys() != {"native", "host", "name", "rails"} or said["native"] != 1:
        raise ValueError("an address that is not the native data plane's")
    host, name, rails = said["host"], said["name"], said["rails"]
    if not all(isinstance(each, str) and (not each or _is_token(each)) for each in (host, name)) or bool(host) != bool(name):
        raise ValueError("an address whose host or socket is none")
    if not isinstance(rails, list) or not 1 <= len(rails) <= MAX_RAILS:
        raise ValueError(f"an address without 1 to {MAX_RAILS} rails")
    return Address(tuple(_rail(rail) for rail in rails), host, name)


def _is_token(text: str) -> bool:
    return len(text) == 32 and all(letter in "0123456789abcdef" for letter in text)


def _rail(rail: object) -> tuple[str, int]:
    if not isinstance(rail, list) or len(rail) != 2 or not isinstance(rail[0], str) or type(rail[1]) is not int:
        raise ValueError("an address with a rail that is no host and port")
    ipaddress.ip_address(rail[0])
    if not 0 < rail[1] < 65536:
        raise ValueError(f"an address with port {rail[1]}")
    return rail[0], rail[1]


# ---------------------------------------------------------------- this host


def memory_unsupported() -> str | None:
    """Why ranks of this machine cannot share memory; None if they can."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return "needs Linux and a Python with os.memfd_create"
    return None


def this_host() -> str:
    return host_identity()


def listen_locally(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, _SOCKET)
    try:
        sock.bind(_abstract(name))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def dial_locally(name: str) -> tuple[socket.socket | None, int]:
    """A connected socket, or None and the error number: ECONNREFUSED where no process listens, EAGAIN if its queue is full."""
    sock = socket.socket(socket.AF_UNIX, _SOCKET)
    code = sock.connect_ex(_abstract(name))
    if not code:
        return sock, 0
    sock.close()
    return None, code


def listener(name: str) -> int | None:
    """The process that listens there; 0: it cannot be determined; None: none does."""
    sock, code = dial_locally(name)
    if sock is None:
        return 0 if code == errno.EAGAIN else None
    with sock:
        return credentials(sock)[0]


def shares_memory(mine: Address, theirs: Address) -> bool:
    """Whether both are on one host, and the other's process listens there. Both ends find the same."""
    return bool(mine.host) and mine.host == theirs.host and listener(theirs.name) is not None


def _abstract(name: str) -> bytes:
    return b"\0helixrt-native-" + name.encode()


def addresses_of(listeners: Sequence[socket.socket]) -> tuple[tuple[str, int], ...]:
    found = []
    for each in listeners:
        host, port = each.getsockname()[:2]
        found.append((host, port))
    return tuple(found)
