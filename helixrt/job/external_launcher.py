"""The launcher of replicas that somebody else starts: torchrun, Slurm, a user by hand.

In: the run's store, where the processes of a replica claim its next incarnation together (`claims`) and say how they end
(`environment`). Out: the `Launcher` contract. `start` waits until the incarnation is formed and answers each rank with its
spec; `kill` says in the store that the incarnation has ended, at which its ranks stop. A rank is over when it says so, when the
next incarnation is claimed, or when it has not reported for `silent_s`. The replica is the unit of failure: once one rank is
over, the controller kills the others.

All calls come from one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from helixrt.errors import Cause, Retryable
from helixrt.job.claims import claimant
from helixrt.job.config import MeshConfig
from helixrt.job.places import group_rank, group_world_size
from helixrt.replica.contracts import Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.progress import ProgressReport
from helixrt.replica.run_keys import CLOSED_KEY, claim_key, ended_key, exit_key, formed_key, progress_key, spec_key

_LOST = -9  # exit code of a process that has told none
_MOST_LOOK_S = 5.0  # of the time between two looks that counts: this process may have been stopped


@dataclass(frozen=True)
class Patience:
    """In seconds. `silent_s`: a rank that has not reported for so long is over, if it has not asked for more time; `start_s`:
    the same before its first step. `wait_s`: a replica that nobody starts (again) for so long is no longer waited for without
    limit. `close_s`: how long `close` waits for ranks to end."""

    silent_s: float
    wait_s: float
    close_s: float = 10.0
    start_s: float = 0.0


@dataclass
class _Rank:
    """One that was started and is not over."""

    spec: RankSpec
    group_rank: int
    since_s: float  # of the start
    process: str = ""  # that has come as this rank; "" while the incarnation is not formed
    report: str | None = None
    silent_s: float = 0.0  # observed, since the newest report
    looked_s: float | None = None

    @property
    def life(self) -> tuple[int, int]:
        """Its replica and incarnation."""
        return self.spec.coordinate.replica, self.spec.incarnation


class ExternalLauncher(Launcher):
    """`mesh`: of the run, whose replicas all have the same ranks."""

    awaits = "nobody has started it yet"

    def __init__(
        self, store: RunStore, mesh: MeshConfig, patience: Patience, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._mesh, self._patience, self._clock = store, mesh, patience, clock
        self._ranks: dict[tuple[int, int, int], _Rank] = {}  # by replica, incarnation, group rank; those not over
        self._cancelled: list[RankExit] = []
        self._closed = False

    def start(self, spec: RankSpec) -> None:
        started = _Rank(spec, group_rank(self._mesh, spec.coordinate), self._clock())
        if not self._closed:
            self._ranks.setdefault((*started.life, started.group_rank), started)

    def waiting(self, replica: int) -> bool:
        now = self._clock()
        return any(
            key[0] == replica and not rank.process and now - rank.since_s < self._patience.wait_s
            for key, rank in self._ranks.items()
        )

    def poll(self) -> list[RankExit]:
        exits, self._cancelled = self._cancelled, []
        with suppress(Retryable):  # the controller notices a store that stays away
            for life in sorted({rank.life for rank in self._ranks.values() if not rank.process}):
                self._answer(life)
            for key, rank in list(self._ranks.items()):
                if (ended := self._exit_of(rank)) is not None:
                    exits.append(ended)
                    del self._ranks[key]
        return exits

    def kill(self, replica: int) -> None:
        for key, rank in list(self._ranks.items()):
            if key[0] == replica:
                self._fence(rank)
                if not rank.process:
                    del self._ranks[key]
                    self._cancelled.append(self._ended(rank, _LOST, "was not started"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(Retryable):
            self._store.put_if_absent(CLOSED_KEY, "yes")
        self._ranks = {key: rank for key, rank in self._ranks.items() if rank.process}
        for rank in self._ranks.values():
            self._fence(rank)
        deadline = self._clock() + self._patience.close_s
        while self._ranks and self._clock() < deadline:
            self.poll()
            time.sleep(0.05)

    # ---------------------------------------------------------------- one incarnation

    def _answer(self, life: tuple[int, int]) -> None:
        """Give the processes of an incarnation that is formed their specs."""
        formed = self._store.get(formed_key(*life))
        ranks = [rank for rank in self._ranks.values() if rank.life == life]
        if formed is None or len(ranks) < group_world_size(self._mesh):
            return
        processes = json.loads(formed)
        for rank in ranks:
            told = json.dumps(replace(rank.spec, secret="").to_plain())
            self._store.put_if_absent(spec_key(*life, rank.group_rank), told)
        for rank in ranks:
            rank.process, rank.since_s = processes[rank.group_rank], self._clock()

    def _exit_of(self, rank: _Rank) -> RankExit | None:
        replica, incarnation = rank.life
        said = self._store.get(exit_key(replica, incarnation, rank.group_rank))
        if said is not None:
            told = json.loads(said)
            return self._ended(rank, told["code"], told["why"], told.get("error", ""))
        successor = self._store.get(claim_key(replica, incarnation + 1))
        if successor is not None:
            how = "ended without a word" if rank.process else "did not begin with all ranks of its replica"
            return self._ended(rank, _LOST, f"{how}; {claimant(successor)} has begun in its place")
        if not rank.process:
            return None
        report, now = self._store.get(progress_key(str(rank.spec.coordinate), incarnation)), self._clock()
        if report != rank.report or rank.looked_s is None:
            rank.report, rank.silent_s = report, 0.0
        else:
            rank.silent_s += min(now - rank.looked_s, _MOST_LOOK_S)  # this process may have been stopped meanwhile
        rank.looked_s = now
        if rank.silent_s >= self._may_be_silent_s(report):
            self._fence(rank)
            return self._ended(rank, _LOST, f"has not reported for {rank.silent_s:.0f} s")
        return None

    def _may_be_silent_s(self, text: str | None) -> float:
        """How long the rank that sent this report last may say nothing: a call of its own may hold the interpreter lock for as
        long as it has asked for (`session.busy`)."""
        report = None if text is None else ProgressReport.from_json(text)
        started = report is not None and report.committed
        asked_s = 0.0 if report is None else max((thread.limit_s for thread in report.threads), default=0.0)
        return max(self._patience.silent_s, asked_s, 0.0 if started else self._patience.start_s)

    def _fence(self, rank: _Rank) -> None:
        with suppress(Retryable):
            self._store.put_if_absent(ended_key(*rank.life), "yes")

    def _ended(self, rank: _Rank, code: int, why: str, error: str = "") -> RankExit:
        spec = rank.spec
        who = f"{spec.coordinate} incarnation {spec.incarnation}"
        cause = Cause(why, f"{who} ({rank.process})" if rank.process else who)
        return RankExit(spec.coordinate, spec.incarnation, code, str(cause), error, rank.process.partition(":")[0])
