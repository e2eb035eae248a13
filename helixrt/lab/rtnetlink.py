"""Routes, neighbours and queues of NICs by messages to the kernel: at once, without a process for each.

In: `Message`s. Out: they have taken effect, in their order, or OSError with the kernel's reason. Under emulation a process
takes longer to start than a link takes to come back, so what is to be timed is not asked for by `ip` and `tc`. Runs as root.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_CALL_S = 10.0
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_NEW_ROUTE, _NEW_NEIGHBOUR, _NEW_QDISC, _DELETE_QDISC = 24, 28, 36, 37
_ERROR = 2  # NLMSG_ERROR, which also acknowledges
_ASK, _REPLACE = 0x1 | 0x4, 0x100 | 0x400  # NLM_F_REQUEST and _ACK; _REPLACE and _CREATE
_ROOT = 0xFFFFFFFF  # TC_H_ROOT
_ALL = 0xFFFFFFFF  # netem counts probabilities in 2^-32
_QDISC_KIND, _QDISC_OPTIONS = 1, 2  # TCA_KIND, TCA_OPTIONS
_ROUTE_TO, _ROUTE_DEVICE, _ROUTE_SOURCE, _ROUTE_TABLE = 1, 4, 7, 15  # RTA_DST, _OIF, _PREFSRC, _TABLE
_BOOT, _LINK, _UNICAST = 3, 253, 1  # RTPROT_BOOT, RT_SCOPE_LINK, RTN_UNICAST
_NEIGHBOUR, _HARDWARE = 1, 2  # NDA_DST, NDA_LLADDR
_PERMANENT = 0x80  # NUD_PERMANENT


@dataclass(frozen=True)
class Message:
    kind: int
    flags: int
    body: bytes
    fine: tuple[int, ...] = ()  # refusals that mean: so it is already


def route(device: str, to: str, source: str, table: int) -> Message:
    """`ip route replace TO/32 dev DEVICE src SOURCE table TABLE`."""
    body = struct.pack("=8BI", socket.AF_INET, 32, 0, 0, min(table, 252), _BOOT, _LINK, _UNICAST, 0)
    body += _attribute(_ROUTE_TO, socket.inet_aton(to)) + _attribute(_ROUTE_SOURCE, socket.inet_aton(source))
    body += _attribute(_ROUTE_DEVICE, struct.pack("=i", socket.if_nametoindex(device)))
    return Message(_NEW_ROUTE, _REPLACE, body + _attribute(_ROUTE_TABLE, struct.pack("=I", table)))


def neighbour(device: str, address: str, hardware: str) -> Message:
    """`ip neigh replace ADDRESS lladdr HARDWARE dev DEVICE nud permanent`."""
    body = struct.pack("=BxxxiHBB", socket.AF_INET, socket.if_nametoindex(device), _PERMANENT, 0, 0)
    body += _attribute(_NEIGHBOUR, socket.inet_aton(address))
    return Message(_NEW_NEIGHBOUR, _REPLACE, body + _attribute(_HARDWARE, bytes.fromhex(hardware.replace(":", ""))))


def lose_all(device: str, limit: int) -> Message:
    """`tc qdisc replace dev DEVICE root netem limit LIMIT loss 100%`."""
    options = struct.pack("=6I", 0, limit, _ALL, 0, 0, 0)
    return Message(
        _NEW_QDISC, _REPLACE, _queue(device) + _attribute(_QDISC_KIND, b"netem\0") + _attribute(_QDISC_OPTIONS, options)
    )


def lose_nothing(device: str) -> Message:
    """`tc qdisc delete dev DEVICE root`; also where there is none."""
    return Message(_DELETE_QDISC, 0, _queue(device), (errno.ENOENT,))


def _queue(device: str) -> bytes:
    return struct.pack("=BxxxiIII", socket.AF_UNSPEC, socket.if_nametoindex(device), 0, _ROOT, 0)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def say(messages: Iterable[Message]) -> None:
    """One after the other; nothing after the first that is refused."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(_CALL_S)
        for sequence, message in enumerate(messages, 1):
            length = _HEADER.size + len(message.body)
            kernel.send(_HEADER.pack(length, message.kind, _ASK | message.flags, sequence, 0) + message.body)
            answer = kernel.recv(8192)
            _, kind, _, _, _ = _HEADER.unpack_from(answer)
            (code,) = struct.unpack_from("=i", answer, _HEADER.size)
            if kind != _ERROR:
                raise OSError(errno.EBADMSG, f"an answer of type {kind} from the kernel")
            if code and -code not in message.fine:
                raise OSError(-code, os.strerror(-code))
