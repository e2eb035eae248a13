"""What could not be written and why, and that it could be written again: in the flight record, and on the console.

In: the failures and successes of one kind of writing (checkpoints, the lineage, metrics). Out: `storage_failed` and
`storage_back` events, one line of text for each, and the present `Outage`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from helixrt.record import FlightRecord, Kind


@dataclass(frozen=True)
class Outage:
    """`failures` attempts in a row have failed, the first at `since_s` and the newest at `newest_s` (monotonic seconds).

    `step` is that of the newest attempt, `reason` its error.
    """

    failures: int
    step: int
    reason: str
    since_s: float
    newest_s: float


_WORDS = {
    errno.ENOSPC: "its file system is full: free some space, or take another storage",
    errno.EDQUOT: "the quota of this user is used up: free some space, or take another storage",
    errno.ENOTDIR: "a part of this path is a file: name a folder",
    errno.EEXIST: "a file has this name: name a folder",
    errno.ENAMETOOLONG: "a name may have 255 bytes, and a path 4,096",
    errno.EROFS: "its file system is read-only: take another storage",
    errno.EACCES: "this user may not write there: change the permissions, or take another storage",
}
_WORDS[errno.EPERM] = _WORDS[errno.EACCES]


def in_words(error: BaseException | str) -> str:
    """In one line what failed and, for an error of the system that has to do with storage, which limit and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    words = _WORDS.get(error.errno or 0) if isinstance(error, OSError) else None
    return f"{reason} ({words})" if words else reason


def is_told(failures: int) -> bool:
    """Whether the n-th failure in a row is reported: the first, and then ever fewer."""
    return failures & (failures - 1) == 0


class StorageTrouble:
    """Of one kind of writing, called `what` in messages. `failed` and `worked` are called from its one thread.

    `outage` may be read from any thread: it is None while writing works.
    """

    def __init__(
        self,
        what: str,
        record: FlightRecord,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.outage: Outage | None = None
        self._record, self._say, self._clock = record, say, clock

    def failed(self, step: int, error: BaseException | str) -> None:
        """An attempt has failed; it will be tried again."""
        before, now = self.outage, self._clock()
        failures = 1 if before is None else before.failures + 1
        reason = in_words(error)
        self.outage = Outage(failures, step, reason, now if before is None else before.since_s, now)
        if is_told(failures):
            self._record.write(Kind.STORAGE_FAILED, step=step, what=self.what, reason=reason, failures=failures)
            again = "" if failures == 1 else f" ({failures} failures in a row)"
            self._say(f"{self.what} of step {step} could not be written{again}, it is tried again: {reason}")

    def worked(self, step: int) -> None:
        """An attempt has succeeded."""
        before, self.outage = self.outage, None
        if before is not None:
            self._record.write(Kind.STORAGE_BACK, step=step, what=self.what, failures=before.failures)
            self._say(f"{self.what} of step {step} was written, after {before.failures} failed attempts")
