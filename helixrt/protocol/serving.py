"""How much processor time a donor may spend on serving state, from what its machine leaves idle.

In: samples of a machine's idle processors, taken while state is served. Out: a limit in cores. A donor whose machine is idle
serves at full speed; one whose processors are all busy keeps to a small share of them, which bounds how much its training
slows. (FT-HSDP, section 4.3, has donors train on while they serve.)

Training comes in bursts: processors that are idle now may be needed in the next moment. So the limit is the least that
was spare in any of the last samples, and one in which no processor was idle, or training waited for one, halves it. A burst
after a calm of a whole window is so delayed by less than two intervals, which is 4% of the window; bursts that come more
often leave serving its share.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeRules:
    """`share` and `reserve` are fractions of the processors that the process may use.

    Where training itself gets a processor only for a part of the time, the share is of that part (a quarter at least).
    """

    share: float = 0.02  # that serving may always have
    reserve: float = 0.1  # that serving leaves idle
    interval_s: float = 0.1  # between two samples
    window: int = 50  # samples that count
    delay: float = 0.02  # fraction of an interval that training may wait for a processor


@dataclass(frozen=True)
class Sample:
    """Of one interval: idle cores, and cores that serving used; fraction of it in which the training of this process
    waited for a processor."""

    idle: float
    served: float
    delayed: float = 0.0


class ServeLimit:
    """The limit of one donor with `cores` processors. `limit` is in cores.

    Without a full window of samples it is the share: nothing is known about the bursts of the training yet.
    """

    def __init__(self, cores: float, rules: ServeRules | None = None) -> None:
        self.rules = rules or ServeRules()
        self.cores = cores
        self._spare: tuple[float, ...] = ()
        self._delayed = 0.0  # of the newest sample

    @property
    def limit(self) -> float:
        least = self.rules.share * self.cores * max(0.25, 1.0 - self._delayed)
        if len(self._spare) < self.rules.window:
            return least
        return min(self.cores, max(least, min(self._spare) - self.rules.reserve * self.cores))

    def add(self, sample: Sample) -> None:
        """Count one more interval."""
        crowded = sample.idle < self.rules.reserve * self.cores / 2 or sample.delayed > self.rules.delay
        # On a crowded machine serving takes processor time from others. How much is unknown, so the limit is halved.
        spare = sample.served / 2 if crowded else sample.idle + sample.served
        self._delayed = sample.delayed
        self._spare = (*self._spare, spare)[-self.rules.window :]

    def forget(self) -> None:
        """Drop all samples; for use after a pause in serving."""
        self._spare, self._delayed = (), 0.0
