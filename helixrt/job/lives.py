"""What the driver keeps of each life of a replica, so that neither its work nor the run's store grows with the number of lives.

In: which incarnations begin and run. Out: what their leaders report of the steps, each line once; the keys of lives that are
over are deleted from the store, a few at a time. What tells that a life is over (`ended`) and what became of it stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from helixrt.job.config import MeshConfig
from helixrt.job.leader_reports import lines_of, metrics_key, shown_key
from helixrt.job.metrics import MetricsLine, read_metrics_line
from helixrt.job.places import coordinates
from helixrt.replica.commands import orders_channel, reports_channel, traces_of
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import progress_key, spec_key, working_key

_A_LOOK = 50  # keys that one look deletes at most: a store takes a few milliseconds for them

Life = tuple[int, int]  # replica, incarnation


class Lives:
    """From one thread. `kept`: the run may outlive this driver, so the store has how much was shown."""

    def __init__(self, store: RunStore, mesh: MeshConfig, kept: bool = False) -> None:
        self._store, self._mesh, self._kept = store, mesh, kept
        self.shown: dict[Life, int] = {}  # of lives that may still say something: the number of the next metrics line
        self._over: deque[Life] = deque()
        self._keys: deque[str] = deque()  # to be deleted

    def begin(self, replica: int, incarnation: int, before: bool) -> None:
        """This incarnation is started, if it was not before; `before`: perhaps by another driver, which has shown some."""
        if (replica, incarnation) not in self.shown:
            number = self._store.get(shown_key(replica, incarnation)) if before else None
            self.shown[replica, incarnation] = int(number or 0)

    def news(self) -> Iterator[MetricsLine]:
        """What was reported since the last time. Raises Retryable."""
        for life, number in list(self.shown.items()):
            while (part := self._store.get(metrics_key(*life, number))) is not None:
                yield from map(read_metrics_line, lines_of(part))
                number += 1
                self.shown[life] = number  # at once: the store may not answer what follows
                if self._kept:
                    self._store.set(shown_key(*life), str(number))
                self._store.delete(metrics_key(*life, number - 1))

    def runs(self, replica: int, incarnation: int) -> None:
        """This incarnation has joined a quorum: of those before its predecessor all was shown."""
        over = [life for life in self.shown if life[0] == replica and life[1] < incarnation - 1]
        for life in over:
            del self.shown[life]
        self._over += over

    def tidy(self) -> None:
        """Delete some of what lives that are over have left in the store. Raises Retryable."""
        if not self._keys and self._over:
            self._keys += self._traces(*self._over[0])
            self._over.popleft()
        for _ in range(min(_A_LOOK, len(self._keys))):
            self._store.delete(self._keys[0])
            self._keys.popleft()

    def _traces(self, replica: int, incarnation: int) -> list[str]:
        life, found = f"{replica}/{incarnation}", [shown_key(replica, incarnation)]
        for rank, at in enumerate(coordinates(self._mesh, replica)):
            name = str(at)
            channel = orders_channel(life) if rank == 0 else reports_channel(life, rank)
            found += [spec_key(replica, incarnation, rank), progress_key(name, incarnation), working_key(name, incarnation)]
            found += traces_of(self._store, channel)
        return found
