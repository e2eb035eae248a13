"""Which thread drives a communicator: one decision after the other."""

from __future__ import annotations

import math

import pytest

from helixrt.protocol.handoff import AT_ONCE, HandOff, Rest, Signal, Sleep, Step
from helixrt.protocol.patience import Patience

A, B, C = 1, 2, 3
PARK_S = 0.005


@pytest.fixture
def handoff() -> HandOff:
    made = HandOff(Patience(spin_s=0.0, park_s=PARK_S))
    made.starts()
    return made


def watching(handoff: HandOff, until: float = 10.0) -> HandOff:
    handoff.goes_on(0.0, False, until)
    assert handoff.sleep is Sleep.WATCHING
    return handoff


def resting(handoff: HandOff, caller: int) -> HandOff:
    assert handoff.come(caller)
    assert handoff.turned(0.0, False, False, math.inf) is Step.REST
    return handoff


def test_one_caller_drives_until_an_operation_has_ended(handoff: HandOff) -> None:
    assert handoff.come(A) and not handoff.come(B)
    assert handoff.turned(0.0, True, False, math.inf) is Step.AGAIN
    assert handoff.turned(0.0, True, True, math.inf) is Step.SETTLE
    assert handoff.come(B)


def test_the_driver_returns_when_its_time_is_over(handoff: HandOff) -> None:
    handoff.come(A)
    assert handoff.turned(1.0, True, False, 1.0) is Step.LEAVE
    assert handoff.driver == A
    handoff.leave(A, 1.0, True)
    assert not handoff.driver


def test_the_role_passes_to_the_caller_that_has_waited_longest(handoff: HandOff) -> None:
    handoff.come(A)
    handoff.wait(B, "B's")
    handoff.wait(C, "C's")
    assert handoff.leave(A, 0.0, True) is Signal.PASS
    assert (handoff.heir, handoff.driver) == ("B's", B)
    assert not handoff.come(C) and handoff.come(B)


def test_a_caller_that_needs_the_role_no_more_passes_it_on(handoff: HandOff) -> None:
    watching(handoff)
    handoff.come(A)
    handoff.wait(B, "B's")
    assert handoff.leave(A, 0.0, True) is Signal.PASS
    assert handoff.leave(B, 0.0, True) is Signal.WAKE


def test_a_caller_that_waited_and_left_gets_no_role(handoff: HandOff) -> None:
    watching(handoff)
    handoff.come(A)
    handoff.wait(B, "B's")
    assert handoff.leave(B, 0.0, True) is Signal.NONE
    assert handoff.leave(A, 0.0, True) is Signal.WAKE


def test_the_thread_is_woken_once_and_only_while_it_sleeps(handoff: HandOff) -> None:
    assert handoff.call() is Signal.NONE
    watching(handoff)
    assert handoff.call() is Signal.WAKE
    assert handoff.call() is Signal.NONE
    assert handoff.woke() and not handoff.woke()
    assert handoff.call() is Signal.NONE


def test_a_caller_that_leaves_nothing_behind_wakes_no_thread(handoff: HandOff) -> None:
    handoff.come(A)
    assert handoff.parks(0.0, True, False) == Rest(True, 4 * PARK_S)
    assert handoff.leave(A, 0.0, False) is Signal.NONE


def test_what_a_driver_took_back_of_a_thread_that_watches_is_asked_for_again(handoff: HandOff) -> None:
    watching(handoff, until=10.0)
    handoff.come(A)
    assert handoff.leave(A, 0.0, False) is Signal.TEND
    assert handoff.tended(11.0) is Signal.NONE
    assert handoff.tended(9.0) is Signal.WAKE


def test_a_driver_is_nudged_once_and_only_while_it_rests(handoff: HandOff) -> None:
    handoff.come(A)
    assert handoff.submitted(waits=True) is Signal.NONE
    resting(handoff, A)
    assert handoff.submitted(waits=True) is Signal.NUDGE
    assert handoff.submitted(waits=False) is Signal.NONE
    assert handoff.nudged
    handoff.takes_nudge()
    assert handoff.come(A) and not handoff.nudged and not handoff.resting


def test_an_asynchronous_operation_is_brought_on_at_once_if_no_caller_drives(handoff: HandOff) -> None:
    assert handoff.submitted(waits=True) is Signal.NONE
    assert handoff.submitted(waits=False) is Signal.TURN
    assert handoff.turned_for_others(busy=True) is Signal.NONE  # the thread is awake
    assert handoff.parks(0.0, False, False) == Rest(True, 60.0)
    assert handoff.turned_for_others(busy=False) is Signal.NONE
    assert handoff.turned_for_others(busy=True) is Signal.WAKE
    assert watching(handoff).turned_for_others(busy=True) is Signal.TEND


def test_the_thread_parks_after_a_caller_only_if_nothing_runs(handoff: HandOff) -> None:
    handoff.come(A)
    handoff.leave(A, 1.0, False)
    assert handoff.parks(1.001, True, True) is None
    rest = handoff.parks(1.001, True, False)
    assert rest is not None and rest.apart and rest.timeout_s == pytest.approx(0.004)
    assert handoff.parks(1.006, True, False) is None
    assert handoff.goes_on(1.006, True, math.inf) is AT_ONCE


def test_what_ended_is_settled_though_the_generation_is_over(handoff: HandOff) -> None:
    assert handoff.parks(1.0, connected=False, busy=True) is None


def test_a_closed_communicator_has_no_new_driver_and_gives_up_its_poller_once(handoff: HandOff) -> None:
    resting(handoff, A)
    handoff.close()
    assert handoff.thread_must_end() and not handoff.come(B)
    handoff.told()
    assert not handoff.retires()  # the driver sleeps on it
    handoff.leave(A, 0.0, False)
    assert not handoff.retires()  # and the thread
    handoff.ends()
    assert handoff.retires() and not handoff.retires()
