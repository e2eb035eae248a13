"""ADAPTRA's planner as published: the baseline that helix's own is measured against.

Sections 4.1 and 4.2 of the paper: slackness (Lemma 1), the delay it absorbs (equation 1), initial warm-ups
(Algorithm 1), warm-ups adapted to measured delays (Algorithm 2); the schedule is built from them by `orchestrate`
(Algorithms 3 and 4). In: costs of one chunk per stage and a number of micro-batches. Out: warm-up counts, verdicts
per link, a schedule.

Changed, where the paper gives no rule or a plan would be invalid:
- The two ways of a link may differ: equation 1's 2 c becomes the sum of both.
- Algorithm 2 clips a slack to N - 2 S, which turns warm-ups negative when there are few micro-batches: here the clip
  is at least 2, the slack that Algorithm 2 gives every link, and no stage warms up with more than all micro-batches.
- The paper drops the memory cap once it adapts, counting on host memory. Here a cap given in the costs always
  holds: adapted warm-ups that do not fit it are not taken, and Algorithm 1's stay, the most slack there is room for;
  and a forward that does not fit waits for a W. If host memory is available, the cap includes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.orchestrate import capacity, orchestrate
from helixrt.schedule.ir import Schedule

_SLIVER = 1e-9  # relative rounding error of a quotient of times


def slack(schedule: Schedule) -> tuple[int, ...]:
    """Per link i, how many more forwards stage i warms up with than stage i + 1 (Section 4.1's Delta_i).

    For schedules of one chunk per stage. Lemma 1: never negative in a schedule that can run.
    """
    counts = schedule.warmup()
    return tuple(above - below for above, below in pairwise(counts))


def tolerates(costs: Costs, slack: Sequence[int]) -> tuple[bool, ...]:
    """Per link, whether this slack absorbs the link's delays without cascading bubbles (equation 1).

    t_i^F + t_i^B + c_forward + c_backward <= Delta_i (t_{i+1}^F + t_{i+1}^B); `costs` of one chunk per stage.
    """
    return tuple(
        _turn_ms(costs, i) + _round_trip_ms(costs, i) <= delta * _turn_ms(costs, i + 1) * (1 + _SLIVER)
        for i, delta in enumerate(slack)
    )


def initial_warmups(stages: int, most: int) -> tuple[int, ...]:
    """Algorithm 1: warm-ups from `most` on the first stage down to 1 on the last, with slack as even as possible.

    `most` is x_max, the micro-batches that fit the first stage's memory. The first links get what does not divide.
    """
    if stages == 1:
        return (1,)
    even, rest = divmod(most - 1, stages - 1)
    counts = [most]
    for link in range(stages - 1):
        counts.append(counts[-1] - even - (link < rest))
    return tuple(counts)


def adapted_warmups(costs: Costs, microbatches: int) -> tuple[int, ...]:
    """Algorithm 2: from 1 on the last stage upwards, the least slack by equation 1 on every link, at least 2."""
    most = max(microbatches - 2 * costs.stages, 2)
    counts = [1]
    for i in reversed(range(costs.stages - 1)):
        below_ms, to_hide_ms = _turn_ms(costs, i + 1), _turn_ms(costs, i) + _round_trip_ms(costs, i)
        needed = math.ceil(to_hide_ms / below_ms * (1 - _SLIVER)) if to_hide_ms < most * below_ms else most
        counts.append(min(counts[-1] + min(most, max(needed, 2)), microbatches))
    return tuple(reversed(counts))


def adaptra(costs: Costs, microbatches: int, step_ms: float | None = None) -> Schedule:
    """The schedule that ADAPTRA plans for these costs, never above their memory caps.

    Without caps the warm-ups are Algorithm 2's, which asks for no more memory than the delays need. With caps they are
    Algorithm 1's, unless those do not tolerate the delays and Algorithm 2's fit. `step_ms` as in `orchestrate`.
    Raises ConfigError for costs that are not of one chunk per stage, and for a cap below one micro-batch.
    """
    counts = adapted_warmups(costs, microbatches)
    if not all(math.isinf(cap) for cap in costs.memory):
        fitting = capacity(costs, microbatches)
        initial = initial_warmups(costs.stages, fitting[0])
        enough = all(tolerates(costs, [above - below for above, below in pairwise(initial)]))
        if enough or any(count > most for count, most in zip(counts, fitting, strict=True)):
            counts = initial
    return orchestrate("adaptra", costs, microbatches, counts, step_ms)


def _turn_ms(costs: Costs, stage: int) -> float:
    return costs.forward[stage] + costs.backward[stage]


def _round_trip_ms(costs: Costs, i: int) -> float:
    ways = (costs.link(i, i + 1), costs.link(i + 1, i))
    return sum(way.delay_ms + way.wire_ms for way in ways)
