"""Decides which thread drives a communicator: one of the callers that wait, or the communicator's own thread.

In: what the threads do, one method for each event, all called under the communicator's lock; time as a number. Out: what the
thread that asked does next, and which sleeping thread it wakes. To drive is to take turns: each turn brings on all operations
and the links' heartbeats. `collectives/communicator.py` carries the decisions out; `emulate/handoff_world.py` runs that code
on simulated threads.

- A caller that waits drives itself, so a small operation needs no change of threads. At most one caller drives.
- The communicator's thread drives only while no caller does. It parks (does not watch the descriptors) while a caller drives,
  and for `park_s` after one left with nothing running.
- The driving caller gives the role up in the turn that ended an operation: what follows the end runs without the role.
- A caller that leaves while operations run passes the role to a caller that waits; if none waits, the thread is woken.
- A thread is woken only while it sleeps, and once. Each one decides to sleep in the same hold of the lock as its last turn.

Pure. Events are methods and answers are constants: a blocking 4 KiB all-reduce is a few of these calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from helixrt.protocol.patience import Patience, Spin

IDLE_S = 60.0  # longest sleep of the thread and of a driver; events wake them earlier
PARKED = 4  # times `park_s`: how often the parked thread looks whether a caller still drives


class Step(Enum):
    """What a driving caller does after its turn."""

    AGAIN = "take another turn at once"
    SETTLE = "complete the operations that ended; it does not drive any more"
    REST = "sleep until a descriptor is ready, a deadline has come, or it is nudged"
    LEAVE = "return to its caller: its time is over"


class Signal(Enum):
    """What else is to be done in the same hold of the lock."""

    NONE = "nothing"
    NUDGE = "wake the caller that drives"
    WAKE = "wake the thread"
    PASS = "wake the caller that drives from now on (`heir`)"  # noqa: S105, no password
    TURN = "take a turn: no other thread would soon"
    TEND = "arm the endpoint for the thread, which watches; then `tended`"


class Sleep(Enum):
    """The state of the communicator's thread."""

    ABSENT = "not started, or ended"
    AWAKE = "runs; it asks again before it sleeps"
    PARKED = "sleeps, and notices only its wake"
    WATCHING = "sleeps, and notices its wake, descriptors and nudges"


@dataclass(frozen=True, slots=True)
class Rest:
    """How the thread sleeps. `apart`: from the descriptors."""

    apart: bool
    timeout_s: float


AT_ONCE = Rest(False, 0.0)


class HandOff:
    """Callers are named by any true value that is theirs alone. `driver` is 0 while no caller drives."""

    __slots__ = (
        "_called", "_left_s", "_looks_until", "_park_s", "_retired", "_spin", "_told", "_until", "closing", "driver", "heir",
        "nudged", "resting", "sleep", "waiting",
    )  # fmt: skip

    def __init__(self, patience: Patience) -> None:
        self.driver: int = 0
        self.resting = False  # the driver sleeps, or is about to, and has not been nudged
        self.nudged = False  # its nudge was not taken back: the thread would not sleep on the descriptors then
        self.waiting: dict[int, Any] = {}  # callers that wait while another drives -> how they are woken; oldest first
        self.heir: Any = None  # of the last Signal.PASS
        self.sleep = Sleep.ABSENT
        self.closing = self._told = self._retired = False
        self._called = False  # the thread was woken, and has not asked since
        self._until = 0.0  # of a sleep of the thread
        self._left_s = -math.inf  # when the last driver left
        self._looks_until = -1.0  # of the driver's look for news before it sleeps; < 0: none
        self._park_s, self._spin = patience.park_s, Spin(patience.spin_s)

    # ---------------------------------------------------------------- callers that wait

    def come(self, caller: int) -> bool:
        """A caller needs progress of its operation. Returns whether it drives now; else another caller drives: `wait`."""
        if self.waiting:
            self.waiting.pop(caller, None)
        if self.driver != caller:
            if self.driver or self.closing:
                return False
            self.driver, self._looks_until = caller, -1.0
        self.resting = False
        return True

    def turned(self, now: float, moved: bool, ended: bool, until: float) -> Step:
        """The driver took a turn. `ended`: there are operations to complete; `until`: when the caller's time is over."""
        if (moved or ended) and self._looks_until >= 0:  # a look for news paid
            self._spin.paid()
            self._looks_until = -1.0
        if ended:
            self.driver, self._left_s = 0, now
            return Step.SETTLE
        if now >= until:
            return Step.LEAVE
        if moved:
            return Step.AGAIN
        if self._looks_until < 0:
            self._looks_until = now + self._spin.allowance()
        elif now >= self._looks_until:
            self._spin.in_vain()
        if now < self._looks_until:
            return Step.AGAIN
        self._looks_until = -1.0
        self.resting = True
        return Step.REST

    def rest_s(self, now: float, due: float, until: float) -> float:
        """How long the driver sleeps. The endpoint is armed, and needs a turn at `due`."""
        return max(0.0, min(due, until, now + IDLE_S) - now)

    def wait(self, caller: int, wakes: Any) -> None:
        """Another caller drives. This one sleeps until its operation ends, its time is over, or it becomes the driver."""
        self.waiting[caller] = wakes

    def leave(self, caller: int, now: float, busy: bool) -> Signal:
        """A caller returns, whether or not it drives. `busy`: operations run, or ended and were not completed."""
        if self.waiting:
            self.waiting.pop(caller, None)
        if self.driver == caller:
            self.driver, self.resting, self._left_s = 0, False, now
        if self.driver:
            return Signal.NONE
        if busy and self.waiting:
            self.driver, self._looks_until = next(iter(self.waiting)), -1.0
            self.heir = self.waiting.pop(self.driver)
            return Signal.PASS
        if busy:
            return self.call()
        return Signal.TEND if self.sleep is Sleep.WATCHING else Signal.NONE

    # ---------------------------------------------------------------- what else happens

    def submitted(self, waits: bool) -> Signal:
        """An operation was begun. `waits`: its caller drives at once."""
        if self.driver:
            return self.nudge()
        return Signal.NONE if waits else Signal.TURN

    def turned_for_others(self, busy: bool) -> Signal:
        """After the turn of an asynchronous submit: the thread has to go on, unless it will notice by itself."""
        if self.sleep is Sleep.PARKED:
            return self.call() if busy else Signal.NONE
        return Signal.TEND if self.sleep is Sleep.WATCHING else Signal.NONE

    def tended(self, due: float) -> Signal:
        """The endpoint is armed, and needs a turn at `due` at the latest."""
        return self.call() if due < self._until else Signal.NONE

    def nudge(self) -> Signal:
        """There is something new for the driver, or its operation was completed."""
        if not self.resting:
            return Signal.NONE
        self.resting, self.nudged = False, True
        return Signal.NUDGE

    def takes_nudge(self) -> None:
        """The driver does not sleep any more, and its nudge was taken back."""
        self.nudged = False

    def call(self) -> Signal:
        """There is something new for the thread."""
        if self._called or self.sleep is Sleep.AWAKE or self.sleep is Sleep.ABSENT:
            return Signal.NONE
        self._called = True
        return Signal.WAKE

    # ---------------------------------------------------------------- the thread

    def starts(self) -> None:
        self.sleep = Sleep.AWAKE

    def woke(self) -> bool:
        """The thread does not sleep any more. Returns whether its wake-up must be cleared."""
        called, self._called, self.sleep = self._called, False, Sleep.AWAKE
        return called

    def thread_must_end(self) -> bool:
        return self.closing

    def idles(self, now: float) -> Rest:
        """No generation is connected."""
        return self._sleeps(Sleep.PARKED, now, IDLE_S)

    def parks(self, now: float, connected: bool, busy: bool) -> Rest | None:
        """How the thread sleeps without a turn; None: it takes one, and then asks `goes_on`."""
        if self.driver:
            return self._sleeps(Sleep.PARKED, now, PARKED * self._park_s)
        if not connected and not busy:
            return self.idles(now)
        left_s = self._left_s + self._park_s - now
        return self._sleeps(Sleep.PARKED, now, left_s) if left_s > 0 and not busy else None

    def goes_on(self, now: float, moved: bool, due: float) -> Rest:
        """After a turn of the thread. `moved`: something happened or ended. Else the endpoint needs a turn at `due`."""
        return AT_ONCE if moved else self._sleeps(Sleep.WATCHING, now, max(0.0, min(IDLE_S, due - now)))

    def _sleeps(self, sleep: Sleep, now: float, timeout_s: float) -> Rest:
        self.sleep, self._until = sleep, now + timeout_s
        return Rest(sleep is Sleep.PARKED, timeout_s)

    def ends(self) -> None:
        """The thread has ended."""
        self.sleep = Sleep.ABSENT

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """No caller begins to drive any more."""
        self.closing = True

    def told(self) -> None:
        """The thread was asked to end, and woken: nothing wakes it any more."""
        self._told = True

    def retires(self) -> bool:
        """True once: closed, and no thread sleeps on the descriptors or will."""
        retires = self._told and not self._retired and not self.driver and self.sleep is Sleep.ABSENT
        self._retired = self._retired or retires
        return retires
