"""What the driver keeps of each life of a replica, so that neither its work nor the run's store grows with the number of lives.

In: which incarnations begin and run. Out: what their leaders report of the steps, each line once; the keys of lives that are
over are deleted from the store, a few at a time: those that its own ranks alone read, and the driver, which has. What others
may still read stays: that the life is over (`ended`: it fences the processes of that life), its claim (who starts counts them)
and its entries in lists that are read from their begin (`holders`, members known to the quorums).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from helixrt.job.config import MeshConfig
from helixrt.job.leader_reports import lines_of, metrics_key, shown_key
from helixrt.job.metrics import MetricsLine, read_metrics_line
from helixrt.job.places import coordinates
from helixrt.protocol.store_quorum import StoreQuorum
from helixrt.replica.commands import orders_channel, reports_channel, traces_of
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import (
    OfRank,
    asks_key,
    exit_key,
    formed_key,
    kill_key,
    leave_key,
    progress_key,
    running_key,
    saves_key,
    seat_key,
    spec_key,
    tidied_key,
    working_key,
)

_A_LOOK = 50  # keys that one look deletes at most: a store takes a few milliseconds for them

Life = tuple[int, int]  # replica, incarnation


class Lives:
    """From one thread. `kept`: the run may outlive this driver, so the store has how much was shown."""

    def __init__(self, store: RunStore, mesh: MeshConfig, kept: bool = False) -> None:
        self._store, self._mesh, self._kept = store, mesh, kept
        self.shown: dict[Life, int] = {}  # of lives that may still say something: the number of the next metrics line
        self._first: dict[int, int] = {}  # by replica, the first incarnation whose keys may be in the store
        self._over: deque[Life] = deque()  # their keys are to be deleted
        self._keys: deque[str] = deque()  # those of the life before, as far as they are not deleted yet

    def begin(self, replica: int, incarnation: int, before: bool) -> None:
        """This incarnation is started, if it was not before; `before`: perhaps by another driver, which has shown some."""
        if (replica, incarnation) not in self.shown:
            number = self._store.get(shown_key(replica, incarnation)) if before else None
            self.shown[replica, incarnation] = int(number or 0)
        if replica not in self._first:
            self._first[replica] = int((self._store.get(tidied_key(replica)) if before else None) or 0)

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
        for life in [life for life in self.shown if life[0] == replica and life[1] < incarnation - 1]:
            del self.shown[life]
        first = self._first[replica]
        self._over += [(replica, over) for over in range(first, incarnation - 1)]
        self._first[replica] = max(first, incarnation - 1)

    def tidy(self) -> None:
        """Delete some of what lives that are over have left in the store. Raises Retryable."""
        if not self._keys and self._over:
            self._keys += self._traces(*self._over[0])
        for _ in range(min(_A_LOOK, len(self._keys))):
            self._store.delete(self._keys[0])
            self._keys.popleft()
        if self._over and not self._keys:
            replica, incarnation = self._over[0]
            if self._kept:
                self._store.set(tidied_key(replica), str(incarnation + 1))
            self._over.popleft()

    def _traces(self, replica: int, incarnation: int) -> list[str]:
        life = f"{replica}/{incarnation}"
        found = [key(replica, incarnation) for key in (shown_key, asks_key, running_key, formed_key, leave_key, saves_key)]
        found += [kill_key(life), *StoreQuorum.traces_of((replica, incarnation))]
        for rank, at in enumerate(coordinates(self._mesh, replica)):
            name = str(at)
            channel = orders_channel(life) if rank == 0 else reports_channel(life, rank)
            found += [progress_key(name, incarnation), working_key(name, incarnation)]
            found += [key(replica, incarnation, rank) for key in (spec_key, seat_key, exit_key)]
            found += [family.key(life, rank) for family in OfRank]
            found += traces_of(self._store, channel)
        return found
