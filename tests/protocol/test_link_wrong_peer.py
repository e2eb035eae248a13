"""What a wrong peer sends to a link: refused before it touches memory; what is merely old is dropped and counted."""

from __future__ import annotations

import pytest

from helixrt.emulate.link_pair import LONG, Pair
from helixrt.errors import Cause
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import EAGER, LAST_SEQUENCED, Frame, Kind
from helixrt.protocol.link.receive import MAX_AHEAD, MAX_WANTED
from helixrt.protocol.link.send import MAX_CREDITS


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(Kind.DATA, 7, 1, 1, 0, LONG + 1), "100001 bytes at the peer and 100000 here"),
        (Frame(Kind.DATA, 7, 1, 9, 0, LONG), "no receive was posted for it"),
        (Frame(Kind.DATA, 7, 1, 9, 0, 2000, flags=EAGER), "no receive was posted for it"),
        (Frame(Kind.DATA, 7, 1 << 40, 9, 0, 5, flags=EAGER), "the most that may come now"),
        (Frame(Kind.BEAT, 8), "generation 8"),
        (Frame(Kind.BEAT, 7, acknowledged=5), "newest sequence number"),
        (Frame(Kind.RESUME, 7, op=1, index=5, length=16, body=frames.counters_body(frames.Counters(0, 0))), "rail 5"),
        (Frame(Kind.ACK, 7, length=16, body=frames.counters_body(frames.Counters(0, 77))), "77 eager bytes"),
    ],
)
def test_what_was_not_agreed_loses_the_peer_and_touches_nothing(frame: Frame, says: str) -> None:
    pair = Pair()
    pair.post(1, 1)
    actions = pair.tell(1, m.FrameArrived(0, frame))
    assert not [action for action in actions if isinstance(action, m.Accept)]
    (lost,) = (action for action in actions if isinstance(action, m.Lost))
    assert lost.failure is m.Failure.PROGRAM and says in str(lost.cause)


def test_more_eager_messages_than_agreed_lose_the_peer() -> None:
    pair = Pair()
    for number in range(1, 10):
        pair.tell(1, m.FrameArrived(0, Frame(Kind.DATA, 7, number, 1, number, 1000, flags=EAGER)))
        if pair.links[1].closed:
            break
        pair.tell(1, m.PayloadArrived(0, number))
    assert number == 4 and "eager memory" in str(pair.said(1, m.Lost)[0].cause)


def want(sequence: int, *names: tuple[int, int], length: int = 5) -> Frame:
    body = frames.names_body([frames.Name(op, index, length) for op, index in names])
    return Frame(Kind.WANT, 7, sequence, length=len(body), body=body)


def credit(sequence: int, *names: tuple[int, int], length: int = LONG) -> Frame:
    return want(sequence, *names, length=length)._replace(kind=Kind.CREDIT)


SEQUENCED = {
    "DATA": lambda sequence: Frame(Kind.DATA, 7, sequence, 9, sequence, 0, flags=EAGER),
    "CREDIT": lambda sequence: credit(sequence, (9, 0)),
    "WANT": lambda sequence: want(sequence, (9, 0)),
    "SKIP": lambda sequence: Frame(Kind.SKIP, 7, sequence),
    "SWITCH": lambda sequence: Frame(Kind.SWITCH, 7, sequence, 1, 0),
}


def test_every_kind_with_a_sequence_number_is_tried_here() -> None:
    assert {Kind[name] for name in SEQUENCED} == {kind for kind in Kind if kind <= LAST_SEQUENCED}


@pytest.mark.parametrize("kind", SEQUENCED)
def test_frames_far_beyond_the_first_missing_one_lose_the_peer(kind: str) -> None:
    """Number 1 never comes, so all that come after it have to be remembered."""
    pair = Pair()
    for sequence in range(2, 100_000):
        pair.tell(1, m.FrameArrived(0, SEQUENCED[kind](sequence)))
        if pair.links[1].closed:
            break
        if kind == "DATA":
            pair.tell(1, m.PayloadArrived(0, sequence))
            if pair.links[1].closed:
                break
    (lost,) = pair.said(1, m.Lost)
    assert lost.failure is m.Failure.PROGRAM
    assert sequence <= MAX_AHEAD + 1 and len(pair.links[1]._inbox.ledger.above) <= MAX_AHEAD


@pytest.mark.parametrize("posted", [True, False])
def test_a_message_that_is_wanted_again_and_again_loses_the_peer(posted: bool) -> None:
    """A peer asks once; each answer would have to be kept as long as it acknowledges none."""
    pair = Pair()
    if posted:
        pair.post(1, 1, length=5)
    for sequence in range(1, 100_000):
        pair.tell(1, m.FrameArrived(0, want(sequence, (1, 0))))
        if pair.links[1].closed:
            break
    assert "wanted before" in str(pair.said(1, m.Lost)[0].cause)
    assert len(pair.links[1]._outbox.control) <= 1


def test_more_wanted_messages_than_can_wait_lose_the_peer() -> None:
    pair = Pair()
    names = [(9, index) for index in range(MAX_WANTED + 1)]
    for sequence, begin in enumerate(range(0, len(names), frames.MAX_NAMES), 1):
        pair.tell(1, m.FrameArrived(0, want(sequence, *names[begin : begin + frames.MAX_NAMES])))
    assert "wait for their receiver" in str(pair.said(1, m.Lost)[0].cause)


def test_more_credits_than_can_wait_lose_the_peer() -> None:
    pair = Pair()
    names = [(9, index) for index in range(MAX_CREDITS + 1)]
    for sequence, begin in enumerate(range(0, len(names), frames.MAX_NAMES), 1):
        pair.tell(1, m.FrameArrived(0, credit(sequence, *names[begin : begin + frames.MAX_NAMES])))
    assert "were not submitted" in str(pair.said(1, m.Lost)[0].cause)


def test_two_sequence_numbers_for_one_message_lose_the_peer() -> None:
    pair = Pair(rails=2)
    pair.tell(1, m.FrameArrived(0, Frame(Kind.DATA, 7, 1, 1, 0, 5, flags=EAGER)))
    pair.tell(1, m.FrameArrived(1, Frame(Kind.DATA, 7, 2, 1, 0, 5, flags=EAGER)))
    assert "two sequence numbers" in str(pair.said(1, m.Lost)[0].cause)


def test_ends_that_disagree_about_a_length_lose_each_other() -> None:
    pair = Pair()
    pair.post(1, 1, length=LONG)
    pair.submit(0, 1, length=LONG + 8)
    pair.flow()
    assert "100008 bytes here and 100000 at the peer" in str(pair.said(0, m.Lost)[0].cause)


def test_what_an_older_generation_sends_is_dropped_and_counted() -> None:
    pair = Pair()
    pair.post(1, 1)
    (accept,) = (a for a in pair.tell(1, m.FrameArrived(0, Frame(Kind.DATA, 6, 1, 1, 0, LONG))) if isinstance(a, m.Accept))
    assert accept.landing is m.Landing.DROP
    assert not pair.tell(1, m.PayloadArrived(0, 1))
    pair.tell(1, m.FrameArrived(0, Frame(Kind.ABORT, 6, length=6, body=frames.cause_body(Cause("old")))))
    assert pair.links[1].stale == 2 and not pair.links[1].closed and not pair.said(1, m.Received)


def test_a_connection_the_peer_has_left_already_is_not_used() -> None:
    pair = Pair(rails=2)
    resume = Frame(Kind.RESUME, 7, op=5, index=0, length=16, body=frames.counters_body(frames.Counters(0, 0)))
    pair.tell(1, m.FrameArrived(1, resume))
    assert m.ResetRail(0) in pair.log[1]
    assert pair.tell(1, m.RailUp(0, 5)) == [m.ResetRail(0)]
    pair.tell(1, m.RailUp(0, 6))
    assert pair.links[1].rails[0].up
