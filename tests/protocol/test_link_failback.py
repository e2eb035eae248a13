"""A rail of a link returns: rest, probe, fence, drain, switch; slow rails leave the same way; who is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixrt.emulate.link_pair import OPTIONS, Pair
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.failover import SHORTEST_PAUSE
from helixrt.protocol.link.frames import Kind
from helixrt.protocol.link.rails import ReceiveState, SendState
from tests.protocol.posted import posted


def fall_back(pair: Pair) -> None:
    pair.cut(0)
    pair.flow()
    assert pair.states(0) == [SendState.FALLBACK, SendState.DEFAULT]
    assert pair.links[0].rails[0].receive is ReceiveState.FALLBACK


def test_the_four_send_states_and_the_two_receive_states_of_a_failback() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, striped=False, window_frames=1))
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
    pair = Pair(rails=2, options=replace(OPTIONS, striped=False))
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
    pair.wait(pair.links[0].options.answer_s + 0.01)
    assert m.ResetRail(0) in pair.log[0] and pair.states(0)[0] is SendState.FALLBACK
    before = len(pair.said(0, m.RestoreRail))
    pair.wait(0.3)
    assert len(pair.said(0, m.RestoreRail)) == before + 1


def test_a_rail_that_flaps_rests_longer_each_time_until_it_was_steady() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, rest_s=0.1, longest_rest_s=0.5, steady_s=10.0))

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


def restored(pair: Pair, within_s: float) -> list[float]:
    """When attempts to restore rail 0 begin from now on, each of them failing at once; counted from now."""
    began, found = pair.now, []
    seen = len(pair.said(0, m.RestoreRail))
    while pair.now < began + within_s:
        pair.wait(0.01)
        for _ in range(len(pair.said(0, m.RestoreRail)) - seen):
            found.append(pair.now - began)
            pair.tell(0, m.RailDown(0, m.Failure.PATH, "no way there"))
        seen = len(pair.said(0, m.RestoreRail))
    return found


def test_attempts_to_restore_a_rail_are_paced_from_their_beginnings() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, retry_s=0.25))
    pair.cut(0, m.Failure.DEVICE)
    assert restored(pair, 1.1) == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.045)
    while pair.log[0][-1] != m.RestoreRail(0):
        pair.wait(0.01)
    pair.wait(2.0)  # nobody says that it fails, as where all is lost
    pair.tell(0, m.RailDown(0, m.Failure.PATH, "not set up in time"))
    assert restored(pair, 0.2)[0] == pytest.approx(0.05, abs=0.015), "it has waited enough"


def test_a_rail_that_is_said_to_be_whole_is_tried_at_once() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, retry_s=0.25))
    pair.cut(0, m.Failure.DEVICE)
    pair.wait(0.02)
    assert not pair.said(0, m.RestoreRail)
    pair.tell(0, m.RailMended(0))
    assert pair.log[0][-1] == m.RestoreRail(0)
    pair.tell(0, m.RailMended(0))  # it knows more now than when the attempt began: that may fail still
    pair.wait(0.06)
    pair.tell(0, m.RailDown(0, m.Failure.PATH, "no address yet"))
    assert pair.log[0][-1] == m.RestoreRail(0), "so there is another one, without a pause"
    pair.tell(0, m.RailDown(0, m.Failure.PATH, "no address yet"))
    assert restored(pair, 0.6) == pytest.approx([0.25, 0.5], abs=0.03), "a hint counts once"


def test_hints_make_no_loop_and_change_nothing_where_a_rail_is_up() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, retry_s=0.25))
    assert pair.tell(0, m.RailMended(0)) == []
    pair.cut(0, m.Failure.DEVICE)
    attempts = 0
    for _ in range(200):  # in one second: a port that comes and goes
        for action in pair.tell(0, m.RailMended(0)):
            attempts += action == m.RestoreRail(0)
        pair.tell(0, m.RailDown(0, m.Failure.DEVICE, "gone again"))
        pair.wait(0.005)
    assert 1 < len(pair.said(0, m.RestoreRail)) <= 1 + 1.0 / (0.25 * SHORTEST_PAUSE)


@pytest.mark.parametrize("hinted", [False, True])
def test_no_hint_shortens_the_rest_of_a_rail_that_flaps(hinted: bool) -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, rest_s=0.4, retry_s=0.1))
    for rest in (0.0, 0.4, 0.8):
        pair.cut(0, m.Failure.DEVICE)
        pair.flow()
        began, before = pair.now, len(pair.said(0, m.RestoreRail))
        while len(pair.said(0, m.RestoreRail)) == before:
            pair.wait(0.01)
            if hinted:
                pair.tell(0, m.RailMended(0))
        assert pair.now - began == pytest.approx(max(rest, 0.0 if hinted else 0.1), abs=0.015)
        pair.up(0)
        pair.wait(0.05)
        assert pair.states(0)[0] is SendState.DEFAULT


def test_a_rail_left_as_slow_that_breaks_while_it_rests_goes_on_resting() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, rest_s=0.8, retry_s=0.1))
    for rest in (0.1, 0.8):
        pair.tell(0, m.RailSlow(0))
        pair.flow()
        began = pair.now
        pair.wait(0.02)
        pair.cut(0)
        while pair.states(0)[0] is not SendState.DEFAULT:
            if pair.log[0][-1] == m.RestoreRail(0) or m.RestoreRail(0) in pair.log[0][-3:]:
                pair.up(0)
            pair.wait(0.01)
        assert pair.now - began == pytest.approx(rest, abs=0.05)


def test_a_slow_rail_is_drained_left_and_taken_back_by_the_fenced_way() -> None:
    pair = posted(rails=2, messages=2, striped=False)
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
    pair = Pair(rails=2, connect=False, options=replace(OPTIONS, striped=False))
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


# ---------------------------------------------------------------- who is told


def test_whoever_keeps_the_record_is_told_once_of_a_rail_that_is_left_and_of_its_return() -> None:
    pair = Pair(rails=2)
    pair.cut(0)
    assert pair.said(0, m.RailLeft) == [m.RailLeft(0, m.Failure.PATH, "cable cut", usable=1)]
    pair.flow()
    pair.up(0)
    pair.wait(1.0)
    assert pair.said(0, m.RailBack) == [m.RailBack(0, usable=2)]
    pair.tell(0, m.RailSlow(1))
    pair.cut(1)  # on its way out already
    assert pair.said(0, m.RailLeft)[1:] == [m.RailLeft(1, None, "left as slow", usable=1)]
    assert pair.said(1, m.RailLeft)[1:] == [m.RailLeft(1, m.Failure.PATH, "cable cut", usable=1)]
    pair.cut(0)
    assert pair.said(0, m.RailLeft)[2:] == [m.RailLeft(0, m.Failure.PATH, "cable cut", usable=0)]
    pair.up(1)
    pair.up(0)
    pair.wait(1.0)
    assert [(back.rail, back.usable) for back in pair.said(0, m.RailBack)][1:] in ([(1, 1), (0, 2)], [(0, 1), (1, 2)])


def test_the_end_of_the_link_is_not_reported_as_a_rail_that_was_left() -> None:
    pair = Pair(rails=2)
    pair.tell(0, m.RailDown(0, m.Failure.PROGRAM, "bad key"))
    assert pair.said(0, m.Lost) and not pair.said(0, m.RailLeft)


def test_a_rail_left_as_slow_rests_longer_each_time_until_it_was_steady() -> None:
    pair = Pair(rails=2, options=replace(OPTIONS, rest_s=0.5, retry_s=0.1, steady_s=10.0))

    def rest() -> float:
        began = pair.now
        pair.tell(0, m.RailSlow(0))
        pair.flow()
        while pair.states(0)[0] is not SendState.DEFAULT:
            pair.wait(0.01)
        return pair.now - began

    assert [rest() for _ in range(4)] == pytest.approx([0.1, 0.5, 1.0, 2.0], abs=0.05)
    pair.wait(11.0)
    assert rest() == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("question", [Kind.PROBE, Kind.SWITCH])
@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_rail_on_which_a_stopped_peer_does_not_answer_is_kept_while_its_kernel_acknowledges(
    question: Kind, acknowledged: bool
) -> None:
    """It may be the only rail that still shows that the peer lives; `attempt_s` bounds that."""
    pair = Pair(rails=2, options=replace(OPTIONS, period_s=1.0, answer_s=0.5, attempt_s=4.0, striped=False))
    fall_back(pair)
    pair.hold(0), pair.hold(1)
    pair.up(0)
    if question is Kind.SWITCH:
        pair.deliver(0, 1), pair.deliver(0, 0), pair.deliver(0, 0)
    assert pair.kinds(0, 0)[-1] is question
    pair.cut(1)
    began = pair.now
    while m.ResetRail(0) not in pair.said(0, m.ResetRail):
        pair.wait(0.1)
        if acknowledged:
            pair.tell(0, m.Acknowledged(0, pair.now))
    assert not pair.links[0].closed
    least_s, most_s = (3.5, 5.0) if acknowledged else (0.4, 1.0)
    assert least_s <= pair.now - began <= most_s
