"""What could not be written, and that it could be written again: in the flight record, and on the console.

In: the failures and successes of one kind of writing (checkpoints, the lineage, metrics). Out: `storage_failed` and
`storage_back` events, one line of text for each, and the present `Outage`.
"""

from __future__ import annotations

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
        reason = " ".join(str(error).split()) or type(error).__name__
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
