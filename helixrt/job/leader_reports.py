"""What a replica's leader tells the driver through the run's store: figures of its steps, and how it ended.

In: lines of `helixrt.job.metrics`, and the end's `Finished`. Out: numbered keys that the driver reads and deletes.
Lines wait in memory while the store does not answer, up to a limit; beyond it the oldest are dropped, and counted.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass

from helixrt.errors import Retryable
from helixrt.job.metrics import Notice
from helixrt.replica.contracts import RunStore


@dataclass(frozen=True)
class Finished:
    """What a replica says under its `done_key`: the state it ended with.

    `parameters` and `state` are digests (`state_digest`). `unsaved` is "" if the state's checkpoint is complete (or none was
    asked for), else why it could not be written.
    """

    replica: int
    step: int
    lineage: str
    parameters: str
    state: str
    unsaved: str = ""

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str) -> Finished:
        return Finished(**json.loads(text))


def metrics_key(replica: int, incarnation: int, number: int) -> str:
    """Where a leader puts the `number`-th part of its metrics, for the driver: lines, as `lines_of` reads them."""
    return f"metrics/{replica}/{incarnation}/{number}"


def shown_key(replica: int, incarnation: int) -> str:
    """Set by the driver of a run that has a keeper: the number of the next part that it has not shown."""
    return f"metrics/{replica}/{incarnation}/shown"


def lines_of(part: str) -> list[str]:
    """The lines of metrics that were put under one key."""
    return part.split("\n")


class MetricsSender:
    """Puts lines into the store on a thread of its own, so that no step waits for it. `rank` labels its notices.

    Lines are gathered for `GATHER_S` and put under one key: short steps do not each wake the thread, the store and the driver.
    What is put is tried again every `PAUSE_S` until the store takes it; `capacity` lines wait at most.
    """

    GATHER_S = 0.05
    PAUSE_S = 0.5
    CLOSE_S = 5.0  # how long `close` waits for what is left
    MOST = 256  # lines under one key

    def __init__(self, store: RunStore, replica: int, incarnation: int, rank: str = "", capacity: int = 10_000) -> None:
        self._store, self._replica, self._incarnation, self._rank = store, replica, incarnation, rank
        self._capacity = capacity
        self._changed = threading.Condition()  # guards everything below
        self._lines: deque[str] = deque()
        self._dropped = 0  # not told yet
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="helixrt-metrics", daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        with self._changed:
            if len(self._lines) >= self._capacity:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
            if len(self._lines) == 1:
                self._changed.notify_all()

    def say(self, text: str) -> None:
        """Have the driver print a line."""
        self.send(Notice(self._rank, text).to_json())

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most, and end the thread; idempotent."""
        with self._changed:
            if self._close_by is None:
                self._close_by = time.monotonic() + self.CLOSE_S
            self._changed.notify_all()
        self._thread.join(timeout=2 * self.CLOSE_S)

    def _run(self) -> None:
        number = 0
        while lines := self._next():
            # The same text under the same key after an unknown outcome: it is ours alone, so that changes nothing.
            while not self._put(number, "\n".join(lines)):
                if not self._pause():
                    return
            number += 1

    def _next(self) -> list[str]:
        """The next lines to send; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._close_by is not None)
            self._changed.wait_for(lambda: self._close_by is not None, self.GATHER_S)
            lines = []
            if self._dropped:
                text = f"{self._dropped} lines of metrics were dropped while the run's store did not answer"
                self._dropped = 0
                lines.append(Notice(self._rank, text).to_json())
            while self._lines and len(lines) < self.MOST:
                lines.append(self._lines.popleft())
            return lines

    def _put(self, number: int, part: str) -> bool:
        try:
            self._store.put_if_absent(metrics_key(self._replica, self._incarnation, number), part)
            return True
        except Retryable:
            return False

    def _pause(self) -> bool:
        """Before the store is asked again; False when the sender was closed and has tried for long enough."""
        with self._changed:
            self._changed.wait_for(lambda: self._close_by is not None, self.PAUSE_S)
            if self._close_by is None:
                return True
            late = time.monotonic() >= self._close_by
        if not late:
            time.sleep(min(0.1, self.PAUSE_S))
        return not late
