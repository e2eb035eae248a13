"""What a wrong peer sends to a link: refused before it touches memory; what is merely old is dropped and counted."""

from __future__ import annotations

import pytest

from helixrt.emulate.link_pair import LONG, Pair
from helixrt.errors import Cause
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import EAGER, Frame, Kind


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Frame(Kind.DATA, 7, 1, 1, 0, LONG + 1), "100001 bytes at the peer and 100000 here"),
        (Frame(Kind.DATA, 7, 1, 9, 0, LONG), "nobody posted it"),
        (Frame(Kind.DATA, 7, 1, 9, 0, 2000, flags=EAGER), "nobody posted it"),
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
