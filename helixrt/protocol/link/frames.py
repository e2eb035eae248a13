"""The frames that travel on a rail: a header of fixed size, then `length` bytes.

In: `Frame`s, or bytes a peer sent. Out: bytes, or `Frame`s whose every field has been checked. What
follows the header of a DATA frame is the message itself, which goes straight from memory to memory and
never through here; what follows any other header is a body of at most `MAX_BODY_BYTES`.

Frames with a sequence number (up to `LAST_SEQUENCED`) are the ones that must take effect exactly once; they share
one numbering per direction of a link, over all its rails. The others may be lost, doubled or reordered.
Every header carries the cumulative acknowledgement, so traffic in one direction acknowledges the other.

All input from the peer is checked: invalid input raises `FrameError` with the field, its value and the rule.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from helixrt.errors import Cause, HelixError

VERSION = 2
_HEADER = struct.Struct("<BBHIqQqQQ")
HEADER_BYTES = _HEADER.size  # 48
MAX_BODY_BYTES = 4096
MAX_MESSAGE_BYTES = 1 << 40  # a DATA frame's length beyond this is garbage, whatever was agreed

_NAME = struct.Struct("<qIIQ")
_COUNTERS = struct.Struct("<QQ")
_RANGE = struct.Struct("<QQ")
_TEXT = struct.Struct("<H")
_TEXT_BYTES = 1024
MAX_NAMES = MAX_BODY_BYTES // _NAME.size  # per CREDIT or WANT
MAX_RANGES = (MAX_BODY_BYTES - _COUNTERS.size) // _RANGE.size  # per ACK or RESUME


class Kind(IntEnum):
    """Type of a frame; the comment lists the header fields that it uses in addition to the common ones."""

    DATA = 1  # sequence, op, index, length: the message follows; flag EAGER
    CREDIT = 2  # sequence; body: names of messages whose memory waits at the receiver
    WANT = 3  # sequence; body: names of short messages that wait at the sender for a credit
    SKIP = 4  # sequence: stands for a frame that is not sent again; index: what it would give back of eager memory
    SWITCH = 5  # sequence, index = rail, op = its incarnation: this rail carries traffic again (fail-back's fence)
    ACK = 6  # body: all that was received, and how much eager memory was given back
    RESUME = 7  # index = rail, op = its incarnation; body as ACK: nothing of that rail counts any more; flag ANSWER
    PROBE = 8  # op = number of the probe (less than 0: of a path); body: padding; answer on the same rail, unless flag MORE
    PROBED = 9  # op = number of the probe
    BEAT = 10  # alive; op = the oldest operation that this end waits for, or 0
    ABORT = 11  # body: the cause; the generation is over
    BYE = 12  # op = newest sequence number: this end closes in order


LAST_SEQUENCED = Kind.SWITCH  # this kind and those before it have sequence numbers

EAGER = 1  # flag of DATA: sent without credit, counts against the receiver's eager memory
ANSWER = 2  # flag of RESUME: the reply of a handshake, asks for none
MORE = 4  # flag of PROBE: another of this number follows, and is answered


class FrameError(HelixError):
    """The peer sent what no correct peer sends; its connection cannot be trusted any further."""


class Frame(NamedTuple):
    """A header's fields, and the body of every kind but DATA. Integers fit the widths of the wire format."""

    kind: Kind
    generation: int
    sequence: int = 0  # from 1 where the kind has one, else 0
    op: int = 0
    index: int = 0  # type: ignore[assignment]  # tuple.index is not used on frames
    length: int = 0  # bytes that follow the header
    acknowledged: int = 0  # all sequence numbers up to here have arrived here
    flags: int = 0
    body: bytes = b""


class Name(NamedTuple):
    """A message, as both ends call it, and the length they agreed on (bytes)."""

    op: int
    index: int  # type: ignore[assignment]
    length: int


class Counters(NamedTuple):
    """What one end has received: all up to `floor`, and the closed `ranges` above it; strictly growing.

    `consumed` is the total of eager memory (see `eager_charge`) that is free again.
    """

    floor: int
    consumed: int
    ranges: tuple[tuple[int, int], ...] = ()


def eager_charge(length: int) -> int:
    """What an eager message of `length` bytes counts for: its bytes, and its keeping."""
    return length + 64


# ---------------------------------------------------------------- to bytes


def pack(frame: Frame) -> bytes:
    """The header, and the body of every kind but DATA."""
    kind, generation, sequence, op, index, length, acknowledged, flags, body = frame
    return _HEADER.pack(VERSION, kind, flags, index, generation, sequence, op, length, acknowledged) + body


def names_body(names: Sequence[Name]) -> bytes:
    """The body of CREDIT and WANT; at most MAX_NAMES."""
    assert 0 < len(names) <= MAX_NAMES
    return b"".join(_NAME.pack(op, index, 0, length) for op, index, length in names)


def counters_body(counters: Counters) -> bytes:
    """The body of ACK and RESUME. Ranges beyond MAX_RANGES are left out: they are sent again, and dropped here."""
    floor, consumed, ranges = counters
    head = _COUNTERS.pack(floor, consumed)
    return head + b"".join(_RANGE.pack(*span) for span in ranges[:MAX_RANGES]) if ranges else head


def cause_body(cause: Cause) -> bytes:
    """The body of ABORT; each text is cut at 1 KiB."""
    texts = []
    for text in (cause.what, cause.rank, cause.log):
        raw = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        texts.append(_TEXT.pack(len(raw)) + raw)
    return b"".join(texts)


# ---------------------------------------------------------------- from bytes


class _Rule(NamedTuple):
    """What a header of one kind may hold."""

    kind: Kind
    flags: int
    least: int  # bytes of the body
    most: int
    has_op: bool
    has_index: bool


_OPS = {Kind.DATA, Kind.SWITCH, Kind.RESUME, Kind.PROBE, Kind.PROBED, Kind.BEAT, Kind.BYE}
_INDICES = {Kind.DATA, Kind.SKIP, Kind.SWITCH, Kind.RESUME}
_LEAST = {
    Kind.CREDIT: _NAME.size,
    Kind.WANT: _NAME.size,
    Kind.ACK: _COUNTERS.size,
    Kind.RESUME: _COUNTERS.size,
    Kind.PROBE: 0,
    Kind.ABORT: 6,
}
_RULES = tuple(
    _Rule(
        kind,
        {Kind.DATA: EAGER, Kind.RESUME: ANSWER, Kind.PROBE: MORE}.get(kind, 0),
        _LEAST.get(kind, 0),
        MAX_MESSAGE_BYTES if kind is Kind.DATA else MAX_BODY_BYTES if kind in _LEAST else 0,
        kind in _OPS,
        kind in _INDICES,
    )
    for kind in Kind
)


def parse(header: bytes | bytearray | memoryview) -> Frame:
    """The frame a header of HEADER_BYTES bytes announces; `length` bytes follow it. Raises FrameError."""
    version, number, flags, index, generation, sequence, op, length, acknowledged = _HEADER.unpack(header)
    if version != VERSION:
        raise FrameError(f"frame version {version}: this end uses version {VERSION}")
    if not 0 < number <= len(_RULES):
        raise FrameError(f"frame kind {number}: must be 1 to {len(_RULES)}")
    kind, allowed, least, most, has_op, has_index = _RULES[number - 1]
    if (sequence > 0) != (number <= LAST_SEQUENCED):
        raise FrameError(f"{kind.name} with sequence {sequence}: must {'' if sequence else 'not '}be 0")
    if flags & ~allowed:
        raise FrameError(f"{kind.name} with flags {flags:#x}: must have none but {allowed:#x}")
    if not least <= length <= most:
        raise FrameError(f"{kind.name} with {length} bytes after it: must be {least} to {most}")
    if (op and not has_op) or (index and not has_index):
        raise FrameError(f"{kind.name} with op {op}, index {index}: this kind has none")
    return Frame(kind, generation, sequence, op, index, length, acknowledged, flags)


def with_body(frame: Frame, body: bytes | bytearray | memoryview) -> Frame:
    """`frame` as `parse` gave it, with the `frame.length` bytes that followed, checked. Raises FrameError."""
    assert frame.kind is not Kind.DATA and len(body) == frame.length
    whole = Frame._make((*frame[:-1], bytes(body)))  # `_replace` takes three times as long
    if frame.kind in (Kind.CREDIT, Kind.WANT):
        names(whole)
    elif frame.kind in (Kind.ACK, Kind.RESUME):
        counters(whole)
    elif frame.kind is Kind.ABORT:
        cause(whole)
    return whole


def names(frame: Frame) -> list[Name]:
    """What a CREDIT or WANT names. Raises FrameError."""
    if len(frame.body) % _NAME.size:
        raise FrameError(f"{frame.kind.name} with a body of {len(frame.body)} bytes: must be a multiple of {_NAME.size}")
    found = []
    for op, index, padding, length in _NAME.iter_unpack(frame.body):
        if padding or length > MAX_MESSAGE_BYTES:
            raise FrameError(f"{frame.kind.name} of message ({op}, {index}) with {length} bytes: at most {MAX_MESSAGE_BYTES}")
        found.append(Name(op, index, length))
    return found


def counters(frame: Frame) -> Counters:
    """What was received, according to an ACK or RESUME. Raises FrameError."""
    if len(frame.body) < _COUNTERS.size or (len(frame.body) - _COUNTERS.size) % _RANGE.size:
        raise FrameError(f"{frame.kind.name} with a body of {len(frame.body)} bytes: no whole number of ranges")
    floor, consumed = _COUNTERS.unpack_from(frame.body)
    if len(frame.body) == _COUNTERS.size:
        return Counters(floor, consumed)
    ranges = tuple(_RANGE.iter_unpack(frame.body[_COUNTERS.size :]))
    end = floor
    for first, last in ranges:
        if not end + 1 < first <= last:
            raise FrameError(f"{frame.kind.name} with range {first} to {last} after {end}: ranges must grow and not touch")
        end = last
    return Counters(floor, consumed, ranges)


def cause(frame: Frame) -> Cause:
    """Why the peer aborted. Raises FrameError."""
    texts, at = [], 0
    for _ in range(3):
        if at + _TEXT.size > len(frame.body):
            raise FrameError(f"ABORT with a body of {len(frame.body)} bytes: ends before its three texts do")
        (size,) = _TEXT.unpack_from(frame.body, at)
        at += _TEXT.size
        if size > _TEXT_BYTES or at + size > len(frame.body):
            raise FrameError(f"ABORT with a text of {size} bytes in a body of {len(frame.body)}: at most {_TEXT_BYTES}")
        texts.append(frame.body[at : at + size].decode("utf-8", "replace"))
        at += size
    if at != len(frame.body):
        raise FrameError(f"ABORT with {len(frame.body) - at} bytes after its three texts")
    what, rank, log = texts
    return Cause(what, rank, log)
