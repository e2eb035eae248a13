"""Is the peer alive? Beats on idle connections, and a verdict on silence; and the first reason of an end.

In: when something was heard, and the caller's monotonic time. Out: when to beat, whether the peer counts
as dead. A connection that is closed needs none of this: whoever sees that says so at once.

With period P (1 s unless set):

- Each end says something at least every P/4 (`beat_s`), so a sender whose thread runs late by less than
  1.15 P is still in time. One beat per period would leave it P/2, too little beside two busy cores.
- A peer is declared dead 1.4 P after its last sign of life. The rest of the promised 1.5 P is for our own
  wake-up, which may be 0.1 P late.
- If we ourselves were stalled (0.4 P without a look), the peer gets as long again, P/4 to P, once per
  silence: what it said meanwhile is read first, and what stalled us (the machine, its load) may have
  stalled its beats as well. So a verdict never rests on the first look after a stall of ours.

FT-HSDP section 4.1 leaves detection to the collective's time-out; here no collective is needed.
"""

from __future__ import annotations

import math

from helixrt.errors import Cause

BEAT = 0.25  # of a period: the longest this end stays quiet
SILENCE = 1.4  # periods without a sign of life, then the peer is dead
STALL = 0.4  # of a period without a look: we were stalled
GRACE = (0.25, 1.0)  # of a period, least and most, that a stall of ours adds


class Liveness:
    """What one end knows of one peer's life. Every call's `now` is the same monotonic clock, in seconds."""

    def __init__(self, period_s: float, now: float) -> None:
        assert period_s > 0
        self.period_s, self.beat_s = period_s, BEAT * period_s
        self.heard_s = now  # the last sign of life
        self._looked_s = now
        self._spared_until_s = -math.inf  # end of the grace that this silence got, if it got one

    def heard(self, now: float) -> None:
        self.heard_s, self._spared_until_s = now, -math.inf

    def silent(self, now: float) -> bool:
        """Look: is the peer dead? To be asked at `deadline_s`, and only after all that has arrived was read and `heard`."""
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


class FirstReason:
    """Why it ended: the first cause stands, later ones are its consequences."""

    def __init__(self) -> None:
        self.cause: Cause | None = None

    def settle(self, cause: Cause) -> Cause:
        """The cause that stands: `cause` if it is the first."""
        if self.cause is None:
            self.cause = cause
        return self.cause
