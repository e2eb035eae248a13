"""Where an endpoint of shared memory is found: its host, the name of its Unix socket, and whether a process listens there."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys

from helixrt.transport.shared_memory.handshake import credentials

SOCKET = int(socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def unsupported() -> str | None:
    """Why this machine has no shared memory of this kind; None if it has."""
    if not sys.platform.startswith("linux"):
        return "needs Linux (memfd, abstract Unix sockets); use tcp"
    if not hasattr(os, "memfd_create") or sys.byteorder != "little":
        return "needs a Python with os.memfd_create on a little-endian machine; use tcp"
    return None


def host_identity() -> str:
    """Differs between hosts and between network namespaces of one: the reach of an abstract socket. That it is
    equal is a hint and no proof (clones of a virtual machine); `listens` is the proof."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    space = os.stat("/proc/self/ns/net")
    return hashlib.sha256(f"{boot} {space.st_dev} {space.st_ino} {os.geteuid()}".encode()).hexdigest()[:32]


def parse_address(raw: bytes) -> tuple[str, str]:
    """(host identity, name of the socket) of an endpoint's address. Raises ValueError."""
    try:
        said = json.loads(raw)
        host, name = said["host"], said["name"]
        good = all(isinstance(x, str) and len(x) == 32 and int(x, 16) >= 0 for x in (host, name))
    except (ValueError, TypeError, KeyError, RecursionError):
        good = False
    if not good:
        raise ValueError("its address is none of shared memory")
    return host, name


def listens(name: str) -> bool:
    """Whether an endpoint with that socket exists on this host, in this network namespace."""
    return listener(name) is not None


def listener(name: str) -> int | None:
    """The process that listens there; 0: it cannot be determined; None: none does."""
    with socket.socket(socket.AF_UNIX, SOCKET) as probe:
        try:
            probe.connect(abstract(name))
        except BlockingIOError:
            return 0  # there, and busy
        except OSError:
            return None
        return credentials(probe)[0]


def abstract(name: str) -> bytes:
    return b"\0helixrt-" + name.encode()
