"""Clocks of simulated hosts: seconds off, too fast or too slow, and corrected by NTP while they run.

In: true times. Out: what a host takes them for. A correction sets the clock at once (a step), or lets it run faster or slower
for a while (a slew). With temperature a clock's rate changes a little.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

START_S = 1.7e9  # Unix time at which simulations begin
MOST_SLEW = 500e-6  # of NTP
_WANDER, _WANDER_S = 0.2e-6, 120.0  # of a rate, with temperature, and how long it takes to come back


@dataclass(frozen=True)
class Correction:
    """The clock gains `by_s` from `at_s` on, evenly over `over_s` seconds (0: at once)."""

    at_s: float
    by_s: float
    over_s: float = 0.0

    def gained_s(self, at_s: float) -> float:
        if at_s < self.at_s:
            return 0.0
        return self.by_s if at_s >= self.at_s + self.over_s else self.by_s * (at_s - self.at_s) / self.over_s


@dataclass(frozen=True)
class HostClock:
    """`offset_s` ahead at `START_S`, gains `drift` seconds a second."""

    offset_s: float = 0.0
    drift: float = 0.0
    wander: float = 0.0  # share of `_WANDER`
    corrections: tuple[Correction, ...] = ()

    def read(self, at_s: float) -> float:
        """What it shows at a true time."""
        since_s = at_s - START_S
        turns = since_s * 2 * math.pi / _WANDER_S
        wandered_s = self.wander * _WANDER * _WANDER_S / (2 * math.pi) * (1 - math.cos(turns))
        return at_s + self.offset_s + self.drift * since_s + wandered_s + sum([c.gained_s(at_s) for c in self.corrections])


def some_clock(
    draw: random.Random, seconds: float, offsets_s: float = 5.0, drift: float = 100e-6, corrected: bool = True
) -> HostClock:
    """Of every second host, which NTP corrects once in so many seconds, by a slew or a step of up to seconds; of others, which
    it does not."""
    corrections: list[Correction] = []
    if corrected and draw.random() < 0.5:
        at_s = START_S + draw.uniform(0.0, seconds)
        if draw.random() < 0.5:
            corrections.append(Correction(at_s, draw.choice((-1, 1)) * draw.choice((0.002, 0.02, 0.2, 3.0))))
        else:
            over_s = draw.uniform(0.1, 0.5) * seconds
            corrections.append(Correction(at_s, draw.uniform(-MOST_SLEW, MOST_SLEW) * over_s, over_s))
    return HostClock(draw.uniform(-offsets_s, offsets_s), draw.uniform(-drift, drift), draw.uniform(-1, 1), tuple(corrections))
