"""How a link delivers: credits, short messages held for their receiver, bounded bytes; its callers take memory back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.emulate.link_pair import LONG, OPTIONS, Pair
from helixrt.errors import ConfigError
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Kind
from helixrt.protocol.link.options import LinkOptions
from tests.protocol.posted import posted

# ---------------------------------------------------------------- credits and eager messages


def test_a_short_message_is_sent_at_once_and_held_until_it_is_posted() -> None:
    pair = Pair()
    assert [type(action) for action in pair.submit(0, 1, length=10)] == [m.Keep, m.Sent, m.SendData]
    pair.flow()
    assert [a.landing for a in pair.said(1, m.Accept)] == [m.Landing.HOLD] and not pair.said(1, m.Received)
    assert pair.post(1, 1, length=10) == [m.Deliver(1, 0), m.Received(1, 0)]
    pair.wait(0.1)
    assert pair.said(0, m.Release) == [m.Release(1, 0)]


def test_a_posted_short_message_lands_in_place() -> None:
    pair = Pair()
    assert pair.post(1, 1, length=10) == []  # needs no credit
    pair.submit(0, 1, length=10)
    pair.flow()
    assert [a.landing for a in pair.said(1, m.Accept)] == [m.Landing.PLACE] and pair.said(1, m.Received) == [m.Received(1, 0)]


@pytest.mark.parametrize("post_first", [True, False])
def test_a_long_message_waits_for_its_receiver_and_is_sent_when_it_has_arrived(post_first: bool) -> None:
    pair = Pair()
    if post_first:
        pair.post(1, 1)
        pair.flow()
    pair.submit(0, 1)
    if not post_first:
        pair.flow()
        assert Kind.DATA not in pair.kinds(0)
        pair.post(1, 1)
        pair.deliver(0, 0)  # the credit
    pair.hold(0, 0)
    pair.flow()
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and not pair.said(0, m.Sent)
    pair.release(0)
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)]


def test_a_late_receiver_holds_up_nothing_else() -> None:
    pair = Pair()
    for index in range(100):  # nobody posts these: long ones, and more short ones than eager memory takes
        pair.submit(0, 1, index, LONG if index % 2 else 900)
    for index, length in ((0, LONG), (1, 900), (2, 0)):
        pair.submit(0, 2, index, length)
        pair.post(1, 2, index, length)
    pair.flow()
    assert sorted(pair.said(1, m.Received), key=lambda r: r.index) == [m.Received(2, 0), m.Received(2, 1), m.Received(2, 2)]
    assert pair.links[1]._inbox.held_bytes <= 4000
    for index in range(100):
        pair.post(1, 1, index, LONG if index % 2 else 900)
    pair.flow()
    assert len(pair.said(1, m.Received)) == 103


def test_eager_memory_that_is_given_back_is_used_again() -> None:
    pair = Pair()
    for index in range(50):
        pair.submit(0, 1, index, 900)
        pair.post(1, 1, index, 900)
        pair.flow()
    assert len(pair.said(1, m.Received)) == 50 and Kind.WANT not in pair.kinds(0)


def test_bytes_and_frames_in_flight_are_bounded() -> None:
    pair = Pair(options=replace(OPTIONS, window_bytes=3 * LONG, window_frames=20))
    pair.hold(0, 1)
    for index in range(10):
        pair.submit(0, 1, index)
        pair.post(1, 1, index)
    pair.flow()
    assert pair.kinds(0).count(Kind.DATA) == 3
    pair.release(0)
    assert len(pair.said(1, m.Received)) == 10


def test_messages_go_where_least_is_on_its_way() -> None:
    pair = posted(rails=2, messages=4)
    for index in range(4):
        pair.submit(0, 1, index)
    assert [pair.kinds(0, rail).count(Kind.DATA) for rail in range(2)] == [2, 2]


def test_a_message_that_must_not_be_repeated_waits_for_credit_however_short() -> None:
    pair = Pair()
    pair.submit(0, 1, length=8, repeatable=False)
    pair.flow()
    assert Kind.DATA not in pair.kinds(0) and not pair.said(0, m.Keep)
    pair.post(1, 1, length=8)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)]


# ---------------------------------------------------------------- the caller takes memory back


def test_a_deadline_ends_one_message_and_nothing_else() -> None:
    pair = Pair()
    pair.submit(0, 1, 0, deadline=pair.now + 0.5)
    pair.post(0, 1, 1, deadline=pair.now + 0.7)
    pair.wait(0.6)
    assert [(f.index, f.sending) for f in pair.said(0, m.Failed)] == [(0, True)]
    pair.wait(0.2)
    assert [(f.index, f.sending) for f in pair.said(0, m.Failed)] == [(0, True), (1, False)]
    pair.submit(1, 1, 1)  # the peer sends what nobody waits for any more: dropped
    pair.submit(0, 2, 0, length=5)
    pair.post(1, 2, 0, length=5)
    pair.flow()
    assert m.Received(2, 0) in pair.log[1] and not pair.links[0].closed


def test_a_deadline_met_is_no_failure() -> None:
    pair = Pair()
    pair.submit(0, 1, 0, deadline=pair.now + 0.5)
    pair.post(1, 1, 0, deadline=pair.now + 0.5)
    pair.flow()
    pair.wait(1.0)
    assert not pair.said(0, m.Failed) and not pair.said(1, m.Failed)


def test_forgetting_takes_all_memory_back() -> None:
    pair = Pair()
    for index in range(3):
        pair.post(1, 1, index)
    pair.submit(1, 1, 9, length=10)
    pair.flow()
    pair.submit(0, 1, 0)
    under_way = pair.wire[0, 1].popleft()
    pair.tell(1, m.FrameArrived(0, under_way))
    pair.submit(0, 1, 1)  # on the rail
    assert set(pair.tell(0, m.Forget(1))) == {m.Detach(1, 0), m.Detach(1, 1), m.Free(1, 9)}
    assert m.Discard(0) in pair.tell(1, m.Forget(1))
    pair.tell(1, m.PayloadArrived(0, under_way.sequence))
    pair.flow()  # the other one comes as well, and is dropped
    assert not pair.said(1, m.Received) and not pair.said(0, m.Sent) and not pair.links[1].closed
    assert not pair.links[0]._outbox.flights
    with pytest.raises(ValueError, match="over"):
        pair.submit(0, 1, 5)


def test_what_was_forgotten_is_not_sent_again() -> None:
    pair = posted(rails=2, striped=False)
    pair.hold(0)
    pair.submit(0, 1)
    pair.submit(0, 1, 1, length=10)
    pair.tell(0, m.Forget(1))
    pair.cut(0)
    pair.wait(0.3)
    assert pair.kinds(0).count(Kind.DATA) == 2 and pair.kinds(0).count(Kind.SKIP) == 2
    assert not pair.links[0]._outbox.flights and pair.said(0, m.Release) == [m.Release(1, 1)]
    assert pair.links[0]._outbox.eager_back == pair.links[0]._outbox.eager_out  # the peer has no more of it


def test_a_name_is_used_once() -> None:
    pair = Pair()
    pair.submit(0, 1), pair.post(0, 1)
    with pytest.raises(ValueError, match="submitted before"):
        pair.submit(0, 1)
    with pytest.raises(ValueError, match="posted before"):
        pair.post(0, 1)


# ---------------------------------------------------------------- without fault tolerance


def test_without_fault_tolerance_there_is_no_ledger_no_copy_and_no_beat() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, fault_tolerance=False))
    for index in range(20):
        pair.submit(0, 1, index, LONG if index % 2 else 900)
        pair.post(1, 1, index, LONG if index % 2 else 900)
        pair.flow()
        for send in pair.said(0, m.SendData)[index:]:
            pair.tell(0, m.FrameSent(send.rail, send.frame.sequence))
    pair.wait(5.0)
    assert len(pair.said(1, m.Received)) == len(pair.said(0, m.Sent)) == 20
    assert not pair.said(0, m.Keep, m.Release)
    assert set(pair.kinds(0)) == {Kind.DATA} and set(pair.kinds(1)) <= {Kind.CREDIT, Kind.ACK}
    assert pair.kinds(1).count(Kind.ACK) < 20  # eager memory given back, now and then
    pair.cut(0)
    assert pair.said(0, m.Lost) and pair.said(1, m.Lost)


def test_without_fault_tolerance_a_rail_that_comes_late_is_used_at_once_and_none_is_left_for_being_slow() -> None:
    pair = Pair(rails=2, connect=False, options=replace(OPTIONS, fault_tolerance=False))
    pair.up(0)
    for me in range(2):
        pair.tell(me, m.RailDown(1, m.Failure.PATH, "did not connect at the beginning"))
    pair.wait(0.3)
    assert pair.said(0, m.RestoreRail) == [m.RestoreRail(1)]
    pair.up(1)
    pair.tell(0, m.RailSlow(0))
    for index in range(4):
        pair.post(1, 1, index)
    pair.flow()
    for index in range(4):
        pair.submit(0, 1, index)
    pair.wait(5.0)
    assert [send.rail for send in pair.said(0, m.SendData)] == [0, 1, 0, 1]
    assert len(pair.said(1, m.Received)) == 4 and not pair.said(0, m.Lost, m.RailLeft)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="eager_memory_bytes"):
        LinkOptions(eager_bytes=10, eager_memory_bytes=5)
    with pytest.raises(ConfigError, match="period_s"):
        LinkOptions(period_s=0)
