"""The link machine, scenario by scenario: two links, rails one can hold, cut and mute by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from helixrt.errors import Cause, ConfigError
from helixrt.protocol import frames
from helixrt.protocol import link_messages as m
from helixrt.protocol.frames import EAGER, Frame, Kind
from helixrt.protocol.link import Link
from helixrt.protocol.link_rails import ReceiveState, SendState

LONG = 100_000
OPTIONS: dict[str, Any] = dict(eager_bytes=1000, eager_memory_bytes=4000)


class Pair:
    """Ends 0 and 1. Frames wait per rail and direction until `flow` delivers them; a held rail keeps them."""

    def __init__(self, rails: int = 1, connect: bool = True, **options: Any) -> None:
        self.now = 100.0
        self.links = [Link(7, 1 - me, rails, m.LinkOptions(**(OPTIONS | options))) for me in range(2)]
        self.log: list[list[m.Action]] = [[], []]
        self.wire: dict[tuple[int, int], deque[Frame]] = {(rail, to): deque() for rail in range(rails) for to in range(2)}
        self.held: set[tuple[int, int]] = set()
        self.incarnations = [0] * rails
        for rail in range(rails if connect else 0):
            self.up(rail)

    def tell(self, me: int, event: m.Event) -> list[m.Action]:
        actions = self.links[me].on(event, self.now)
        self.log[me] += actions
        for action in actions:
            if isinstance(action, m.SendFrame | m.SendData):
                self.wire[action.rail, 1 - me].append(action.frame)
            elif isinstance(action, m.ResetRail):
                self.wire[action.rail, me].clear()
        return actions

    def flow(self) -> None:
        """Deliver all that is not held, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for (rail, to), waiting in self.wire.items():
                while waiting and (rail, to) not in self.held:
                    moved = True
                    self.deliver(rail, to)

    def deliver(self, rail: int, to: int) -> None:
        frame = self.wire[rail, to].popleft()
        self.tell(to, m.FrameArrived(rail, frame))
        if frame.kind is Kind.DATA and not self.links[to].closed:
            self.tell(to, m.PayloadArrived(rail, frame.sequence))

    def hold(self, rail: int, *to: int) -> None:
        self.held |= {(rail, end) for end in to or (0, 1)}

    def release(self, rail: int) -> None:
        self.held -= {(rail, 0), (rail, 1)}
        self.flow()

    def up(self, rail: int) -> None:
        self.incarnations[rail] += 1
        self.wire[rail, 0].clear(), self.wire[rail, 1].clear()
        for to in range(2):
            self.tell(to, m.RailUp(rail, self.incarnations[rail]))

    def cut(self, rail: int, failure: m.Failure = m.Failure.PATH, *ends: int) -> None:
        """Both ends, or those named, learn that the rail broke; what was on it is gone."""
        for to in range(2):
            self.wire[rail, to].clear()
        for me in ends or (0, 1):
            self.tell(me, m.RailDown(rail, failure, "cable cut"))

    def wait(self, seconds: float) -> None:
        """Time passes; every link gets its Ticks, and frames flow."""
        end = self.now + seconds
        self.flow()
        while True:
            due = min(link.deadline for link in self.links)
            if due > end:
                break
            self.now = max(self.now, due)
            for me in range(2):
                if self.links[me].deadline <= self.now:
                    self.tell(me, m.Tick())
            self.flow()
        self.now = end

    def submit(self, me: int, op: int, index: int = 0, length: int = LONG, **more: Any) -> list[m.Action]:
        return self.tell(me, m.Submit(op, index, length, **more))

    def post(self, me: int, op: int, index: int = 0, length: int = LONG, **more: Any) -> list[m.Action]:
        return self.tell(me, m.Post(op, index, length, **more))

    def said(self, me: int, *kinds: type) -> list[m.Action]:
        return [action for action in self.log[me] if isinstance(action, kinds)]

    def kinds(self, me: int, rail: int | None = None) -> list[Kind]:
        """Of all frames that `me` has sent, on `rail` if given."""
        sends = [a for a in self.log[me] if isinstance(a, m.SendFrame | m.SendData) and rail in (None, a.rail)]
        return [send.frame.kind for send in sends]

    def states(self, me: int) -> list[SendState]:
        return [rail.send for rail in self.links[me].rails]


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
    pair = Pair(window_bytes=3 * LONG, window_frames=20)
    pair.hold(0, 1)
    for index in range(10):
        pair.submit(0, 1, index)
        pair.post(1, 1, index)
    pair.flow()
    assert pair.kinds(0).count(Kind.DATA) == 3
    pair.release(0)
    assert len(pair.said(1, m.Received)) == 10


def test_messages_go_where_least_is_on_its_way() -> None:
    pair = Pair(rails=2)
    for index in range(4):
        pair.post(1, 1, index)
    pair.flow()
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


# ---------------------------------------------------------------- fallback


def test_what_was_on_a_failed_rail_is_resent_on_another_once_the_peer_has_fenced_it() -> None:
    pair = Pair(rails=2, striped=False)
    pair.post(1, 1)
    pair.flow()
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
    pair = Pair(rails=2, striped=False)
    pair.post(1, 1)
    pair.flow()
    pair.hold(0, 0)
    pair.submit(0, 1)
    pair.flow()
    assert pair.said(1, m.Received) and not pair.said(0, m.Sent)
    pair.cut(0)
    pair.flow()
    assert pair.said(0, m.Sent) == [m.Sent(1, 0)] and pair.kinds(0).count(Kind.DATA) == 1 and pair.links[0].resent == 0


def test_a_half_delivered_message_is_received_once_it_is_whole() -> None:
    pair = Pair(rails=2, striped=False)
    pair.post(1, 1)
    pair.flow()
    pair.submit(0, 1)
    pair.tell(1, m.FrameArrived(0, pair.wire[0, 1].popleft()))  # and half of the payload
    pair.cut(0)
    pair.flow()
    assert [(a.rail, a.landing) for a in pair.said(1, m.Accept)] == [(0, m.Landing.PLACE), (1, m.Landing.PLACE)]
    assert pair.said(1, m.Received) == [m.Received(1, 0)]


def test_a_newer_copy_takes_the_memory_from_an_older_one_that_is_under_way() -> None:
    pair = Pair(rails=2)
    pair.post(1, 1)
    pair.flow()
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
    pair = Pair()
    pair.post(1, 1)
    pair.flow()
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
    pair = Pair(rails=3, striped=False)
    pair.post(1, 1)
    pair.flow()
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
    pair = Pair(rails=2, striped=False)
    fall_back(pair)
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
    pair = Pair(rails=2, striped=False)
    pair.post(1, 1)
    pair.flow()
    pair.hold(0), pair.hold(1)
    pair.submit(0, 1)
    pair.cut(0, m.Failure.PATH, 0)
    pair.wire[1, 1].clear()
    pair.release(1)
    assert not pair.said(1, m.Received)
    pair.wait(0.3)
    assert pair.said(1, m.Received) == [m.Received(1, 0)]


def test_an_operation_that_must_not_be_repeated_fails_when_its_fate_is_unknown() -> None:
    pair = Pair(rails=2, striped=False)
    for index in range(2):
        pair.post(1, 1, index)
    pair.flow()
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


# ---------------------------------------------------------------- fail-back


def fall_back(pair: Pair) -> None:
    pair.cut(0)
    pair.flow()
    assert pair.states(0) == [SendState.FALLBACK, SendState.DEFAULT]
    assert pair.links[0].rails[0].receive is ReceiveState.FALLBACK


def test_the_four_send_states_and_the_two_receive_states_of_a_failback() -> None:
    pair = Pair(rails=2, striped=False, window_frames=1)
    fall_back(pair)
    for index in range(3):
        pair.post(1, 1, index)
    pair.flow()
    pair.hold(1, 1)
    pair.submit(0, 1, 0), pair.submit(0, 1, 1)  # one on the backup, one waits for the window
    pair.hold(0)
    pair.up(0)
    assert pair.kinds(0, 0)[-1] is Kind.PROBE and pair.states(0)[0] is SendState.FALLBACK
    pair.deliver(0, 1), pair.deliver(0, 0), pair.deliver(0, 0)  # PROBE; the peer's PROBE; PROBED
    assert pair.states(0)[0] is SendState.WAIT_SIGNALED
    pair.deliver(1, 1)
    pair.flow()  # acknowledged: the next message goes out on the backup, and it is the fence
    assert pair.states(0)[0] is SendState.WAIT_DRAINED
    pair.submit(0, 1, 2)
    assert pair.kinds(0).count(Kind.DATA) == 2  # withheld
    assert Kind.SWITCH not in pair.kinds(0, 0) and pair.links[1].rails[0].receive is ReceiveState.FALLBACK
    pair.release(1)
    assert pair.kinds(0, 0)[-1] is Kind.SWITCH and pair.states(0)[0] is SendState.WAIT_DRAINED
    pair.release(0)
    assert pair.links[1].rails[0].receive is ReceiveState.DEFAULT
    assert pair.states(0) == [SendState.DEFAULT] * 2 and pair.links[0].failbacks == 1
    assert pair.kinds(0, 0).count(Kind.DATA) == 1  # the withheld one, on the default rail again
    assert pair.said(1, m.Received) == [m.Received(1, 0), m.Received(1, 1), m.Received(1, 2)]


def test_a_striped_link_goes_on_over_the_others_while_a_rail_returns() -> None:
    pair = Pair(rails=2)
    fall_back(pair)
    for index in range(3):
        pair.post(1, 1, index)
    pair.flow()
    pair.hold(1, 1)
    pair.submit(0, 1, 0)
    pair.up(0)
    pair.flow()
    assert pair.states(0)[0] is SendState.WAIT_DRAINED
    pair.submit(0, 1, 1)
    assert pair.kinds(0, 1).count(Kind.DATA) == 2
    pair.release(1)
    assert pair.states(0) == [SendState.DEFAULT] * 2


@pytest.mark.parametrize("second", [0, 1])
def test_a_second_failure_while_draining_is_survived(second: int) -> None:
    pair = Pair(rails=2, striped=False)
    fall_back(pair)
    pair.post(1, 1)
    pair.flow()
    pair.hold(1, 1)
    pair.submit(0, 1, 0)
    pair.up(0)
    pair.flow()
    assert pair.states(0)[0] is SendState.WAIT_DRAINED
    pair.cut(second)  # the rail that returned, or the backup with the message on it
    pair.release(1)
    pair.flow()
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]
    pair.up(second)
    pair.wait(1.0)
    assert pair.states(0) == pair.states(1) == [SendState.DEFAULT] * 2


def test_a_rail_that_answers_no_probe_is_reset_and_tried_again() -> None:
    pair = Pair(rails=2)
    fall_back(pair)
    pair.hold(0)
    pair.up(0)
    pair.wait(0.3)
    assert m.ResetRail(0) in pair.log[0] and pair.states(0)[0] is SendState.FALLBACK
    before = len(pair.said(0, m.RestoreRail))
    pair.wait(0.3)
    assert len(pair.said(0, m.RestoreRail)) == before + 1


def test_a_rail_that_flaps_rests_longer_each_time_until_it_was_steady() -> None:
    pair = Pair(rails=2, rest_s=0.1, longest_rest_s=0.5, steady_s=10.0)

    def rest() -> float:
        pair.cut(0)
        pair.flow()
        before, began = len(pair.said(0, m.RestoreRail)), pair.now
        if pair.log[0][-1:] == [m.RestoreRail(0)] or m.RestoreRail(0) in pair.log[0][-4:]:
            before -= 1
        while len(pair.said(0, m.RestoreRail)) == before:
            pair.wait(0.01)
        rested = pair.now - began
        pair.up(0)
        pair.wait(0.05)
        assert pair.states(0)[0] is SendState.DEFAULT
        return rested

    rests = [rest() for _ in range(6)]
    assert rests == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.5, 0.5], abs=0.03)
    pair.wait(11.0)
    assert rest() == pytest.approx(0.0, abs=0.02)


def test_a_slow_rail_is_drained_left_and_taken_back_by_the_fenced_way() -> None:
    pair = Pair(rails=2, striped=False)
    for index in range(2):
        pair.post(1, 1, index)
    pair.flow()
    pair.hold(0, 1)
    pair.submit(0, 1, 0)
    pair.tell(0, m.RailSlow(0))
    pair.submit(0, 1, 1)
    assert pair.kinds(0).count(Kind.DATA) == 1  # withheld until the slow rail is drained: order is kept
    pair.release(0)
    assert pair.kinds(0, 1).count(Kind.DATA) == 1 and pair.said(1, m.Received) == [m.Received(1, 0), m.Received(1, 1)]
    assert pair.states(0)[0] is SendState.FALLBACK and pair.links[0].resent == 0
    pair.wait(1.0)
    assert pair.states(0)[0] is SendState.DEFAULT and Kind.SWITCH in pair.kinds(0, 0)
    assert not pair.said(0, m.ResetRail)


def test_the_last_rail_is_not_left_for_being_slow() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailSlow(0))
    pair.tell(0, m.RailSlow(1))
    pair.post(1, 1, length=5)
    pair.submit(0, 1, length=5)
    pair.flow()
    assert pair.said(1, m.Received)
    pair.cut(1)  # now the slow one is better than none, and still there
    pair.post(1, 2, length=5)
    pair.submit(0, 2, length=5)
    pair.wait(0.5)
    assert m.Received(2, 0) in pair.log[1] and not pair.links[0].closed


def test_a_lower_numbered_rail_that_connects_late_is_switched_to_by_the_fenced_way() -> None:
    pair = Pair(rails=2, connect=False, striped=False)
    pair.up(1)
    pair.hold(1, 1)
    pair.submit(0, 1, 0, length=10)
    pair.up(0)
    pair.submit(0, 1, 1, length=10)
    pair.flow()
    assert pair.kinds(0, 0).count(Kind.DATA) == 0 and pair.states(0)[0] is SendState.WAIT_DRAINED
    pair.release(1)
    pair.wait(0.1)
    assert pair.kinds(0, 0).count(Kind.DATA) + pair.kinds(0, 1).count(Kind.DATA) == 2
    assert pair.states(0) == pair.states(1) == [SendState.DEFAULT] * 2
    assert {rail.receive for link in pair.links for rail in link.rails} == {ReceiveState.DEFAULT}


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
    pair = Pair(rails=2)
    pair.post(1, 1)
    pair.flow()
    pair.submit(0, 1)
    actions = pair.tell(0, m.RailDown(0, m.Failure.PROGRAM, "memory is not registered"))
    assert [type(action) for action in actions] == [m.Lost, m.ResetRail] and pair.links[0].closed
    assert pair.tell(0, m.Tick()) == []


def test_a_dead_peer_is_lost_when_the_last_rail_says_that_nobody_is_there() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailDown(0, m.Failure.PEER_GONE, "connection refused"))
    assert not pair.links[0].closed  # it lives on the other rail
    pair.tell(0, m.RailDown(1, m.Failure.PATH, "end of stream"))
    assert not pair.links[0].closed and m.RestoreRail(1) in pair.said(0, m.RestoreRail)
    pair.tell(0, m.RailDown(1, m.Failure.PEER_GONE, "connection refused"))
    (lost,) = pair.said(0, m.Lost)
    assert lost.failure is m.Failure.PEER_GONE and "connection refused" in str(lost.cause)


def test_a_silent_peer_is_lost_within_one_and_a_half_periods() -> None:
    pair = Pair(rails=2, period_s=1.0)
    pair.wait(10.0)
    assert not pair.links[0].closed
    began = pair.now
    pair.hold(0, 0), pair.hold(1, 0)
    while not pair.said(0, m.Lost):
        pair.wait(0.01)
        assert pair.now - began <= 1.5
    assert "no sign of life" in str(pair.said(0, m.Lost)[0].cause)


def test_a_payload_that_trickles_in_is_a_sign_of_life() -> None:
    """Its sender's beats wait behind it: the bytes themselves must count, for the peer and for the rail."""
    pair = Pair(rails=2, period_s=1.0)
    pair.post(1, 1)
    pair.flow()
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
    pair = Pair(rails=2, period_s=1.0)
    pair.post(1, 1)
    pair.flow()
    pair.hold(0)
    pair.wait(2.0)
    assert pair.links[0].rails[0].send is SendState.FALLBACK and not pair.links[0].closed
    pair.submit(0, 1)
    pair.flow()
    assert pair.said(1, m.Received)


def test_a_rail_that_swallows_a_frame_is_left_by_the_software_deadline() -> None:
    pair = Pair(rails=2, striped=False, attempt_s=3.0)
    pair.post(1, 1)
    pair.flow()
    pair.submit(0, 1)
    pair.wire[0, 1].clear()
    pair.wait(2.5)
    assert not pair.said(1, m.Received)
    pair.wait(1.0)
    assert pair.said(1, m.Received) == [m.Received(1, 0)] and pair.said(0, m.Sent) == [m.Sent(1, 0)]


def test_a_rail_that_returns_late_is_not_judged_by_what_it_carried_before() -> None:
    pair = Pair(attempt_s=0.5)
    pair.post(1, 1)
    pair.flow()
    pair.hold(0)
    pair.submit(0, 1)
    pair.cut(0)
    pair.wait(1.0)
    pair.up(0)  # the handshake is under way
    for me in range(2):
        pair.tell(me, m.Tick())
    assert pair.links[0].rails[0].up and not pair.said(0, m.ResetRail)


# ---------------------------------------------------------------- what a wrong peer sends


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
    pair = Pair(rails=2, striped=False)
    pair.post(1, 1)
    pair.flow()
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


# ---------------------------------------------------------------- without fault tolerance


def test_without_fault_tolerance_there_is_no_ledger_no_copy_and_no_beat() -> None:
    pair = Pair(rails=2, fault_tolerance=False)
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


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="eager_memory_bytes"):
        m.LinkOptions(eager_bytes=10, eager_memory_bytes=5)
    with pytest.raises(ConfigError, match="period_s"):
        m.LinkOptions(period_s=0)
