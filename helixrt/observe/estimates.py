"""What the operations and links of one replica's pipeline were measured to cost, and how sure that is.

In: `Estimate`s of `observe.estimator`, by operation and chunk and by directed link. Out: `MeasuredCosts`, whose `costs` is the
`Costs` that planners and the simulator take, and whose `spread` is the uncertainty of each of its values. Times in ms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from helixrt.errors import ConfigError
from helixrt.schedule.costs import LARGEST, Costs, Link
from helixrt.schedule.ir import Op, linear

OperationKey = tuple[Op, int]  # operation, chunk
PairKey = tuple[int, Op, int]  # as in `Costs.pair_ms`: forward chunk, B or BW, backward chunk
Way = tuple[int, int]  # from stage, to stage

_OF_MEDIAN = 1.96 * 1.2533  # half of the 95% interval of a median of normal samples, in standard errors of their mean
_LEAST_MS = 1e-9  # a pair's cost must be above 0


def interval_of_median(spread: float, samples: int) -> float:
    """Half of the 95% interval of the median of independent samples with this standard deviation."""
    return _OF_MEDIAN * spread / math.sqrt(max(1, samples))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over a window of steps. `spread_ms` is the robust standard deviation of one sample around it."""

    value_ms: float
    spread_ms: float = 0.0
    samples: int = 0
    systematic_ms: float = 0.0  # of an error that samples share: the offset of two clocks, what differs from step to step
    step: int = 0  # the newest one that was measured

    @property
    def uncertainty_ms(self) -> float:
        """Half of the 95% interval of the value, the shared error added in full."""
        return self.systematic_ms + interval_of_median(self.spread_ms, self.samples)


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One direction between two stages. `delay` and `wire` are as in `Link`.

    `upper_bound`: no message was waited for and none has an arrival stamp, so that each stayed at the receiver for an unknown
    time; the delay is at most `delay`. `offset_ms`: the receiver's clock less the sender's, taken out of `delay`.
    `wire` has no samples where no message ever queued behind another: the rate is then at least what was sent.
    """

    delay: Estimate
    wire: Estimate = Estimate(0.0)
    nbytes: int = 0  # of a message, median
    upper_bound: bool = False
    offset_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """From the send of a message that does not queue to its arrival."""
        return self.delay.value_ms + self.wire.value_ms

    @property
    def rate_mbit(self) -> float | None:
        """None where messages never queued."""
        return self.nbytes * 8e-3 / self.wire.value_ms if self.wire.samples and self.wire.value_ms > 0 else None


@dataclass(frozen=True)
class MeasuredCosts:
    """Of one replica. `placement[chunk]` is the stage that ran the chunk; `step`: the newest one that is in the values.

    A chunk that ran whole backwards has BW and neither B nor W. When the order of the pipeline changes, operations and pairs
    that it runs no more keep their last values, and `Estimate.step` tells how old they are. `since`: the step from which on a
    value is valid, for values that have changed during the run.
    """

    placement: tuple[int, ...]
    microbatches: int
    operations: Mapping[OperationKey, Estimate]
    pairs: Mapping[PairKey, Estimate] = field(default_factory=dict)
    links: Mapping[Way, LinkEstimate] = field(default_factory=dict)
    step: int = 0
    since: Mapping[OperationKey | PairKey | Way, int] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    def outdated(self) -> frozenset[OperationKey | PairKey]:
        """Operations and pairs whose chunk was measured in newer steps than they were: the order of now does not run them."""
        newest: defaultdict[int, int] = defaultdict(int)
        times: list[tuple[OperationKey | PairKey, Estimate]] = [*self.operations.items(), *self.pairs.items()]
        for key, estimate in times:
            for chunk in _chunks(key):
                newest[chunk] = max(newest[chunk], estimate.step)
        return frozenset(key for key, each in times if each.step < max(newest[chunk] for chunk in _chunks(key)))

    def lacking(self) -> str:
        """The first time that was not measured and that `costs` needs, in words; "" if it has all."""
        for chunk in range(len(self.placement)):
            if (Op.F, chunk) not in self.operations:
                return f"F of chunk {chunk}"
            if (Op.BW, chunk) not in self.operations and not {(Op.B, chunk), (Op.W, chunk)} <= set(self.operations):
                return f"the backward of chunk {chunk}"
        return ""

    def costs(self, placement: Sequence[int] | None = None, base: Costs | None = None) -> Costs:
        """The measured values for schedules of `placement` (None: the one that ran).

        `base`, of the same placement as the measurement, gives what was not measured: the other times, memory, activations,
        and how a whole backward divides into B and W (without it: in halves). A whole backward that is newer than B and W
        counts instead of them, and divides as they do; outdated pairs are left out. Links without messages are free. Costs of
        one chunk per stage are split for other placements, and those of several chunks are added up for one chunk per stage.
        Raises ConfigError for a time that neither has, for any other change of placement, and for a `base` of another one.
        """
        return _placed(self._values(base, uncertain=False), placement)

    def spread(self, placement: Sequence[int] | None = None, base: Costs | None = None) -> Costs:
        """As `costs`, with the uncertainty (`Estimate.uncertainty_ms`) in the place of each time; 0 where `base` gave it."""
        return _placed(self._values(base, uncertain=True), placement)

    def _values(self, base: Costs | None, uncertain: bool) -> Costs:
        if base is not None and base.placement != self.placement:
            raise ConfigError("base.placement", list(base.placement), f"must be the one measured, {list(self.placement)}")
        if base is None and (what := self.lacking()):
            raise ConfigError("costs", what, "was not measured; run the schedule for a step, or give costs to start from")

        def number(estimate: Estimate) -> float:
            return min(LARGEST, max(0.0, estimate.uncertainty_ms if uncertain else estimate.value_ms))

        def known(values: Sequence[float]) -> list[float]:
            return [0.0] * len(values) if uncertain else list(values)

        chunks = range(len(self.placement))
        zeros = [0.0] * len(self.placement)
        forward, backward, weight = (
            known(values) for values in ((base.forward, base.backward, base.weight) if base else (zeros, zeros, zeros))
        )
        for chunk in chunks:
            if (found := self.operations.get((Op.F, chunk))) is not None:
                forward[chunk] = number(found)
            first, second, whole = (self.operations.get((op, chunk)) for op in (Op.B, Op.W, Op.BW))
            parts = None if first is None or second is None else (first, second)
            if whole is not None and (parts is None or whole.step > max(part.step for part in parts)):
                share = _share(parts, base, chunk)
                backward[chunk], weight[chunk] = share * number(whole), (1 - share) * number(whole)
            elif parts is not None:
                backward[chunk], weight[chunk] = number(parts[0]), number(parts[1])
        links = {} if base is None or uncertain else dict(base.links)
        links |= {way: Link(number(link.delay), number(link.wire)) for way, link in self.links.items()}
        pair_ms = {} if base is None or uncertain else dict(base.pair_ms)
        pair_ms |= {key: max(_LEAST_MS, number(self.pairs[key])) for key in self.pairs.keys() - self.outdated()}
        start = base or Costs(self.placement, tuple(zeros), tuple(zeros), tuple(zeros))
        return replace(
            start,
            forward=tuple(forward),
            backward=tuple(backward),
            weight=tuple(weight),
            links=links,
            pair_ms=pair_ms,
        )


def _chunks(key: OperationKey | PairKey) -> list[int]:
    return [part for part in key if not isinstance(part, Op)]


def _share(parts: tuple[Estimate, Estimate] | None, base: Costs | None, chunk: int) -> float:
    """B's part of a whole backward: as `parts`, B and W, were measured before, else as in `base`."""
    divided = [(max(0.0, parts[0].value_ms), max(0.0, parts[1].value_ms))] if parts is not None else []
    divided += [(base.backward[chunk], base.weight[chunk])] if base is not None else []
    return next((first / (first + second) for first, second in divided if first + second > 0), 0.5)


def _placed(costs: Costs, placement: Sequence[int] | None) -> Costs:
    """The same model in another placement."""
    if placement is None or tuple(placement) == costs.placement:
        return costs
    if tuple(placement) == linear(costs.stages):
        return _merged(costs)
    return costs.split(placement)


def _merged(costs: Costs) -> Costs:
    """All chunks of a stage as one; of its pairs their mean factor stays."""

    def total(values: Sequence[float]) -> tuple[float, ...]:
        sums = [0.0] * costs.stages
        for stage, value in zip(costs.placement, values, strict=True):
            sums[stage] += value
        return tuple(sums)

    return replace(
        costs,
        placement=linear(costs.stages),
        forward=total(costs.forward),
        backward=total(costs.backward),
        weight=total(costs.weight),
        activation=total(costs.activation),
        kept=total(costs.kept),
        pair_factor=costs.mean_pair_factor,
        pair_ms={},
    )
