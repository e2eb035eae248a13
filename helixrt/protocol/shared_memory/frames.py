"""What stands in the ring of a segment: frames. Pure.

In and out: numbers. `transport/shared_memory/segment.py` packs them into memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from helixrt.errors import HelixError

HEADER_BYTES = LINE_BYTES = 64
OFFERS = 512  # places in a segment's table of offers


class SegmentError(HelixError):
    """The peer's segment holds what no correct peer writes; its link cannot be trusted any further."""


class Kind(IntEnum):
    EAGER = 1  # op, index, length; the message is the payload
    OFFER = 2  # op, index, length, address, ticket: a long message waits in the owner's memory
    PULL = 3  # op, index: the reader of the offer requests it through the ring
    PIECE = 4  # op, index, length, offset; the payload is this part of the offered message
    TAKEN = 5  # op, index: the reader of the offer has read it from memory
    PAD = 6  # nothing: the rest of the ring up to its end


class Frame(NamedTuple):
    kind: int
    index: int = 0  # type: ignore[assignment]  # tuple.index is not used on frames
    op: int = 0
    length: int = 0  # of the message
    where: int = 0  # OFFER: address; PIECE: offset
    ticket: int = 0  # OFFER: what stands at `ticket % OFFERS` of the offers' table as long as the offer does; 0: nowhere
    size: int = 0  # of the payload


def padded(size: int) -> int:
    return (size + LINE_BYTES - 1) & -LINE_BYTES


def charge(size: int) -> int:
    """The bytes of memory that a short message of `size` bytes counts for."""
    return HEADER_BYTES + padded(size)
