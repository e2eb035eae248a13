"""What a rank and its monitor say to each other, and what monitors of different ranks do.

Rank and monitor share a pair of Unix sockets that keep messages apart; each message is one JSON object. Two monitors share a
TCP connection, made by the monitor that watches (the watcher) to the monitor of the watched rank:

    watcher                                  monitor of the watched rank
    HELLO magic, nonce                ->
                                      <-     nonce
    proof, period in seconds          ->
                                      <-     proof
    PROBE, PROBE, ...                 ->     only so that its kernel acknowledges something
                                      <-     RUNNING every quarter of a period; STOPPED, GONE once each

A monitor's address is host and port of its listening socket; it is published along with the addresses of transports.
"""

from __future__ import annotations

import ipaddress
import json
import struct
from enum import Enum
from typing import Any

from helixrt.transport.authentication import NONCE_BYTES, PROOF_BYTES, Meeting

MAGIC = b"hlxmon\0\1"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
LAST = struct.Struct(f"<{PROOF_BYTES}sd")
PROBE, RUNNING, STOPPED, GONE = b"P", b"R", b"S", b"G"
PERIODS_S = (0.02, 600.0)  # least and most that a watcher may ask for
MESSAGE_BYTES = 64 << 10


class State(Enum):
    """What a monitor reports of a watched rank."""

    RUNNING = "running"
    STOPPED = "stopped"  # for a period
    FROZEN = "frozen"  # its monitor is silent, although its kernel acknowledges
    GONE = "gone"  # its process ended


def meeting(secret: bytes, watcher_nonce: bytes, nonce: bytes) -> Meeting:
    return Meeting(secret, b"monitor", watcher_nonce, nonce)


def pack(message: dict[str, Any]) -> bytes:
    packed = json.dumps(message, separators=(",", ":")).encode()
    assert len(packed) <= MESSAGE_BYTES
    return packed


def unpack(raw: bytes) -> dict[str, Any]:
    message = json.loads(raw)
    assert isinstance(message, dict)  # from this rank itself
    return message


def pack_address(host: str, port: int) -> bytes:
    return json.dumps([host, port], separators=(",", ":")).encode()


def parse_address(raw: bytes) -> tuple[str, int]:
    """Raises ValueError."""
    try:
        host, port = json.loads(raw)
        ipaddress.ip_address(host)
        good = isinstance(host, str) and type(port) is int and 0 < port < 65536
    except (ValueError, TypeError, RecursionError):
        good = False
    if not good:
        raise ValueError("the address of its monitor process is none")
    return host, port
