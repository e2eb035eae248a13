"""ADAPTRA's full-pipeline orchestration (Section 4.3, Algorithms 3 and 4): warm-up counts in, a schedule out.

A simulation in time steps lets every idle stage choose what to run: in its warm-up only forwards, afterwards B before
F before W. In: costs of one chunk per stage, micro-batches, the warm-up forwards of every stage, the step's length.
Out: the order in which each stage chose. It is the published heuristic, the base of `zero_bubble.zb` and of
`adaptra`; helix's own planner is elsewhere.

Changed, since the algorithm as printed does not give a schedule: the last stage's F makes its own B available (nothing
ever enqueues it as printed); W becomes available when the stage's own B ends (as printed it comes with the B, and may
precede it); what another stage makes is available when it is done and has travelled (as printed: started and
travelled); and the loop does not end in a step in which everything is under way. Under a memory cap, of which the
algorithm knows only the warm-up counts, a stage starts a forward only if it fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.classic import check_sizes, schedule_of
from helixrt.schedule.ir import Op, Operation, Schedule, linear

STEPS_PER_OPERATION = 30  # the paper's t_o / delta from which its figure 19 shows no further gain
_SLIVER = 1e-9  # of a step: what rounding of sums and quotients may add to a whole number of steps


def capacity(costs: Costs, microbatches: int) -> tuple[int, ...]:
    """Per stage, how many micro-batches fit its memory cap at once, at most all of them.

    A micro-batch counts with the larger of what it holds before and after its B. Raises ConfigError where not
    even one fits, with the smallest cap that would do.
    """
    counts = []
    for stage, cap in enumerate(costs.memory):
        held = max(costs.activation[stage], costs.kept[stage])
        if held > cap * (1 + _SLIVER):
            raise ConfigError(f"memory[{stage}]", cap, f"no forward fits; the smallest that would do is {held:g}")
        counts.append(microbatches if held * microbatches <= cap else math.floor(cap / held * (1 + _SLIVER)))
    return tuple(counts)


def orchestrate(name: str, costs: Costs, microbatches: int, warmups: Sequence[int], step_ms: float | None = None) -> Schedule:
    """The schedule that Algorithm 4 makes from these warm-up forwards, in steps of `step_ms`.

    `warmups[stage]` is clipped to what the stage's cap holds and to the stage before (Lemma 1), so that no stage
    waits for forwards that another may not run. The default step is a 30th of the longest operation. Delays and wire
    times of `costs` count as latency, as in the paper. Steps in which no stage is idle and nothing arrives
    change nothing and are skipped, so the time taken does not grow with a finer step.
    Raises ConfigError for costs that are not of one chunk per stage, and for a cap below one micro-batch.
    """
    stages = costs.stages
    check_sizes(stages, microbatches)
    if costs.placement != linear(stages):
        raise ConfigError("costs.placement", costs.placement, "ADAPTRA's algorithms plan one chunk per stage")
    if len(warmups) != stages:
        raise ConfigError("warmups", list(warmups), f"must have one value per stage, {stages} in all")
    longest_ms = max(*costs.forward, *costs.backward, *costs.weight)
    if step_ms is None:
        step_ms = longest_ms / STEPS_PER_OPERATION or 1.0
    if not 0 < step_ms < math.inf:
        raise ConfigError("step_ms", step_ms, "must be a number above 0")

    def steps(*times_ms: float) -> int:
        return max(1, math.ceil(sum(times_ms) / step_ms - _SLIVER))

    def travel_ms(source: int, target: int) -> float:
        link = costs.link(source, target)
        return link.wire_ms + link.delay_ms

    last = stages - 1
    f_steps, b_steps, w_steps = ([steps(t) for t in times] for times in (costs.forward, costs.backward, costs.weight))
    f_there = [steps(costs.forward[s], travel_ms(s, s + 1)) for s in range(last)]
    b_there = [0, *(steps(costs.backward[s], travel_ms(s, s - 1)) for s in range(1, stages))]
    counted = [max(a, k) for a, k in zip(costs.activation, costs.kept, strict=True)]
    fits = capacity(costs, microbatches)
    quota = [min(count, min(fits[: stage + 1]), min(warmups[: stage + 1])) for stage, count in enumerate(warmups)]

    # Every kind of operation meets its micro-batches in order, so a queue is the list of the steps of their arrivals.
    f_ready: list[list[int]] = [[0] * microbatches, *([] for _ in range(last))]
    b_ready: list[list[int]] = [[] for _ in range(stages)]
    f_done, b_done, w_done, free = ([0] * stages for _ in range(4))
    orders: list[list[Operation]] = [[] for _ in range(stages)]

    def select(s: int, now: int) -> Op | None:
        """Algorithm 3, with room for a forward as a condition."""
        f, b, w = f_done[s], b_done[s], w_done[s]
        if f >= quota[s] and b < len(b_ready[s]) and b_ready[s][b] <= now:
            return Op.B
        if f < len(f_ready[s]) and f_ready[s][f] <= now:
            held = (f - b) * counted[s] + (b - w) * costs.kept[s]
            if f < quota[s] or held + counted[s] <= costs.memory[s] * (1 + _SLIVER):
                return Op.F
        return Op.W if f >= quota[s] and w < b else None

    wake = [(0, stage) for stage in range(stages)]
    while wake:
        now, s = heappop(wake)
        if now < free[s] or (op := select(s, now)) is None:
            continue
        if op is Op.F:
            orders[s].append(Operation(op, s, f_done[s]))
            f_done[s] += 1
            free[s] = now + f_steps[s]
            if s == last:
                b_ready[s].append(free[s])
            else:
                f_ready[s + 1].append(now + f_there[s])
                heappush(wake, (now + f_there[s], s + 1))
        elif op is Op.B:
            orders[s].append(Operation(op, s, b_done[s]))
            b_done[s] += 1
            free[s] = now + b_steps[s]
            if s:
                b_ready[s - 1].append(now + b_there[s])
                heappush(wake, (now + b_there[s], s - 1))
        else:
            orders[s].append(Operation(op, s, w_done[s]))
            w_done[s] += 1
            free[s] = now + w_steps[s]
        heappush(wake, (free[s], s))
    return schedule_of(name, microbatches, linear(stages), orders)
