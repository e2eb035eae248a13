"""Reads the ranks' progress reports from the run's store, for the controller.

In: which ranks were started (`began`), and calls of `look` as often as the controller likes; it reads once in `period_s`.
Out: `policies.RankStuck` as `stuck` decides, whether a replica has asked for time, and the position of the batch that a rank
was working on when it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from helixrt.errors import Retryable
from helixrt.job.policies import RankStuck
from helixrt.job.stuck import Limits, RankWatch, asks_for_time, complaint, excused, most_likely_stuck, observe
from helixrt.replica.contracts import RunStore
from helixrt.replica.progress import ProgressReport
from helixrt.replica.run_keys import progress_key, working_key
from helixrt.replica.work_page import NOT_WORKING


@dataclass
class _Life:
    """The newest incarnation of a replica."""

    incarnation: int
    ranks: tuple[str, ...]
    watches: dict[str, RankWatch] = field(default_factory=dict)


class ProgressWatch:
    """Used from the controller's thread alone. `working_on` as `Launcher.working_on`."""

    def __init__(
        self,
        store: RunStore,
        limits: Limits,
        period_s: float,
        clock: Callable[[], float],
        working_on: Callable[[str, int], str | None] = lambda rank, incarnation: None,
    ) -> None:
        self._working_on = working_on
        self._store, self._limits, self._period_s, self._clock = store, limits, period_s, clock
        self._lives: dict[int, _Life] = {}
        self._looked_s = clock()

    def began(self, replica: int, incarnation: int, ranks: Sequence[str]) -> None:
        """These ranks were started; the reports of the incarnation before are deleted."""
        before = self._lives.get(replica)
        self._lives[replica] = _Life(incarnation, tuple(ranks))
        if before is not None:
            for rank in before.ranks:
                with suppress(Retryable):  # what stays is a small key that nobody reads
                    self._store.delete(progress_key(rank, before.incarnation))
                    self._store.delete(working_key(rank, before.incarnation))

    def look(self, replicas: Iterable[int]) -> list[RankStuck]:
        """The stuck ranks of these replicas, at most one of each. Raises Retryable: this look counts for nothing."""
        now = self._clock()
        elapsed_s = now - self._looked_s
        if elapsed_s < self._period_s:
            return []
        self._looked_s = now
        found = []
        for replica in replicas:
            if (life := self._lives.get(replica)) is not None:
                self._observe(life, elapsed_s)
                if (stuck := most_likely_stuck(life.watches, self._limits)) is not None:
                    why = f"{stuck.rank} incarnation {life.incarnation} {stuck.reason}"
                    position = self.position(replica, life.incarnation, stuck.rank)
                    found.append(RankStuck(replica, life.incarnation, stuck.rank, why, position))
        return found

    def has_time_left(self, replica: int) -> bool:
        """Whether a rank of the replica's newest incarnation has asked for time, and had some of it left at the last look."""
        life = self._lives.get(replica)
        return life is not None and any(asks_for_time(watch) for watch in life.watches.values())

    def position(self, replica: int, incarnation: int, rank: str) -> int | None:
        """Of the batch that the rank is working on, or was when it ended; None: it does something else."""
        life = self._lives.get(replica)
        if life is None or life.incarnation != incarnation:
            return None
        with suppress(Retryable):
            position = self._working_on(rank, incarnation) or self._store.get(working_key(rank, incarnation))
            return None if position in (None, NOT_WORKING) else int(position)
        return None

    def complaint(self, replica: int, incarnation: int, ended: str) -> str:
        """Which other rank of the replica stood still when this one ended, and how; empty if none did."""
        life = self._lives.get(replica)
        if life is None or life.incarnation != incarnation:
            return ""
        stuck = complaint(life.watches, ended, self._limits)
        return "" if stuck is None else f"{stuck.rank} {stuck.reason}"

    def _observe(self, life: _Life, elapsed_s: float) -> None:
        for rank in life.ranks:
            watch = observe(life.watches.get(rank), self._read(life, rank), elapsed_s, self._limits)
            if watch is not None:
                life.watches[rank] = watch
        life.watches = excused(life.watches, self._limits)

    def _read(self, life: _Life, rank: str) -> ProgressReport | None:
        text = self._store.get(progress_key(rank, life.incarnation))
        return None if text is None else ProgressReport.from_json(text)
