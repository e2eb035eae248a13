"""A rail of a link fails: what it carried goes elsewhere, once; classes of failure; second failures."""

from __future__ import annotations

from dataclasses import replace

from helixrt.emulate.link_pair import OPTIONS, Pair
from helixrt.protocol.link import frames
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.rails import SendState
from tests.protocol.posted import posted

# ---------------------------------------------------------------- fallback


def test_what_was_on_a_failed_rail_is_resent_on_another_once_the_peer_has_fenced_it() -> None:
    pair = posted(rails=2, striped=False)
    pair.hold(0)
    pair.submit(0, 1)
    pair.hold(1, 0)
    pair.cut(0, m.Failure.PATH, 0)
    pair.flow()
    assert pair.kinds(0, 1) == [Kind.RESUME]  # nothing again before the answer
    pair.release(1)
    assert m.ResetRail(0) in pair.said(1, m.ResetRail)  # the peer saw nothing wrong with it, and left it
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]
    assert pair.links[0].resent == 1 and pair.links[1].duplicates == 0


def test_what_arrived_and_lost_its_acknowledgement_is_not_resent() -> None:
    pair = posted(rails=2, striped=False)
    pair.hold(0, 0)
    pair.submit(0, 1)
    pair.flow()
    assert pair.said(1, m.Received) and not pair.said(0, m.Sent)
    pair.cut(0)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)] and pair.kinds(0).count(Kind.DATA) == 1 and pair.links[0].resent == 0


def test_a_half_delivered_message_is_received_once_it_is_whole() -> None:
    pair = posted(rails=2, striped=False)
    pair.submit(0, 1)
    pair.tell(1, m.FrameArrived(0, pair.wire[0, 1].popleft()))  # and half of the payload
    pair.cut(0)
    pair.flow()
    assert [(a.rail, a.landing) for a in pair.said(1, m.Accept)] == [(0, m.Landing.PLACE), (1, m.Landing.PLACE)]
    assert pair.said(1, m.Received) == [m.Received(1, 0)]


def test_a_newer_copy_takes_the_memory_from_an_older_one_that_is_under_way() -> None:
    pair = posted(rails=2)
    pair.submit(0, 1)
    (send,) = pair.said(0, m.SendData)
    other = 1 - send.rail
    pair.tell(1, m.FrameArrived(send.rail, send.frame))
    assert pair.tell(1, m.FrameArrived(other, send.frame))[:2] == [
        m.Discard(send.rail),
        m.Accept(other, send.frame.sequence, 1, 0, m.Landing.PLACE),
    ]
    assert m.Received(1, 0) not in pair.tell(1, m.PayloadArrived(send.rail, send.frame.sequence))
    assert m.Received(1, 0) in pair.tell(1, m.PayloadArrived(other, send.frame.sequence))


def test_a_copy_of_what_has_arrived_is_dropped_and_counted() -> None:
    pair = Pair(rails=2)
    pair.post(1, 1, length=5)
    pair.submit(0, 1, length=5)
    (send,) = pair.said(0, m.SendData)
    pair.flow()
    (accept,) = pair.tell(1, m.FrameArrived(1, send.frame))
    assert accept.landing is m.Landing.DROP and not pair.tell(1, m.PayloadArrived(1, send.frame.sequence))
    assert pair.links[1].duplicates == 1 and len(pair.said(1, m.Received)) == 1


def test_one_rail_that_returns_is_enough() -> None:
    pair = posted()
    pair.hold(0)
    pair.submit(0, 1)
    pair.cut(0)
    assert pair.said(0, m.RestoreRail) == [m.RestoreRail(0)]  # at once: the first time it needs no rest
    pair.held.clear()
    pair.up(0)
    pair.flow()
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]
    assert pair.states(0) == pair.states(1) == [SendState.DEFAULT]


def test_a_second_failure_during_the_handshake_is_survived() -> None:
    pair = posted(rails=3, striped=False)
    pair.hold(0), pair.hold(1)
    pair.submit(0, 1)
    pair.cut(0)
    assert Kind.RESUME in pair.kinds(0, 1)
    pair.cut(1)  # with the handshake on it
    pair.flow()
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]
    assert pair.links[1].duplicates == 0


def test_an_older_handshake_says_nothing_about_a_newer_failure() -> None:
    """The peer left connection 1 and may still take what connection 2 brings it: nothing is resent before it left that too."""
    pair = Pair(rails=2, options=replace(OPTIONS, striped=False))
    pair.cut(0)
    pair.flow()
    pair.up(0)
    pair.wait(0.1)
    pair.post(1, 1)
    pair.flow()
    pair.hold(0), pair.hold(1, 0)
    pair.submit(0, 1)
    assert pair.said(0, m.SendData)[-1].rail == 0
    pair.cut(0, m.Failure.PATH, 0)
    older = Frame(Kind.RESUME, 7, op=1, index=0, length=16, body=frames.counters_body(frames.Counters(0, 0)))
    pair.tell(0, m.FrameArrived(1, older))
    assert pair.kinds(0).count(Kind.DATA) == 1
    pair.release(1)
    assert pair.kinds(0).count(Kind.DATA) == 2 and pair.said(1, m.Received) == [m.Received(1, 0)]


def test_a_lost_handshake_is_repeated() -> None:
    pair = posted(rails=2, striped=False)
    pair.hold(0), pair.hold(1)
    pair.submit(0, 1)
    pair.cut(0, m.Failure.PATH, 0)
    pair.wire[1, 1].clear()
    pair.release(1)
    assert not pair.said(1, m.Received)
    pair.wait(0.3)
    assert pair.said(1, m.Received) == [m.Received(1, 0)]


def test_an_operation_that_must_not_be_repeated_fails_when_its_fate_is_unknown() -> None:
    pair = posted(rails=2, messages=2, striped=False)
    pair.hold(0, 0)
    pair.submit(0, 1, 0, repeatable=False)
    pair.flow()  # it arrives, its acknowledgement does not
    pair.hold(0)
    pair.submit(0, 1, 1, repeatable=False)
    pair.cut(0)
    assert not pair.said(0, m.Sent, m.Failed)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)]
    (failed,) = pair.said(0, m.Failed)
    assert (failed.index, failed.sending) == (1, True) and "cable cut" in str(failed.cause)
    assert pair.kinds(0).count(Kind.DATA) == 2
    pair.submit(0, 2, length=10)  # and the link goes on
    pair.post(1, 2, length=10)
    pair.wait(0.1)
    assert m.Received(2, 0) in pair.log[1] and not pair.links[0]._outbox.flights


# ---------------------------------------------------------------- classes of failure


def test_a_cascade_does_not_hide_the_cause() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailDown(0, m.Failure.DEVICE, "port 1 went down"))
    pair.tell(0, m.RailDown(0, m.Failure.CASCADE, "work flushed"))
    (lost,) = (a for a in pair.tell(0, m.RailDown(1, m.Failure.PROGRAM, "bad key")) if isinstance(a, m.Lost))
    assert lost.failure is m.Failure.PROGRAM
    assert "bad key" in str(lost.cause) and "port 1 went down" in str(lost.cause) and "flushed" not in str(lost.cause)


def test_a_device_of_ours_rests_before_it_is_tried() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailDown(0, m.Failure.DEVICE, "port 1 went down"))
    assert not pair.said(0, m.RestoreRail)
    pair.wait(0.3)
    assert pair.said(0, m.RestoreRail) == [m.RestoreRail(0)]


def test_a_program_error_is_not_tried_again_anywhere() -> None:
    pair = posted(rails=2)
    pair.submit(0, 1)
    actions = pair.tell(0, m.RailDown(0, m.Failure.PROGRAM, "memory is not registered"))
    assert [type(action) for action in actions] == [m.Lost, m.ResetRail] and pair.links[0].closed
    assert pair.tell(0, m.Tick()) == []
