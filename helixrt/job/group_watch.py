"""A replica is lost whole: a rank that was started from outside ends when another rank of its replica has ended, or when the
run's server says that its incarnation has, or when the server itself has gone. A replica that leaves at a step boundary, and a
run that has ended well, are left to end by themselves.

In: the run's store. Out: a call with the reason, from a thread of this module. The starter of the processes may end them, too;
but Slurm need not, and a rank that waits for its leader's orders would wait without a limit. A main thread that does not end by
itself within the grace (it may be in a collective, or in the user's code) is ended with the process.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from helixrt.errors import HelixError, Retryable, StartAgain
from helixrt.job.leaving import LEAVE_S
from helixrt.job.policies import LEFT_EXIT, RELOAD_EXIT, RETRY_EXIT
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import EXIT_KEY, ended_key, exit_key, leave_key
from helixrt.replica.telling import tell

LOOK_S = 0.5
GRACE_S = 15.0
AWAY_S = 60.0  # for the run's server to answer again


class GroupWatch:
    """A context manager around the life of one rank: `rank` of `ranks` of the incarnation `life` (replica, incarnation).

    `end(error)` makes the main thread raise the error when it comes to it. `leave(code)` ends the process. `away_s`: how long
    the store may be away. `leave_s()`: how long a rank may take to end after its replica has left its quorum; it may be in the
    middle of a batch, and write a checkpoint then.
    """

    def __init__(
        self,
        store: RunStore,
        life: tuple[int, int],
        rank: int,
        ranks: int,
        end: Callable[[BaseException], None],
        leave: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
        away_s: float = AWAY_S,
        leave_s: Callable[[], float] = lambda: LEAVE_S,
    ) -> None:
        self._store, self._life, self._rank = store, life, rank
        self._others = [other for other in range(ranks) if other != rank]
        self._end, self._leave, self._clock, self._away_s = end, leave, clock, away_s
        self._leave_s = leave_s
        self._left_s: float | None = None  # since when it is known that the replica has left its quorum
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GroupWatch:
        self._thread = threading.Thread(target=self._run, name="helixrt-group-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def look(self) -> str:
        """Why this rank is to end; "" if it is not. Raises Retryable without the store."""
        if self._store.get(EXIT_KEY) is not None or not self._others:
            return ""  # a replica of one rank sees at its quorums or appends that it has ended
        codes = {other: json.loads(said)["code"] for other in self._others if (said := self._exit_of(other)) is not None}
        ended = self._store.get(ended_key(*self._life)) is not None
        left = not set(codes.values()) - {0, LEFT_EXIT} and (ended or LEFT_EXIT in codes.values())
        if left and self._is_leaving():
            return ""
        for other, code in codes.items():
            if code != 0:
                return f"rank {other} of this replica has ended: {json.loads(self._exit_of(other) or '{}').get('why', '')}"
        return "this incarnation of the replica has ended" if ended else ""

    def _exit_of(self, rank: int) -> str | None:
        return self._store.get(exit_key(*self._life, rank))

    def _is_leaving(self) -> bool:
        """Whether the replica that ended had been asked to leave, a short time ago."""
        if self._left_s is None and self._store.get(leave_key(*self._life)) is not None:
            self._left_s = self._clock()
        return self._left_s is not None and self._clock() - self._left_s < self._leave_s()

    def _run(self) -> None:
        found: HelixError | None = None
        answered_s = self._clock()
        while found is None:
            if self._closed.wait(LOOK_S):
                return
            try:
                why = self.look()
                answered_s = self._clock()
                found = StartAgain(why) if why else None
            except Retryable as error:  # a leader asks again and again
                if self._clock() - answered_s >= self._away_s:
                    found = Retryable(f"{error}; it has been away for {self._away_s:g} s, and what was committed is on disk")
        self._end(found)
        if self._closed.wait(GRACE_S):
            return
        code = RELOAD_EXIT if isinstance(found, StartAgain) else RETRY_EXIT
        tell(f"helixrt: {found}; this rank did not end within {GRACE_S:g} s, so its process ends")
        told = json.dumps({"code": code, "why": str(found)})
        with suppress(Retryable):
            self._store.put_if_absent(exit_key(*self._life, self._rank), told)
        self._leave(code)
