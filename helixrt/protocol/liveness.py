"""Is the peer alive? Rules for what counts as a sign of life, as a stop and as death; and the first reason of an end.

In: observations, and the caller's monotonic time. Out: when to probe, when to look, whether the peer counts as dead. A
connection that is closed needs none of this: its end is reported at once. No rule depends on the peer's user code: a peer
that holds its interpreter lock for seconds, in a callback or in a first compilation, gives all the signs of life below.

What is observed:

- *Acknowledgements* (`acknowledged_s`). Each end sends something on every connection at least every P/4 (`beat_s`), and
  the peer's kernel acknowledges it, whether the peer's process runs or not. So silence means: the host or the path failed.
- *The state of a process* (`Stopped`): the kernel of its host reports that it is stopped (SIGSTOP, a debugger). A process on
  this host is looked at directly; for one on another host its monitor process looks (`transport/monitor`).
- *Beats of a monitor process* (`Liveness` again): it runs no user code. If it is silent although its kernel acknowledges,
  everything of that rank is frozen.

With period P (1 s unless set):

- A peer is declared lost 1.4 P after its last message. The rest of the promised 1.5 P is for our own
  wake-up, which may be 0.1 P late.
- A stopped process is declared lost when all checks of one P have found it stopped, at a check every P/8. Shorter stops
  (a stack dump, a debugger that attaches) are no failure.
- If we ourselves were stalled (0.4 P without a look), the peer gets as long again, P/4 to P, once per
  silence: what it said meanwhile is read first, and our own probes were late as well. So a verdict never rests on the first
  look after a stall of ours.

FT-HSDP section 4.1 leaves detection to the collective's time-out; here no collective is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helixrt.errors import Cause

BEAT = 0.25  # of a period: the longest this end stays quiet
SILENCE = 1.4  # periods without a message, after which the peer is declared lost
STALL = 0.4  # of a period without a look: we were stalled
GRACE = (0.25, 1.0)  # of a period, least and most, that a stall of ours adds
STOPPED = 1.0  # periods in which every check found the process stopped, after which the peer is declared lost
LOOK = 0.125  # of a period: from one look at the state of a process to the next


class Liveness:
    """Liveness state of one peer at one end. Every call's `now` is the same monotonic clock, in seconds."""

    def __init__(self, period_s: float, now: float) -> None:
        assert period_s > 0
        self.period_s, self.beat_s = period_s, BEAT * period_s
        self.heard_s = now  # the last sign of life
        self._looked_s = now
        self._spared_until_s = -math.inf  # end of the grace that this silence got, if it got one

    def heard(self, at: float) -> None:
        """A sign of life was given at `at`, now or earlier; an older one than the last changes nothing."""
        if at > self.heard_s:
            self.heard_s, self._spared_until_s = at, -math.inf

    def silent(self, now: float) -> bool:
        """Whether the peer is lost. Call it at `deadline_s`, and only after all arrived data was passed to `heard`."""
        stall_s, self._looked_s = now - self._looked_s, now
        if now < self.heard_s + SILENCE * self.period_s:
            return False
        if stall_s > STALL * self.period_s and self._spared_until_s == -math.inf:
            self._spared_until_s = now + min(max(stall_s, GRACE[0] * self.period_s), GRACE[1] * self.period_s)
        return now >= self._spared_until_s

    @property
    def deadline_s(self) -> float:
        """When to look next, at the latest: often enough that a late look is a stall of ours and nothing else."""
        verdict = max(self.heard_s + SILENCE * self.period_s, self._spared_until_s)
        return min(verdict, self._looked_s + self.beat_s)


@dataclass(frozen=True, slots=True)
class Acknowledgements:
    """State of a connection, as this end's kernel reports it. Times are monotonic seconds."""

    last_s: float  # when the peer's kernel last acknowledged something
    full: bool = False  # bytes wait here and none is in flight: the peer's receive window is closed
    unanswered: int = 0  # probes of the closed window without an answer


def acknowledged_s(rail: Acknowledgements, control: Acknowledgements | None) -> float:
    """The last sign of life on a rail.

    A peer that does not read closes its window. From then on the kernel probes at intervals that double, so the rail itself
    is silent for longer and longer although it works. For such a rail the pair's control connection counts, over which
    nothing is ever waiting. The kernel may leave one probe unanswered (its limit of acknowledgements per time); two mean that
    the rail's own path has failed.
    """
    if rail.full and rail.unanswered <= 1 and control is not None:
        return max(rail.last_s, control.last_s)
    return rail.last_s


class Stopped:
    """Whether a process has been stopped for too long. Ask at least every `look_s`."""

    def __init__(self, period_s: float) -> None:
        assert period_s > 0
        self.look_s = LOOK * period_s
        self._limit_s = STOPPED * period_s
        self._looked_s = -math.inf  # the last look that found it stopped
        self.for_s = 0.0  # how long all looks have found it stopped

    def look(self, stopped: bool, now: float) -> bool:
        """Whether it is lost. A late check counts as two regular ones at most, since it may have run between two checks."""
        if not stopped:
            self.for_s, self._looked_s = 0.0, -math.inf
            return False
        if self._looked_s > -math.inf:
            self.for_s += min(now - self._looked_s, 2 * self.look_s)
        self._looked_s = now
        return self.for_s >= self._limit_s


class FirstReason:
    """Why it ended: the first cause stands, later ones are its consequences."""

    def __init__(self) -> None:
        self.cause: Cause | None = None

    def settle(self, cause: Cause) -> Cause:
        """The cause that stands: `cause` if it is the first."""
        if self.cause is None:
            self.cause = cause
        return self.cause
