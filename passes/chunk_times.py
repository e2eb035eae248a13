"""Times of a chunk or of a unit by operation, and what a step takes with them under a schedule.

In: milliseconds of F, B, W and BW of one micro-batch. Out: a schedule's `Costs`, and the makespan of every cut of units, whose
chunks take the sum of their units' times; the simulation is exact, without delays between stages. `balanced` moves its cuts by
it: the slowest stage does not tell how long a pipeline takes to fill and to drain.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from helixrt.passes.measure import low_quantile
from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Op, Schedule
from helixrt.schedule.simulate import makespan_ms


@dataclass(frozen=True)
class ChunkTimes:
    """Milliseconds of one micro-batch; `whole_ms` is of BW, the backward in one piece."""

    forward_ms: float
    backward_ms: float
    weight_ms: float
    whole_ms: float

    @property
    def total_ms(self) -> float:
        """F, B and W together."""
        return self.forward_ms + self.backward_ms + self.weight_ms

    @staticmethod
    def of(taken_us: Mapping[Op, Sequence[float]]) -> ChunkTimes:
        """From the times of several runs: a low quantile of each operation's."""
        return ChunkTimes(*(low_quantile(list(taken_us[op])) / 1e3 for op in (Op.F, Op.B, Op.W, Op.BW)))

    @staticmethod
    def sum(several: Sequence[ChunkTimes]) -> ChunkTimes:
        """One after the other."""
        return ChunkTimes(
            sum(one.forward_ms for one in several),
            sum(one.backward_ms for one in several),
            sum(one.weight_ms for one in several),
            sum(one.whole_ms for one in several),
        )


def costs_of(chunks: Sequence[ChunkTimes], schedule: Schedule) -> Costs:
    """W is what BW takes beyond B where the schedule has backwards in one piece."""
    whole = any(operation.op is Op.BW for stage in range(schedule.stages) for operation in schedule.operations(stage))
    weights = [max(0.0, one.whole_ms - one.backward_ms) if whole else one.weight_ms for one in chunks]
    forwards, backwards = [one.forward_ms for one in chunks], [one.backward_ms for one in chunks]
    return Costs(schedule.placement, tuple(forwards), tuple(backwards), tuple(weights))


def makespan_of_cuts(units: Sequence[ChunkTimes], schedule: Schedule) -> Callable[[Sequence[int]], float]:
    """A function from the first units of the later chunks to milliseconds of a step."""

    def made(starts: Sequence[int]) -> float:
        limits = itertools.pairwise((0, *starts, len(units)))
        return makespan_ms(schedule, costs_of([ChunkTimes.sum(units[begin:end]) for begin, end in limits], schedule))

    return made
