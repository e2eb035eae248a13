"""What the ranks of a replica measure while they train, and how it comes to the leader.

In: the flight record of a rank, and the end of each of its steps. Out: on the leading rank, `ReplicaCosts`: the measured costs
as of now. A thread reduces what a rank wrote, so that no step waits for it; a follower's numbers reach the leader as its other
reports do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from helixrt.errors import Retryable
from helixrt.observe.estimates import MeasuredCosts
from helixrt.observe.estimator import Estimator, Shift
from helixrt.observe.stamps import RankTimes, StampCollector

PERIOD_S = 0.05  # between two reports of a rank; steps that are shorter share one


class ReplicaCosts:
    """Of the replica that this rank leads; from any thread."""

    def __init__(self, stages: int) -> None:
        self._estimator = Estimator(stages)
        self._lock = threading.Lock()

    def add(self, times: RankTimes) -> list[Shift]:
        """What a rank of the replica measured; the changes that it confirms."""
        with self._lock:
            before = self._estimator.shifted
            self._estimator.add(times)
            found = self._estimator.shifts
            return list(found)[max(0, len(found) - (self._estimator.shifted - before)) :]

    def estimates(self) -> MeasuredCosts | None:
        """As of now; None until every stage has reported more than its warm-up."""
        with self._lock:
            return self._estimator.estimates()

    def shifts(self) -> tuple[Shift, ...]:
        """The changes of costs so far, oldest first."""
        with self._lock:
            return tuple(self._estimator.shifts)


class Measuring:
    """Of one rank: attach `collector` to the flight record, and call `step_done` at the end of each step. `send` gets the
    summaries, in a thread of this object; one that it cannot send (Retryable) is dropped, for the next one says as much."""

    CLOSE_S = 1.0

    def __init__(self, rank: str, clock: str, send: Callable[[RankTimes], None]) -> None:
        self.collector, self._send = StampCollector(rank, clock), send
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # that have ended; None: no more
        self.spent_s = 0.0  # of the thread's time; written by the thread
        self._thread = threading.Thread(target=self._run, name="helixrt-measuring", daemon=True)
        self._thread.start()

    def step_done(self, step: int) -> None:
        """From the thread that computes; returns at once."""
        self.collector.mark(step)
        self._steps.put(step)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._steps.put(None)
        self._thread.join(timeout=self.CLOSE_S)

    def _run(self) -> None:
        sent_s = 0.0
        while (step := self._steps.get()) is not None:
            early_s = sent_s + PERIOD_S - time.monotonic()
            if early_s > 0:
                time.sleep(early_s)
            with suppress(queue.Empty):
                while (later := self._steps.get_nowait()) is not None:
                    step = later
                return
            sent_s = time.monotonic()
            if (times := self.collector.take(step)) is not None:
                with suppress(Retryable):
                    self._send(times)
            self.spent_s = time.thread_time()
