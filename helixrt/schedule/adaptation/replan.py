"""Whether the order that is running tolerates what was just measured, and what to run instead if not.

In: the current schedule, measured costs (times, directed delays, the device's memory caps), and the host's memory
once sends are delegated. Out: a `Replan`: a verdict per link by ADAPTRA's equation (1), a verdict by simulation,
the schedule to run, and what is gained. Sections 4.1, 4.2 and 6 of the paper; two things are taken more strictly:

- Equation (1) tells, link by link, whether a delay is paid once or again and again. What counts in the end
  is the step's time, so the verdict that decides is by simulation: the current order tolerates the measured costs when no
  other order at hand would be faster by more than `least_gain`. A proven bound spares the search when it can.
- The memory rule has two tiers. The device's cap holds always. Once sends are delegated, activations beyond it may wait
  in host memory, up to its capacity, and what copying them costs is part of every time given here (see
  `host_memory`). The planner is given several caps, from the device's alone to both tiers', and the fastest order
  counts, of equally fast ones the one that copies least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.host_memory import HostMemory, host_peak
from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.adaptra import slack, tolerates
from helixrt.schedule.ir import Schedule, linear
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.simulate import DELEGATED, Comm, Delegated, makespan_ms

LEAST_GAIN = 0.01  # what a switch has to bring, as a share of the step, to be worth its disturbance
_SHARES = (1.0, 0.5, 0.25)  # of the host's memory: less of it, less to copy
_SLIVER = 1e-9  # relative rounding of sums


@dataclass(frozen=True, slots=True)
class LinkVerdict:
    """Equation (1) for the link between `stage` and the next: what its slack is, what its delays ask for, times in ms.

    `budget_ms` is what the slack absorbs of delay there and back without cascading bubbles; negative when
    even an idle link would be too slow.
    """

    stage: int
    slack: int
    round_trip_ms: float
    budget_ms: float
    tolerated: bool


@dataclass(frozen=True)
class Replan:
    """What to do under the measured costs. Times in ms per step, copies to the host included.

    `links` is empty for more than one chunk per stage, which equation (1) does not speak of. `schedule` is the current
    one when that is `tolerated`. A current schedule that does not fit memory any more is never tolerated, and its
    `current_ms` is what it would take if it did.
    """

    tolerated: bool
    fits: bool
    links: tuple[LinkVerdict, ...]
    current_ms: float
    schedule: Schedule
    makespan_ms: float
    lower_bound_ms: float
    peak_memory: tuple[float, ...]
    host_peak: tuple[float, ...]

    @property
    def by_equation(self) -> bool:
        """Whether equation (1) holds on every link it speaks of."""
        return all(link.tolerated for link in self.links)

    @property
    def gain_ms(self) -> float:
        """How much less time a step takes than if the current schedule stayed; negative only when that does not fit."""
        return self.current_ms - self.makespan_ms


def link_verdicts(schedule: Schedule, costs: Costs) -> tuple[LinkVerdict, ...]:
    """Equation (1) on every link of a schedule of one chunk per stage; empty for other placements."""
    if schedule.placement != linear(schedule.stages):
        return ()
    slacks = slack(schedule)
    verdicts = []
    for i, holds in enumerate(tolerates(costs, slacks)):
        ways = (costs.link(i, i + 1), costs.link(i + 1, i))
        below_ms, here_ms = (costs.forward[s] + costs.backward[s] for s in (i + 1, i))
        trip_ms = sum(way.delay_ms + way.wire_ms for way in ways)
        verdicts.append(LinkVerdict(i, slacks[i], trip_ms, slacks[i] * below_ms - here_ms, holds))
    return tuple(verdicts)


def replan(
    current: Schedule,
    measured: Costs,
    *,
    comm: Comm = DELEGATED,
    host: HostMemory | None = None,
    known: Sequence[Schedule] = (),
    least_gain: float = LEAST_GAIN,
    effort: float = 1.0,
) -> Replan:
    """Judge `current` under `measured`, and find a better order where it does not tolerate it.

    `known` are schedules at hand of the same placement, such as the one from before a link slowed down; the
    fastest of these and the planned ones is proposed. `least_gain` is the gain below which the current order
    counts as tolerating, relative to its time. `effort` is the planner's.
    Raises ConfigError for costs of another placement, a negative `least_gain`, host memory without delegated
    communication, and caps that no schedule can keep.
    """
    if not least_gain >= 0:
        raise ConfigError("least_gain", least_gain, "must be at least 0")
    if host is not None and not isinstance(comm, Delegated):
        raise ConfigError("host", "given", "activations wait in host memory only when communication is delegated")
    current_fits, current_ms = fits(current, measured, host), makespan_ms(current, measured, comm)
    if current_fits and host is not None:
        current_ms = makespan_ms(current, measured, comm, host)
    # A bound without caps: it holds for both tiers, and for both ways to communicate.
    bound_ms = lower_bound(replace(measured, memory=()), current.microbatches)
    best, best_ms = current, current_ms if current_fits else math.inf
    if not current_fits or current_ms * (1 - least_gain) > bound_ms * (1 + _SLIVER):
        for other in (*known, *_planned(measured, current.microbatches, host, effort)):
            if not fits(other, measured, host):
                continue
            other_ms = makespan_ms(other, measured, comm, host)
            if other_ms < best_ms * (1 - _SLIVER):
                best, best_ms = other, other_ms
        if math.isinf(best_ms):
            raise ConfigError("host.capacity", list(host.capacity) if host else [], "too small for every order that was found")
    tolerated = current_fits and best_ms >= current_ms * (1 - least_gain)
    if tolerated:
        best, best_ms = current, current_ms
    return Replan(
        tolerated=tolerated,
        fits=current_fits,
        links=link_verdicts(current, measured),
        current_ms=current_ms,
        schedule=best,
        makespan_ms=best_ms,
        lower_bound_ms=bound_ms,
        peak_memory=peak_memory(best, measured),
        host_peak=host_peak(best, measured, host) if host is not None else (0.0,) * best.stages,
    )


def fits(schedule: Schedule, costs: Costs, host: HostMemory | None = None) -> bool:
    """Whether the schedule keeps the caps: the device's alone, or with what the host can take."""
    if host is None:
        held, caps = peak_memory(schedule, costs), costs.memory
    else:
        held, caps = host_peak(schedule, costs, host), host.capacity
    return all(most <= cap * (1 + _SLIVER) + _SLIVER for most, cap in zip(held, caps, strict=True))


def _planned(costs: Costs, microbatches: int, host: HostMemory | None, effort: float) -> Iterator[Schedule]:
    """The planner's orders, from those that need no host memory to those that use all of it."""
    yield plan(costs, microbatches, effort=effort).schedule
    if host is None:
        return
    for share in reversed(_SHARES):
        both = tuple(device + share * more for device, more in zip(costs.memory, host.capacity, strict=True))
        yield plan(replace(costs, memory=both), microbatches, effort=effort).schedule
