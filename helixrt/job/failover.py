"""A checkpoint soon after a failover: a link that goes on without one of its rails may lose the next one.

SHIFT (sections 1 and 3) keeps a job alive on its backup NIC until the next checkpoint; here that one is not waited for. In:
`rail_left` events of every rank's flight record. Out: for the leader of the replica that writes checkpoints, whether to have
one written after this update, though its step is not due.

Ranks tell each other through the run's store, as a list that is only ever added to: entry k says in which step somebody left
a rail. The leader alone decides, and orders the checkpoint behind the update, which all stages of its replica so see in the
same order: they agree on the step without a word between them, and other replicas need not know. A checkpoint of that step
or a later one is enough, whoever wrote it and why.
"""

from __future__ import annotations

import queue
import threading

from helixrt.errors import Retryable
from helixrt.record import Event, Kind
from helixrt.replica.contracts import RunStore

_PAUSE_S = 0.5  # before an unanswered store is asked again
_JOIN_S = 5.0


def is_failover(event: Event) -> bool:
    """A rail has failed, and others carry on. One that was left as slow still works; the last one's end is the link's."""
    return event.kind is Kind.RAIL_LEFT and event.detail["failure"] is not None and event.detail["usable"] > 0


class FailoverNews:
    """What a rank knows of all ranks' failovers. Attach it to its flight record: what it hears there it tells the others."""

    def __init__(self, store: RunStore, me: str) -> None:
        self._store, self._me = store, me
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._told = -1  # the newest step of a failover of our own
        self._read = 0  # entries of the list
        self._newest = -1
        self._lock = threading.Lock()  # of the two above
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        """Never waits: events come from the thread that drives the links."""
        if not is_failover(event) or event.step <= self._told:
            return
        self._told = event.step
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell_all, name="helixrt-failover", daemon=True)
            self._thread.start()
        self._steps.put(event.step)

    def newest(self) -> int:
        """The newest step in which a rank left a rail that failed; -1: none did. Raises Retryable without the store."""
        with self._lock:
            while (entry := self._store.get(_key(self._read))) is not None:
                self._take(entry)
            return self._newest

    def _tell_all(self) -> None:
        while (step := self._steps.get()) is not None:
            while not self._closed.is_set():
                try:
                    self._tell(step)
                    break
                except Retryable:
                    self._closed.wait(_PAUSE_S)

    def _tell(self, step: int) -> None:
        with self._lock:
            while self._newest < step:
                self._take(self._store.put_if_absent(_key(self._read), f"{step} {self._me}"))

    def _take(self, entry: str) -> None:
        self._read += 1
        self._newest = max(self._newest, int(entry.split()[0]))

    def close(self) -> None:
        """End the thread; idempotent."""
        self._closed.set()
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join(_JOIN_S)


def _key(index: int) -> str:
    return f"failover/{index}"
