"""A link in time: peers that die or fall silent, rails that do, deadlines of messages, the end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helixrt.emulate.link_pair import OPTIONS, Pair
from helixrt.errors import Cause
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.rails import SendState
from tests.protocol.posted import posted

# ---------------------------------------------------------------- peers and rails


def test_a_dead_peer_is_lost_when_the_last_rail_says_that_nobody_is_there() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailDown(0, m.Failure.PEER_GONE, "connection refused"))
    assert not pair.links[0].closed  # it lives on the other rail
    pair.tell(0, m.RailDown(1, m.Failure.PATH, "end of stream"))
    assert not pair.links[0].closed and m.RestoreRail(1) in pair.said(0, m.RestoreRail)
    pair.tell(0, m.RailDown(1, m.Failure.PEER_GONE, "connection refused"))
    (lost,) = pair.said(0, m.Lost)
    assert lost.failure is m.Failure.PEER_GONE and "connection refused" in str(lost.cause)


def test_a_link_whose_rails_never_come_tries_them_again_and_ends_by_a_deadline() -> None:
    pair = Pair(rails=2, connect=False, options=replace(OPTIONS, connect_s=5.0))
    assert pair.links[0].deadline == pair.links[1].deadline == -math.inf  # begins with the first event
    began, answered = pair.now, 0
    for rail in range(2):
        pair.tell(0, m.RailDown(rail, m.Failure.PATH, "no route"))
    while not pair.said(0, m.Lost):
        assert pair.now <= began + 5.1
        pair.wait(0.05)
        tries = pair.said(0, m.RestoreRail)
        for again in tries[answered:]:
            pair.tell(0, m.RailDown(again.rail, m.Failure.PATH, "no route"))
        answered = len(tries)
    assert pair.now >= began + 5.0 and answered >= 2 * 10
    (lost,) = pair.said(0, m.Lost)
    assert lost.failure is m.Failure.PATH and "no rail came up in 5 s" in str(lost.cause) and "no route" in str(lost.cause)
    assert pair.said(1, m.Lost)  # which heard nothing at all


def test_a_silent_peer_is_lost_within_one_and_a_half_periods() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, period_s=1.0))
    pair.wait(10.0)
    assert not pair.links[0].closed
    began = pair.now
    pair.hold(0, 0), pair.hold(1, 0)
    while not pair.said(0, m.Lost):
        pair.wait(0.01)
        assert pair.now - began <= 1.5
    assert "no sign of life" in str(pair.said(0, m.Lost)[0].cause)


def test_acknowledgements_of_the_kernel_are_signs_of_life_of_a_peer_that_says_nothing() -> None:
    """For seconds; and of two rails the one that is not acknowledged is left, as one that falls silent."""
    pair = posted(rails=2, period_s=1.0)
    for rail in range(2):
        pair.hold(rail, 0)
    for _ in range(50):
        pair.wait(0.1)
        for rail in range(2):
            pair.tell(0, m.Acknowledged(rail, pair.now - 0.05))
    assert not pair.links[0].closed and m.ResetRail(1) not in pair.log[0]
    for _ in range(12):
        pair.wait(0.1)
        pair.tell(0, m.Acknowledged(0, pair.now - 0.05))
        pair.tell(0, m.Acknowledged(1, pair.now - 2.0))
    assert m.ResetRail(1) in pair.log[0] and not pair.links[0].closed
    began = pair.now
    while not pair.said(0, m.Lost):
        pair.wait(0.01)
        assert pair.now - began <= 1.5


@pytest.mark.parametrize("crossed", [False, True])
def test_a_rail_that_was_set_up_without_crossing_it_is_no_sign_of_life(crossed: bool) -> None:
    """Queue pairs are set up over another network: they come up again and again, and their NICs are cut off."""
    link = Link(1, 1, 1, LinkOptions(period_s=1.0))
    link.on(m.RailUp(0, 1), 0.0)
    actions: list[m.Action] = []
    for turn in range(2, 60):
        now = turn / 20
        actions += link.on(m.RailDown(0, m.Failure.PATH, "no answer"), now)
        actions += link.on(m.RailUp(0, turn, crossed), now)
        actions += link.on(m.Tick(), now)
    lost = [each for each in actions if isinstance(each, m.Lost)]
    assert link.closed is (not crossed) and len(lost) == (not crossed)


def test_a_payload_that_trickles_in_is_a_sign_of_life() -> None:
    """Its sender's beats wait behind it: the bytes themselves must count, for the peer and for the rail."""
    pair = posted(rails=2, period_s=1.0)
    pair.submit(0, 1)
    (send,) = pair.said(0, m.SendData)
    slow, other = send.rail, 1 - send.rail
    pair.tell(1, m.FrameArrived(slow, pair.wire[slow, 1].popleft()))
    pair.hold(slow, 1)
    for _ in range(50):
        pair.wait(0.1)
        pair.tell(1, m.Heard(slow))
    pair.hold(other, 1)  # and now nothing comes but that
    for _ in range(20):
        pair.wait(0.1)
        pair.tell(1, m.Heard(slow))
    assert not pair.links[1].closed and m.ResetRail(slow) not in pair.log[1]
    pair.tell(1, m.PayloadArrived(slow, send.frame.sequence))
    assert pair.said(1, m.Received) == [m.Received(1, 0)]


def test_a_rail_that_falls_silent_alone_is_left() -> None:
    pair = posted(rails=2, period_s=1.0)
    pair.hold(0)
    pair.wait(2.0)
    assert pair.links[0].rails[0].send is SendState.FALLBACK and not pair.links[0].closed
    pair.submit(0, 1)
    pair.flow()
    assert pair.said(1, m.Received)


def test_a_rail_on_which_we_sent_nothing_for_a_while_is_not_left() -> None:
    """Our process was held: meanwhile the kernel went on sending what one rail had, and got acknowledgements, and the other was
    idle, as nobody sent a probe."""
    pair = posted(rails=2, period_s=1.0)
    pair.wait(2.0)
    link = pair.links[0]
    woke = pair.now + 5.0
    events = (m.Acknowledged(0, woke - 0.01), m.Acknowledged(1, pair.now), m.Tick())
    actions = [action for event in events for action in link.on(event, woke)]
    assert not [each for each in actions if isinstance(each, m.ResetRail | m.Lost)]
    for turn in range(1, 12):
        now = woke + turn / 10
        actions += [*link.on(m.Acknowledged(0, now), now), *link.on(m.Tick(), now)]
    assert m.ResetRail(1) in actions, "nothing answered what was sent since then"


def test_a_rail_that_swallows_a_frame_is_left_by_the_software_deadline() -> None:
    pair = posted(rails=2, striped=False, attempt_s=3.0)
    pair.submit(0, 1)
    pair.wire[0, 1].clear()
    pair.wait(2.5)
    assert not pair.said(1, m.Received)
    pair.wait(1.0)
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]


def test_a_rail_that_returns_late_is_not_judged_by_what_it_carried_before() -> None:
    pair = posted(attempt_s=0.5)
    pair.hold(0)
    pair.submit(0, 1)
    pair.cut(0)
    pair.wait(1.0)
    pair.up(0)  # the handshake is under way
    for me in range(2):
        pair.tell(me, m.Tick())
    assert pair.links[0].rails[0].up and not pair.said(0, m.ResetRail)


# ---------------------------------------------------------------- the end


def test_an_abort_tells_the_peer_the_first_reason() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.Abort(Cause("disk full", "rank 0")))
    assert pair.links[0].closed
    pair.flow()
    assert pair.said(1, m.PeerAborted) == [m.PeerAborted(Cause("disk full", "rank 0"))]
    assert pair.links[1].closed and pair.links[1].first.cause == Cause("disk full", "rank 0")


def test_a_farewell_waits_for_what_was_sent_before_it() -> None:
    pair = Pair(rails=2)
    pair.hold(0, 1)
    pair.post(1, 1, length=5)
    pair.submit(0, 1, length=5)
    pair.tell(0, m.Close())
    pair.flow()  # the farewell is there, on the other rail
    assert not pair.said(1, m.PeerClosed)
    pair.release(0)
    assert [type(a) for a in pair.said(1, m.Received, m.PeerClosed)] == [m.Received, m.PeerClosed]
