"""Which transport a pair of ranks uses, by the addresses of both.

In: each rank's addresses by transport. Out: a `Choice` with its reason, the same at both ends; and the addresses of a rank as
one string of bytes. `helixrt.transport.auto` opens the endpoints.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from helixrt.errors import ConfigError
from helixrt.transport.shared_memory import address as shared_memory
from helixrt.transport.verbs import address as verbs_address

AUTO, SHARED_MEMORY, VERBS, TCP = "auto", "shared_memory", "verbs", "tcp"
NATIVE = "native"  # the native data plane, over TCP and shared memory: not among what AUTO chooses from yet
MONITOR = "monitor"  # no transport: the address of a rank's monitor process, in the same list of addresses
TRANSPORTS = (AUTO, TCP, SHARED_MEMORY, VERBS, NATIVE)

_PART = struct.Struct("<BH")  # lengths of a transport's name and address


@dataclass(frozen=True, slots=True)
class Choice:
    transport: str
    why: str


def choose(
    mine: Mapping[str, bytes], theirs: Mapping[str, bytes], answers: Callable[[str], bool] = shared_memory.listens
) -> Choice | None:
    """The transport for a pair with these addresses by transport; None if they have none in common.

    `answers` returns whether a socket of that name is on this host. Raises ValueError if an address is none.
    """
    why = ""
    if SHARED_MEMORY in mine and SHARED_MEMORY in theirs:
        (here, _), (there, name) = (shared_memory.parse_address(a[SHARED_MEMORY]) for a in (mine, theirs))
        if here != there:
            why = "on another host, or another network namespace of this one"
        elif answers(name):
            return Choice(SHARED_MEMORY, "on this host")
        else:
            why = "its host has the same name as this one and is another"
    elif SHARED_MEMORY in mine:
        why = "it offers no shared memory"
    elif SHARED_MEMORY in theirs:
        why = "this rank offers no shared memory"
    if VERBS in mine and VERBS in theirs:
        ours, other = (verbs_address.parse(a[VERBS]) for a in (mine, theirs))
        if count := ours.agrees(other):
            rails = f"{count} RDMA rail{'s' * (count > 1)}, the first from {ours.rails[0][1]} to {other.rails[0][1]}"
            return Choice(VERBS, f"{why}; {rails}" if why else rails)
        why = (why and why + "; ") + "its RDMA ports are of another kind"
    elif VERBS in mine or VERBS in theirs:
        why = (why and why + "; ") + ("it has no RDMA" if VERBS in mine else "this rank has no RDMA")
    if TCP in mine and TCP in theirs:
        return Choice(TCP, why or "the only transport of both")
    return None


def same_host(mine: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> bool:
    """Whether both offer it; a process that then does not answer has ended (or runs on a clone of this host). Raises
    ValueError."""
    (here, _), (there, _) = (shared_memory.parse_address(a[SHARED_MEMORY]) for a in (mine, theirs))
    return here == there


def check_transport(value: str, key: str = "transport") -> None:
    """Raises ConfigError if `value` is no transport's name."""
    if value not in TRANSPORTS:
        raise ConfigError(key, value, f"must be one of {', '.join(TRANSPORTS)}")
    if value == SHARED_MEMORY and (reason := shared_memory.unsupported()) is not None:
        raise ConfigError(key, value, reason)
    if value == NATIVE:
        from helixrt.native.library import library

        library()  # compiled now, if it is not: not by each rank
    if value == VERBS:
        from helixrt.transport.verbs import endpoint as verbs

        if (reason := verbs.unsupported()) is not None:
            raise ConfigError(key, value, reason)


def pack_addresses(addresses: Mapping[str, bytes]) -> bytes:
    return b"".join(_PART.pack(len(name), len(raw)) + name.encode() + raw for name, raw in addresses.items())


def unpack_addresses(raw: bytes) -> dict[str, bytes]:
    """Raises ValueError."""
    addresses: dict[str, bytes] = {}
    at = 0
    while at < len(raw):
        if at + _PART.size > len(raw):
            raise ValueError("its address ends in the middle")
        name_size, size = _PART.unpack_from(raw, at)
        at += _PART.size
        name, address = raw[at : at + name_size], raw[at + name_size : at + name_size + size]
        at += name_size + size
        if at > len(raw) or not name.isascii() or name.decode() in addresses:
            raise ValueError("its address is none of several transports")
        addresses[name.decode()] = address
    if not addresses:
        raise ValueError("its address names no transport")
    return addresses
