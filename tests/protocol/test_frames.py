"""Frames: what is packed comes out again, and garbage is refused with the field, its value and the rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixrt.errors import Cause
from helixrt.protocol.link import frames
from helixrt.protocol.link.frames import ANSWER, EAGER, HEADER_BYTES, MAX_BODY_BYTES, Counters, Frame, FrameError, Kind, Name

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
U32 = st.integers(0, 2**32 - 1)
NAMES = st.lists(st.builds(Name, I64, U32, st.integers(0, frames.MAX_MESSAGE_BYTES)), min_size=1, max_size=frames.MAX_NAMES)


@st.composite
def counters(draw: st.DrawFn) -> Counters:
    gaps = draw(st.lists(st.tuples(st.integers(2, 9), st.integers(0, 9)), max_size=frames.MAX_RANGES))
    floor = end = draw(st.integers(0, 2**60))
    ranges = []
    for gap, size in gaps:
        first = end + gap
        end = first + size
        ranges.append((first, end))
    return Counters(floor, draw(U64), tuple(ranges))


@st.composite
def any_frame(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(Kind))
    sequence = draw(st.integers(1, 2**64 - 1)) if kind <= frames.LAST_SEQUENCED else 0
    frame = Frame(kind, draw(I64), sequence, acknowledged=draw(U64))
    body = b""
    match kind:
        case Kind.DATA:
            length = draw(st.integers(0, frames.MAX_MESSAGE_BYTES))
            return frame._replace(op=draw(I64), index=draw(U32), length=length, flags=draw(st.sampled_from((0, EAGER))))
        case Kind.CREDIT | Kind.WANT:
            body = frames.names_body(draw(NAMES))
        case Kind.ACK:
            body = frames.counters_body(draw(counters()))
        case Kind.RESUME:
            body = frames.counters_body(draw(counters()))
            frame = frame._replace(op=draw(I64), index=draw(U32), flags=draw(st.sampled_from((0, ANSWER))))
        case Kind.SWITCH:
            frame = frame._replace(op=draw(I64), index=draw(U32))
        case Kind.SKIP:
            frame = frame._replace(index=draw(U32))
        case Kind.PROBE | Kind.PROBED | Kind.BYE:
            frame = frame._replace(op=draw(I64))
        case Kind.ABORT:
            body = frames.cause_body(Cause(draw(st.text(max_size=50)), draw(st.text(max_size=5)), draw(st.text(max_size=5))))
    return frame._replace(length=len(body), body=body)


def read(wire: bytes) -> Frame:
    """As a driver does: a header, then its body."""
    frame = frames.parse(wire[:HEADER_BYTES])
    return frame if frame.kind is Kind.DATA else frames.with_body(frame, wire[HEADER_BYTES : HEADER_BYTES + frame.length])


@settings(max_examples=60)
@given(any_frame())
def test_what_is_packed_comes_out_again(frame: Frame) -> None:
    wire = frames.pack(frame)
    assert len(wire) == HEADER_BYTES + len(frame.body) <= HEADER_BYTES + MAX_BODY_BYTES
    assert read(wire) == frame


@given(NAMES)
def test_names_come_out_of_a_body(names: list[Name]) -> None:
    body = frames.names_body(names)
    assert frames.names(Frame(Kind.CREDIT, 1, 1, length=len(body), body=body)) == names


@given(counters())
def test_counters_come_out_of_a_body(counted: Counters) -> None:
    body = frames.counters_body(counted)
    assert frames.counters(Frame(Kind.ACK, 1, length=len(body), body=body)) == counted


def test_more_ranges_than_a_body_holds_are_left_out() -> None:
    spans = tuple((10 * n, 10 * n + 1) for n in range(1, frames.MAX_RANGES + 50))
    body = frames.counters_body(Counters(3, 0, spans))
    assert len(body) <= MAX_BODY_BYTES
    assert frames.counters(Frame(Kind.ACK, 1, length=len(body), body=body)).ranges == spans[: frames.MAX_RANGES]


def test_a_cause_of_any_length_fits_a_frame() -> None:
    body = frames.cause_body(Cause("ü" * 5000, "rank 3", "x" * 5000))
    assert len(body) <= MAX_BODY_BYTES
    cause = frames.cause(Frame(Kind.ABORT, 1, length=len(body), body=body))
    assert cause.what.startswith("ü" * 500) and cause.rank == "rank 3"


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_garbage_is_an_error_or_a_bounded_frame(header: bytes) -> None:
    for first in (header[0], frames.VERSION):
        for kind in (header[1], header[1] % 13):
            try:
                frame = frames.parse(bytes((first, kind)) + header[2:])
            except FrameError:
                continue
            assert frame.length <= (frames.MAX_MESSAGE_BYTES if frame.kind is Kind.DATA else MAX_BODY_BYTES)


@given(st.sampled_from([kind for kind in Kind if kind is not Kind.DATA]), st.binary(max_size=200))
def test_a_garbage_body_is_an_error_and_nothing_else(kind: Kind, body: bytes) -> None:
    try:
        frames.with_body(Frame(kind, 1, length=len(body), body=b""), body)
    except FrameError:
        assert kind in (Kind.CREDIT, Kind.WANT, Kind.ACK, Kind.RESUME, Kind.ABORT)


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(Kind.DATA, 1, 0), "sequence 0"),
        (Frame(Kind.DATA, 1, 1, length=frames.MAX_MESSAGE_BYTES + 1), "must be 0 to"),
        (Frame(Kind.DATA, 1, 1, flags=ANSWER), "flags 0x2"),
        (Frame(Kind.ACK, 1, 5, length=16), "must be 0"),
        (Frame(Kind.CREDIT, 1, 0, length=24), "must not be 0"),
        (Frame(Kind.CREDIT, 1, 1, length=MAX_BODY_BYTES + 1), "4097 bytes"),
        (Frame(Kind.BEAT, 1, length=1), "1 bytes after it: must be 0 to 0"),
        (Frame(Kind.CREDIT, 1, 1, op=3, length=24), "op 3"),
        (Frame(Kind.ACK, 1, index=3, length=16), "index 3"),
        (Frame(Kind.PROBE, 1, flags=EAGER), "flags 0x1"),
    ],
)
def test_what_is_wrong_is_named(frame: Frame, says: str) -> None:
    with pytest.raises(FrameError, match=says):
        frames.parse(frames.pack(frame._replace(body=b"")))


def test_another_version_and_an_unknown_kind_are_refused() -> None:
    wire = bytearray(frames.pack(Frame(Kind.BEAT, 1)))
    wire[1] = 13
    with pytest.raises(FrameError, match="kind 13"):
        frames.parse(wire)
    wire[0] = frames.VERSION + 1
    with pytest.raises(FrameError, match=f"version {frames.VERSION + 1}"):
        frames.parse(wire)


@pytest.mark.parametrize("ranges", [((5, 6),), ((9, 8),), ((7, 8), (9, 9)), ((7, 8), (6, 20))])
def test_ranges_must_grow(ranges: tuple[tuple[int, int], ...]) -> None:
    body = frames.counters_body(Counters(4, 0, ranges))
    with pytest.raises(FrameError, match="range"):
        frames.with_body(Frame(Kind.ACK, 1, length=len(body)), body)
