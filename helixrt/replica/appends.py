"""How a leader puts the records of its replica into the run's log, behind a look at the fence: at once, or in the background.

In: records at consecutive indices. Out: what stands there.

`Appends` waits for the store: other replicas may put another record first, and all go by what stands. `GatheredAppends` is for
a run of one replica in one process. Nobody else takes part in its steps, so nobody waits for its records; and when its process
ends, the next one begins with the newest checkpoint, whichever records stand behind that. So a step goes on while its record is
on its way, `GATHER_S` and a little longer. Whatever outlives the process waits (`flush`): a checkpoint, a departure, the end of
the run. While the store is away, steps go on for `AHEAD_S` at most. The first record is put at once: an incarnation before this
one may have put another, and once one of ours stands, it cannot any more, since it puts each behind one of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from helixrt.errors import Retryable, StartAgain
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.runlog import RunLog

GATHER_S = 0.05  # how long a record waits for others
AHEAD_S = 1.0  # how old a record may be that does not stand, before the step behind it waits
WAIT_S = 0.5  # so long it waits at a time; then it is asked again
FLUSH_S = 60.0  # how long `flush` waits: then the caller asks again
CLOSE_S = 5.0
_PAUSE_S = 0.2  # before a store that was away is asked again


class Appends:
    """`append` and `stands_already` are called from one thread at a time, `flush` from any. `check_fence` raises StartAgain
    when this incarnation has ended."""

    def __init__(self, log: RunLog, check_fence: Callable[[], None]) -> None:
        self._log, self._check_fence = log, check_fence
        self.own_stands = False
        """A record that was appended here stands."""

    def append(self, index: int, record: CommitRecord) -> CommitRecord:
        """Propose `record` as entry `index`; returns the entry that stands there, this or another. Raises Retryable without the
        store: it may stand all the same."""
        self._check_fence()
        standing = self._log.append(index, record)
        self.own_stands = self.own_stands or standing.hash == record.hash
        return standing

    def is_pending(self, record: CommitRecord) -> bool:
        """Whether this record was appended and is not known to stand; from any thread."""
        return False

    def stands_already(self, index: int) -> bool:
        """Whether the entry `index`, which the leader knows, is known to stand in the run's log."""
        return True

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Return once everything that was appended stands. Raises Retryable when that takes longer, or does not happen."""

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Put what is left, for so long if the store is away; idempotent."""


class GatheredAppends(Appends):
    """As `Appends`, in the background, in a thread that starts when the first record stands. There `stands(index, record)` is
    called for each record that does, and `broken(error)` when this process must end: it was declared ended, or another one has
    put a record."""

    def __init__(
        self,
        log: RunLog,
        check_fence: Callable[[], None],
        stands: Callable[[int, CommitRecord], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        super().__init__(log, check_fence)
        self._stands, self._broken = stands, broken
        self._newest = -1  # the highest index that was appended
        self._changed = threading.Condition()  # guards everything below
        self._pending: deque[tuple[float, int, CommitRecord]] = deque()  # since when; they do not stand yet, or not surely
        self._hurry = False
        self._failed = ""  # why nothing is put any more
        self._away = ""  # the store did not answer the newest try
        self._close_by: float | None = None
        self._ended = False  # the thread, after `close`
        self._thread: threading.Thread | None = None

    def append(self, index: int, record: CommitRecord) -> CommitRecord:
        """Returns `record`, which is put soon. Raises Retryable when an earlier one is too old, or when nothing is put any
        more: then this one was not taken."""
        if self._thread is None:
            return self._first(index, record)
        with self._changed:
            if not self._has_room() and not self._changed.wait_for(self._has_room, WAIT_S):
                raise Retryable(f"records of this replica do not reach the run's store: {self._reason()}")
            idle = not self._pending
            self._pending.append((time.monotonic(), index, record))
            self._newest = index
            if idle:
                self._changed.notify_all()
        return record

    def _first(self, index: int, record: CommitRecord) -> CommitRecord:
        standing = super().append(index, record)
        if self.own_stands:
            thread = threading.Thread(target=self._run, name="helixrt-appends", daemon=True)
            thread.start()
            self._thread = thread
        return standing

    def is_pending(self, record: CommitRecord) -> bool:
        with self._changed:
            return any(each.hash == record.hash for _, _, each in self._pending)

    def stands_already(self, index: int) -> bool:
        return index > self._newest  # another process has put it

    def _has_room(self) -> bool:
        if self._failed or self._close_by is not None:
            return False
        return not self._pending or time.monotonic() - self._pending[0][0] < AHEAD_S

    def flush(self, timeout_s: float = FLUSH_S) -> None:
        with self._changed:
            target, self._hurry = self._newest, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or self._ended or self._is_put(target), timeout_s)
            if not self._is_put(target):
                raise Retryable(f"records of this replica do not reach the run's store: {self._reason()}")

    def _reason(self) -> str:
        return self._failed or self._away or ("closed" if self._close_by is not None else "it takes long")

    def _is_put(self, index: int) -> bool:
        return not self._pending or self._pending[0][1] > index

    def close(self, limit_s: float = CLOSE_S) -> None:
        with self._changed:
            if self._close_by is None:
                self._close_by = time.monotonic() + limit_s
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s + 1.0)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while self._await_records():
                try:
                    self._put()
                except Retryable as error:
                    if not self._pause(str(error)):
                        return
        except BaseException as error:
            with self._changed:
                self._failed = str(error) or type(error).__name__
                self._changed.notify_all()
            self._broken(error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _await_records(self) -> bool:
        """Wait for records, and until others have been gathered with the first; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._close_by is not None)
            if not self._pending:
                return False
            left_s = self._pending[0][0] + GATHER_S - time.monotonic()
            self._changed.wait_for(lambda: self._hurry or self._close_by is not None, max(0.0, left_s))
            self._hurry = False
            return True

    def _put(self) -> None:
        """All that are there now, in order."""
        self._check_fence()
        with self._changed:
            records = list(self._pending)
        for _, index, record in records:
            standing = self._log.append(index, record)
            if standing.hash != record.hash:
                raise StartAgain(f"another process has put entry {index} of the run's log, where this one has gone on")
            self._stands(index, record)
            with self._changed:
                self._pending.popleft()
                self._away = ""
                self._changed.notify_all()

    def _pause(self, why: str) -> bool:
        """The store is away; False when this was closed and has tried for long enough."""
        with self._changed:
            self._away = why
            self._changed.wait_for(lambda: self._hurry, _PAUSE_S)
            return self._close_by is None or time.monotonic() < self._close_by
