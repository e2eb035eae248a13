"""A communicator's threads under seeded interleavings: no wake-up lost, each operation ends once; rules broken on purpose.

A failing seed prints the line that replays it (`python -m helixrt.emulate.handoff_world --seed …`).
"""

from __future__ import annotations

from typing import Any

import pytest

from helixrt.collectives.communicator import Communicator
from helixrt.collectives.execution import Execution
from helixrt.collectives.handle import CollectiveError, End, Handle
from helixrt.emulate.handoff_world import HandOffWorld
from helixrt.emulate.seeded import Violation
from helixrt.errors import Cause
from helixrt.protocol.collective.messages import Aborted
from helixrt.protocol.handoff import HandOff, Rest, Signal, Sleep
from tests.emulate.broken_rules import Patch, Rule, noticed_by

# ---------------------------------------------------------------- rules broken on purpose


def a_leaving_driver_passes_on_nothing(patch: Patch) -> None:
    """A caller that leaves with operations running wakes no thread."""
    leave = HandOff.leave

    def selfish(self: HandOff, caller: int, now: float, busy: bool) -> Signal:
        return leave(self, caller, now, False)

    patch.setattr(HandOff, "leave", selfish)


def a_caller_that_was_given_the_role_may_drop_it(patch: Patch) -> None:
    """A caller that does not need the role any more when it gets it keeps it for ever."""
    leave = Communicator._leave

    def forgetful(self: Communicator, me: int) -> None:
        if self._handoff.driver != me or self._handoff.resting:
            leave(self, me)

    patch.setattr(Communicator, "_leave", forgetful)


def a_resting_driver_is_not_nudged(patch: Patch) -> None:
    """A driver that sleeps is not told of what others submit, or of the end of its own operation."""
    patch.setattr(HandOff, "nudge", lambda self: Signal.NONE)


def the_settling_thread_does_not_nudge(patch: Patch) -> None:
    """Who completes the operation of a driver that sleeps does not tell it."""

    def silent(self: Communicator, execution: Execution | None) -> None:
        if execution is not None:
            for handle, failure in execution.take_ended():
                handle.complete(failure)

    patch.setattr(Communicator, "_settle", silent)


def the_thread_parks_while_operations_run(patch: Patch) -> None:
    """After a caller left the thread stays away for a while, whatever still runs."""
    parks = HandOff.parks
    patch.setattr(HandOff, "parks", lambda self, now, connected, busy: parks(self, now, connected, False))


def the_thread_turns_while_a_caller_drives(patch: Patch) -> None:
    """The thread does not look whether a caller drives."""
    parks = HandOff.parks

    def blind(self: HandOff, now: float, connected: bool, busy: bool) -> Rest | None:
        driver, self.driver = self.driver, 0
        try:
            return parks(self, now, connected, busy)
        finally:
            self.driver = driver

    patch.setattr(HandOff, "parks", blind)


def a_late_nudge_stays(patch: Patch) -> None:
    """A driver that was awake when it was nudged leaves the nudge behind, and the thread cannot sleep."""
    patch.setattr(Communicator, "_take_nudge", lambda self: self._handoff.takes_nudge())


def two_callers_drive(patch: Patch) -> None:
    """A caller drives although another one does."""

    def rude(self: HandOff, caller: int) -> bool:
        self.driver, self.resting = caller, False
        return True

    patch.setattr(HandOff, "come", rude)


def a_parked_thread_is_not_woken_for_a_submit(patch: Patch) -> None:
    """An asynchronous operation is left to a thread that does not watch the descriptors."""

    def hopeful(self: HandOff, busy: bool) -> Signal:
        return Signal.TEND if self.sleep is Sleep.WATCHING else Signal.NONE

    patch.setattr(HandOff, "turned_for_others", hopeful)


def an_earlier_deadline_wakes_no_thread(patch: Patch) -> None:
    """A thread that watches sleeps on although an operation's deadline comes before it wakes."""
    patch.setattr(HandOff, "tended", lambda self, due: Signal.NONE)


def the_endpoint_is_not_armed_for_the_thread(patch: Patch) -> None:
    """A turn in the place of a thread that watches takes back what it asked of the peers."""
    patch.setattr(Communicator, "_arm", _unarmed)


def _unarmed(self: Communicator) -> float:
    """As `_arm`, without a word to the endpoint."""
    if self._execution is None or not self._execution.connected:
        return float("inf")
    self._poller.watch(self._endpoint.descriptors())
    return self._execution._deadlines[0][0] if self._execution._deadlines else float("inf")


def the_wake_is_taken_back_late(patch: Patch) -> None:
    """A thread takes its wake back after it has decided how to sleep."""
    background = Communicator.background

    def late(self: Communicator) -> Rest:
        rest = background(self)
        self._handoff.woke()
        self._poller.take_wake()
        return rest

    patch.setattr(Communicator, "background", late)


def a_driver_sleeps_beyond_its_deadline(patch: Patch) -> None:
    """A caller with a limit rests as long as the endpoint lets it."""
    rest_s = HandOff.rest_s
    patch.setattr(HandOff, "rest_s", lambda self, now, due, until: rest_s(self, now, due, float("inf")))


def an_interrupted_driver_is_still_asleep(patch: Patch) -> None:
    """A caller that leaves by an exception counts as a driver that sleeps."""
    leave = HandOff.leave

    def stuck(self: HandOff, caller: int, now: float, busy: bool) -> Signal:
        resting, driver = self.resting, self.driver
        if resting and driver == caller:
            return Signal.NONE
        return leave(self, caller, now, busy)

    patch.setattr(HandOff, "leave", stuck)


def what_ended_is_looked_for_in_the_new_generation(patch: Patch) -> None:
    """Operations that ended are completed only as long as their generation is the communicator's."""
    settle = Communicator._settle
    patch.setattr(Communicator, "_settle", lambda self, execution: settle(self, self._execution))


def what_ended_stays_on_the_list(patch: Patch) -> None:
    """An operation that ended is completed by each thread that sees it."""

    def all_of_them(self: Execution) -> Any:
        ended = list(self.ended)
        yield from ((running.handle, failure) for running, failure in ended)
        self.ended.clear()

    patch.setattr(Execution, "take_ended", all_of_them)


def the_last_cause_counts(patch: Patch) -> None:
    """Who aborts what has ended replaces the cause."""

    def replace(self: Execution, cause: Cause) -> None:
        first = self.failure is None
        self.failure = CollectiveError(cause, End.ABORTED)
        if first:
            self._feed(Aborted(cause))

    patch.setattr(Execution, "abort", replace)


def the_poller_is_closed_under_a_sleeper(patch: Patch) -> None:
    """Whoever closes does not wait for a caller that still sleeps."""

    def hasty(self: HandOff) -> bool:
        retires = self._told and not self._retired
        self._retired = self._retired or retires
        return retires

    patch.setattr(HandOff, "retires", hasty)


def the_poller_is_closed_before_the_thread_is_woken(patch: Patch) -> None:
    """A thread that ends closes the poller although the one that ends it has yet to wake it."""
    close = HandOff.close

    def early(self: HandOff) -> None:
        close(self)
        self.told()

    patch.setattr(HandOff, "close", early)


def the_thread_looks_for_the_end_only_before_its_turn(patch: Patch) -> None:
    """A thread that takes back the wake by which it was told to end sleeps on."""
    patch.setattr(HandOff, "thread_must_end", lambda self: False)


def the_thread_completes_operations_while_it_counts_as_asleep(patch: Patch) -> None:
    """A wake that comes while a callback waits in the thread is not taken back: the wait takes turns without end."""
    background = Communicator.background

    def late(self: Communicator) -> Rest | None:
        execution = self._execution
        rest = background(self)
        self._settle(execution)
        return rest

    patch.setattr(Communicator, "background", late)


def a_waiter_is_not_woken_by_the_end(patch: Patch) -> None:
    """A caller that waits while another one drives is not told that its operation ended."""
    patch.setattr(Handle, "sleep", lambda self, latch, timeout_s: latch.wait(timeout_s))


BROKEN = [
    a_leaving_driver_passes_on_nothing,
    a_caller_that_was_given_the_role_may_drop_it,
    a_resting_driver_is_not_nudged,
    the_settling_thread_does_not_nudge,
    the_thread_parks_while_operations_run,
    the_thread_turns_while_a_caller_drives,
    a_late_nudge_stays,
    two_callers_drive,
    a_parked_thread_is_not_woken_for_a_submit,
    an_earlier_deadline_wakes_no_thread,
    the_endpoint_is_not_armed_for_the_thread,
    the_wake_is_taken_back_late,
    a_driver_sleeps_beyond_its_deadline,
    an_interrupted_driver_is_still_asleep,
    what_ended_is_looked_for_in_the_new_generation,
    what_ended_stays_on_the_list,
    the_last_cause_counts,
    the_poller_is_closed_under_a_sleeper,
    the_poller_is_closed_before_the_thread_is_woken,
    the_thread_looks_for_the_end_only_before_its_turn,
    the_thread_completes_operations_while_it_counts_as_asleep,
    a_waiter_is_not_woken_by_the_end,
]

KNOWN: dict[Rule, int] = {the_poller_is_closed_under_a_sleeper: 547}


class HastyWorld(HandOffWorld):
    """It is closed while callers wait."""

    share_that_close_late = (0.0, 0.0)


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_worlds_notice_a_broken_rule(rule: Rule, monkeypatch: Patch) -> None:
    world = HastyWorld if rule is the_poller_is_closed_under_a_sleeper else HandOffWorld
    noticed_by(rule, monkeypatch, lambda seed: world(seed).run(), range(2000), Violation, KNOWN)


def test_without_a_broken_rule_a_world_that_closes_early_is_sound(seed: int) -> None:
    for each in range(seed, seed + 50):
        HastyWorld(each).run()
