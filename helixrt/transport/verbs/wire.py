"""What two ends of a verbs rail say to each other outside of frames: heads of messages, and how to be reached.

In and out: integers and bytes, checked. Pure. What the numbers in a head mean is `protocol/verbs/flow.py`'s. The frame of a
long payload goes before its chunks, as on a TCP rail.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from helixrt.protocol.link.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameError
from helixrt.protocol.verbs.flow import MAX_SLOTS

HEAD = struct.Struct("<II")  # messages the sender of it has used, and the number of this one; both modulo 2^32
HEAD_BYTES = HEAD.size
SHORT_BYTES = MAX_BODY_BYTES  # payloads up to this travel behind their frame
RECEIVE_BYTES = HEAD_BYTES + HEADER_BYTES + SHORT_BYTES  # of every posted receive


# ---------------------------------------------------------------- how a queue pair is reached

_MAGIC = b"HLXV\x01"
_ATTRIBUTES = struct.Struct("<5sBHII16sQIIHHI")
ATTRIBUTES_BYTES = _ATTRIBUTES.size
READY = b"\x01"  # the last word of an exchange: both queue pairs can send


@dataclass(frozen=True, slots=True)
class Attributes:
    """A queue pair and its ring, as the other end must know them."""

    number: int  # of the queue pair
    packet: int  # sequence number of the first packet it sends (24 bits)
    gid: bytes  # 16
    lid: int
    mtu: int  # as verbs count them: 1 is 256 bytes, 5 is 4096
    ring_address: int
    ring_key: int
    slots: int
    receives: int
    chunk_bytes: int

    def pack(self) -> bytes:
        return _ATTRIBUTES.pack(
            _MAGIC, self.mtu, self.lid, self.number, self.packet, self.gid, self.ring_address, self.ring_key, 0,
            self.slots, self.receives, self.chunk_bytes,
        )  # fmt: skip


def parse_attributes(raw: bytes) -> Attributes:
    """Raises FrameError for what no queue pair has."""
    magic, mtu, lid, number, packet, gid, address, key, zero, slots, receives, chunk = _ATTRIBUTES.unpack(raw)
    if magic != _MAGIC or zero:
        raise FrameError("no attributes of a queue pair")
    if not 1 <= mtu <= 5 or number >> 24 or packet >> 24:
        raise FrameError(f"a queue pair {number} with mtu {mtu} and packet {packet}: no such one exists")
    if not 1 <= slots <= MAX_SLOTS or not 32 <= receives or not 4096 <= chunk <= 1 << 30:
        raise FrameError(f"a ring of {slots} slots of {chunk} bytes with {receives} receives: not one of ours")
    return Attributes(number, packet, gid, lid, mtu, address, key, slots, receives, chunk)
