"""The launcher of replicas that somebody else starts: torchrun, Slurm, a user by hand.

In: the run's store, where a process claims the next incarnation of its replica and says how it ends (`environment`). Out: the
`Launcher` contract. `start` waits for a claim and answers it with the rank's spec; `kill` says in the store that the
incarnation has ended, at which it stops at its next quorum. An incarnation is over when it says so, when the next one is
claimed, or when it has not reported for `silent_s`.

Each replica has one rank. All calls come from one thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from helixrt.errors import Cause, Retryable
from helixrt.replica.contracts import Launcher, RankExit, RankSpec, RunStore
from helixrt.replica.run_keys import CLOSED_KEY, claim_key, ended_key, exit_key, progress_key, spec_key

_LOST = -9  # exit code of a process that has told none


@dataclass
class _Started:
    spec: RankSpec
    since_s: float  # of the start, later of the newest report
    claimed_by: str = ""  # host and process; "" while nobody has come
    report: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.spec.coordinate.replica, self.spec.incarnation


class ExternalLauncher(Launcher):
    """`wait_s`: a replica that nobody starts (again) for so long is no longer waited for without limit. `close_s`: how long
    `close` waits for ranks to end."""

    awaits = "nobody has started it yet"

    def __init__(
        self,
        store: RunStore,
        silent_s: float,
        wait_s: float,
        close_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._silent_s, self._wait_s, self._close_s = store, silent_s, wait_s, close_s
        self._clock = clock
        self._started: dict[tuple[int, int], _Started] = {}  # not reported as ended
        self._cancelled: list[RankExit] = []
        self._closed = False

    def start(self, spec: RankSpec) -> None:
        started = _Started(spec, self._clock())
        if not self._closed:
            self._started.setdefault(started.key, started)

    def waiting(self, replica: int) -> bool:
        now = self._clock()
        return any(
            key[0] == replica and not started.claimed_by and now - started.since_s < self._wait_s
            for key, started in self._started.items()
        )

    def poll(self) -> list[RankExit]:
        exits, self._cancelled = self._cancelled, []
        with suppress(Retryable):  # the controller notices a store that stays away
            for started in list(self._started.values()):
                if not started.claimed_by:
                    self._answer(started)
                elif (ended := self._exit_of(started)) is not None:
                    exits.append(ended)
                    del self._started[started.key]
        return exits

    def kill(self, replica: int) -> None:
        for key, started in list(self._started.items()):
            if key[0] == replica:
                self._fence(started)
                if not started.claimed_by:
                    del self._started[key]
                    self._cancelled.append(self._ended(started, _LOST, "was not started"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with suppress(Retryable):
            self._store.put_if_absent(CLOSED_KEY, "yes")
        self._started = {key: started for key, started in self._started.items() if started.claimed_by}
        for started in self._started.values():
            self._fence(started)
        deadline = self._clock() + self._close_s
        while self._started and self._clock() < deadline:
            self.poll()
            time.sleep(0.05)

    # ---------------------------------------------------------------- one incarnation

    def _answer(self, started: _Started) -> None:
        """Give a process that has claimed the incarnation its spec."""
        claim = self._store.get(claim_key(*started.key))
        if claim is not None:
            self._store.put_if_absent(spec_key(*started.key), json.dumps(replace(started.spec, secret="").to_plain()))
            started.claimed_by, started.since_s = claim, self._clock()

    def _exit_of(self, started: _Started) -> RankExit | None:
        replica, incarnation = started.key
        said = self._store.get(exit_key(replica, incarnation))
        if said is not None:
            told = json.loads(said)
            return self._ended(started, told["code"], told["why"])
        successor = self._store.get(claim_key(replica, incarnation + 1))
        if successor is not None:
            return self._ended(started, _LOST, f"ended without a word; {successor} has begun in its place")
        report, now = self._store.get(progress_key(str(started.spec.coordinate), incarnation)), self._clock()
        if report != started.report:
            started.report, started.since_s = report, now
        elif now - started.since_s > self._silent_s:
            self._fence(started)
            return self._ended(started, _LOST, f"has not reported for {self._silent_s:g} s")
        return None

    def _fence(self, started: _Started) -> None:
        with suppress(Retryable):
            self._store.put_if_absent(ended_key(*started.key), "yes")

    def _ended(self, started: _Started, code: int, why: str) -> RankExit:
        spec = started.spec
        who = f"{spec.coordinate} incarnation {spec.incarnation}"
        cause = Cause(why, f"{who} ({started.claimed_by})" if started.claimed_by else who)
        return RankExit(spec.coordinate, spec.incarnation, code, str(cause))
