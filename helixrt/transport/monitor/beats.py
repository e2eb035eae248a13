"""The beats of a membership that the monitor process sends for its rank, and when they are withheld.

In: a function that beats once, what the monitor sees of its rank and of the ranks of the same replica. Out: calls of that
function, from a thread of their own. Standard library only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from helixrt.transport.monitor.wire import State


class Beats:
    """The beats of one membership, in a thread of their own: each is one call of `beat`, which may block."""

    def __init__(self, beat: Callable[[], None], period_s: float, most_s: float, beaten: Callable[[], None]) -> None:
        self.withheld = ""  # why there are none
        self.alive_s = time.monotonic()  # when the rank last said that its interpreter runs
        self.depends_on: set[int] = set()  # numbers of watched ranks: no beats unless they run
        self._beat, self._period_s, self._most_s, self._beaten = beat, period_s, most_s, beaten
        self._over = threading.Event()
        # Never joined: a call under way ends with the process, or by its own time-out.
        threading.Thread(target=self._run, name="helixrt-membership-beats", daemon=True).start()

    def _run(self) -> None:
        first = True
        while not self._over.is_set():
            if not self.withheld:
                self._beat()
                if first:
                    first = False
                    self._beaten()
            self._over.wait(self._period_s)

    def reason(self, stopped: bool, states: Callable[[int], State], now: float) -> str:
        """Why there should be no beats now; empty: there should."""
        if stopped:
            return "its process is stopped"
        if now > self.alive_s + self._most_s:
            return f"its interpreter has not run for {now - self.alive_s:.0f} s"
        for number in sorted(self.depends_on):
            if (state := states(number)) is not State.RUNNING:
                return f"another process of its replica is {state.value}"
        return ""

    def end(self) -> None:
        self._over.set()
