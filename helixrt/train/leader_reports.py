"""What a replica's leader tells the driver through the run's store: figures of its steps, and how it ended.

In: lines of `helixrt.train.metrics`, and the end's `Finished`. Out: numbered keys that the driver reads and deletes.
"""

from __future__ import annotations

import json
import queue
import threading
from dataclasses import dataclass

from helixrt.errors import Retryable
from helixrt.replica.contracts import RunStore


@dataclass(frozen=True)
class Finished:
    """What a replica says under its `done_key`: the state it ended with."""

    replica: int
    step: int
    lineage: str
    parameters_sha256: str
    state_sha256: str

    def to_json(self) -> str:
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str) -> Finished:
        return Finished(**json.loads(text))


def metrics_key(replica: int, incarnation: int, number: int) -> str:
    """Where a leader puts its `number`-th line of metrics, for the driver."""
    return f"metrics/{replica}/{incarnation}/{number}"


class MetricsSender:
    """Puts lines into the store on a thread of its own, so that no step waits for it."""

    def __init__(self, store: RunStore, replica: int, incarnation: int) -> None:
        self._store, self._replica, self._incarnation = store, replica, incarnation
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="helixrt-metrics", daemon=True)
        self._thread.start()

    def send(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        """Send what is left; waits a few seconds at most."""
        self._lines.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        number = 0
        while (line := self._lines.get()) is not None:
            try:
                self._store.put_if_absent(metrics_key(self._replica, self._incarnation, number), line)
            except Retryable:
                return  # the driver is gone, and with it whoever would read this
            number += 1
