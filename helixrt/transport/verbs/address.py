"""The address of a rank for verbs: its rails in order, and where on the management network it listens.

In: rails of this host, a TCP endpoint's address. Out: at most 4 KiB; and the content of a peer's address, checked field by
field.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass

from helixrt.transport.tcp import rails as tcp_rails
from helixrt.transport.tcp.rails import MAX_ADDRESS_BYTES, MAX_RAILS


@dataclass(frozen=True, slots=True)
class VerbsAddress:
    rails: tuple[tuple[bool, str], ...]  # Ethernet or not, and the GID, for people to read
    fallback: bool  # TCP is the last rail
    meeting: tuple[str, int]  # host and port where rails are set up, and of that last rail

    def agrees(self, other: VerbsAddress) -> int:
        """How many rails, from the first on, both can use: the same kind of network, as they are connected in order."""
        pairs = zip(self.rails, other.rails, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a[0] != b[0]), min(len(self.rails), len(other.rails)))


def pack(rails: Sequence[tuple[bool, str]], fallback: bool, tcp: bytes) -> bytes:
    said = {"verbs": 1, "rails": [list(rail) for rail in rails], "fallback": fallback, "tcp": json.loads(tcp)}
    packed = json.dumps(said, separators=(",", ":")).encode()
    assert len(packed) <= MAX_ADDRESS_BYTES
    return packed


def parse(raw: bytes) -> VerbsAddress:
    """Raises ValueError with the wrong field."""
    if len(raw) > MAX_ADDRESS_BYTES:
        raise ValueError(f"an address of {len(raw)} bytes: at most {MAX_ADDRESS_BYTES}")
    try:
        said = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("an address that is no JSON") from error
    if not isinstance(said, dict) or said.keys() != {"verbs", "rails", "fallback", "tcp"} or said["verbs"] != 1:
        raise ValueError("an address that is not of verbs")
    rails, fallback = said["rails"], said["fallback"]
    if not isinstance(rails, list) or not 1 <= len(rails) < MAX_RAILS or not isinstance(fallback, bool):
        raise ValueError(f"an address without 1 to {MAX_RAILS - 1} rails")
    found = []
    for rail in rails:
        if not isinstance(rail, list) or len(rail) != 2 or not isinstance(rail[0], bool) or not isinstance(rail[1], str):
            raise ValueError("an address with a rail that is none")
        ipaddress.ip_address(rail[1])
        found.append((rail[0], rail[1]))
    meetings = tcp_rails.parse_address(json.dumps(said["tcp"]).encode())
    if len(meetings) != 1:
        raise ValueError("an address with several TCP endpoints")
    return VerbsAddress(tuple(found), fallback, meetings[0])
