"""Which stages and which links delay a replica, and why.

In: the measured costs of a replica, and how they changed. Out: `Straggler`s with the figures that show it. A stage is one by
what its operations take, a link by what its messages take from sending to arrival; waiting counts for neither, since who waits
is not who is late.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from helixrt.observe.estimates import MeasuredCosts, Way
from helixrt.observe.estimator import Shift
from helixrt.schedule.costs import Costs

SLOW_STAGE = 1.2  # times what the other stages take, or what it took before
SLOW_LINK = 3.0  # times what the other links take
_NOTICEABLE = 0.1  # of an operation: a shorter delay does not count
_BY_ITSELF = 0.5  # of an operation, for a link without others to compare it with


class Cause(StrEnum):
    """What makes a straggler of it."""

    COMPUTE = "compute"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Straggler:
    """`stage` or `way`, whichever is slow. Times in ms: of a stage per micro-batch, of a link per message.

    `since` is the first step of the present value, 0 if it was so from the beginning.
    """

    cause: Cause
    stage: int | None
    way: Way | None
    value_ms: float
    usual_ms: float
    since: int
    why: str

    @property
    def place(self) -> str:
        return f"stage {self.stage}" if self.way is None else f"link {self.way[0]}>{self.way[1]}"


def stragglers(measured: MeasuredCosts, shifts: Sequence[Shift] = ()) -> list[Straggler]:
    """Those of now, stages before links. Empty while times are lacking."""
    if measured.lacking():
        return []
    costs, spread = measured.costs(), measured.spread()
    return [*_stages(measured, costs, spread, shifts), *_links(measured, _operation_ms(costs))]


def _stages(measured: MeasuredCosts, costs: Costs, spread: Costs, shifts: Sequence[Shift]) -> list[Straggler]:
    totals, errors = _per_stage(costs), _per_stage(spread)
    found = []
    for stage, total_ms in enumerate(totals):
        others = [other for at, other in enumerate(totals) if at != stage]
        usual_ms = statistics.median(others) if others else total_ms
        slower_ms, since = _slower_than_before(measured, stage, shifts)
        before_ms = total_ms - slower_ms
        beyond_others = total_ms - errors[stage] > SLOW_STAGE * usual_ms
        beyond_itself = slower_ms > errors[stage] and total_ms > SLOW_STAGE * before_ms
        if not beyond_others and not beyond_itself:
            continue
        reasons = []
        if beyond_others:
            reasons.append(f"its operations take {total_ms / usual_ms:.2f} times as long as the median of the other stages'")
        if beyond_itself:
            reasons.append(f"they take {total_ms / before_ms:.2f} times as long as before step {since}")
        usual_ms = usual_ms if beyond_others else before_ms
        found.append(
            Straggler(Cause.COMPUTE, stage, None, total_ms, usual_ms, since if beyond_itself else 0, "; ".join(reasons))
        )
    return found


def _slower_than_before(measured: MeasuredCosts, stage: int, shifts: Sequence[Shift]) -> tuple[float, int]:
    """By how much the stage's operations became slower with the newest change of each, and since which step."""
    present = measured.since.keys() - measured.outdated()
    newest = {shift.key: shift.change for shift in shifts if shift.what == "op" and shift.key in present}
    mine = [change for key, change in newest.items() if measured.placement[int(key[1])] == stage]
    slower_ms = sum(change.after_ms - change.before_ms for change in mine)
    return (slower_ms, min(change.step for change in mine)) if mine else (0.0, 0)


def _links(measured: MeasuredCosts, operation_ms: float) -> list[Straggler]:
    found = []
    for way, link in sorted(measured.links.items()):
        others = _others(measured, way)
        usual_ms = statistics.median(others) if others else 0.0
        limit_ms = max(SLOW_LINK * usual_ms, (_NOTICEABLE if others else _BY_ITSELF) * operation_ms)
        back = measured.links.get((way[1], way[0]))
        since = measured.since.get(way, 0)
        if link.upper_bound:
            continue
        if link.total_ms - link.delay.uncertainty_ms > limit_ms:
            why = f"a message takes {link.total_ms:.2f} ms, {link.total_ms / operation_ms:.2f} times an operation"
            if link.rate_mbit is not None and link.wire.value_ms > link.delay.value_ms:
                why += f"; it carries {link.rate_mbit:.1f} Mbit/s"
            found.append(Straggler(Cause.LINK, None, way, link.total_ms, usual_ms, since, why))
        elif way[0] < way[1] and back is not None and not back.upper_bound:
            both_ms = link.total_ms + back.total_ms
            if both_ms > 2 * limit_ms and back.total_ms - back.delay.uncertainty_ms <= limit_ms:
                why = (
                    f"messages there and back take {both_ms:.2f} ms; which way is slow is not known, since the offset of the "
                    f"clocks is uncertain by {link.delay.uncertainty_ms:.2f} ms"
                )
                found.append(Straggler(Cause.LINK, None, way, both_ms, 2 * usual_ms, since, why))
    return found


def _others(measured: MeasuredCosts, way: Way) -> list[float]:
    """What messages take on the links between other pairs of stages."""
    return [link.total_ms for other, link in measured.links.items() if set(other) != set(way) and not link.upper_bound]


def _per_stage(costs: Costs) -> list[float]:
    """What a micro-batch takes on each stage."""
    totals = [0.0] * costs.stages
    for chunk, stage in enumerate(costs.placement):
        totals[stage] += costs.forward[chunk] + costs.backward[chunk] + costs.weight[chunk]
    return totals


def _operation_ms(costs: Costs) -> float:
    """An operation of a median stage, on average; above 0."""
    return max(1e-6, statistics.median(_per_stage(costs)) / 3)
