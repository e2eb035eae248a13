"""Schedules of two chunks per stage in folded placement: ZBV, DualPipeV and DHelix's W.

In: numbers of stages and micro-batches. Out: schedules in which stage s holds chunk s, on the way down, and chunk
2 S - 1 - s, on the way back. ZBV follows the handcrafted V schedule of Qi et al. ("Zero Bubble Pipeline Parallelism",
Section 6; the same with its building block in "Pipeline Parallelism with Controllable Memory"), DualPipeV the halved
DualPipe of DeepSeek-V3 (Section 3.2.1), W Section 4.1 and Figure 8 of the DHelix paper. Any number of micro-batches from 1 on
is served; fewer than a pattern needs are the pattern without those that are absent.
"""

from __future__ import annotations

from collections import deque

from helixrt.schedule.generators.classic import check_sizes, schedule_of
from helixrt.schedule.generators.stage_order import StageOrder
from helixrt.schedule.ir import Entry, Op, Schedule, folded

F, B, W, BW = Op.F, Op.B, Op.W, Op.BW


def zbv(stages: int, microbatches: int) -> Schedule:
    """ZBV: no bubble with equal costs, at the activation memory of 1F1B's first stage on every stage.

    Made for at least 2 stages - 1 micro-batches.
    """
    check_sizes(stages, microbatches)
    planned = max(microbatches, 2 * stages - 1)
    return schedule_of("zbv", microbatches, folded(stages), (_zbv(s, stages, microbatches, planned) for s in range(stages)))


def _zbv(stage: int, stages: int, microbatches: int, planned: int) -> tuple[Entry, ...]:
    order = StageOrder(microbatches)
    down, back = stage, 2 * stages - 1 - stage

    def add(*turn: tuple[Op, int]) -> None:
        for op, chunk in turn:
            order.add(op, chunk)

    for _ in range(2 * (stages - stage) - 1):
        add((F, down))
    for _ in range(stage):
        add((F, back), (F, down))
    for _ in range(stages - stage):
        add((F, back), (B, back), (W, back))
    while order.count(F, back) < planned:
        if order.count(F, down) < planned:
            add((F, down))
        add((B, down), (W, down), (F, back), (B, back), (W, back))
    # Backwards hurry up the pipeline first, weights fill what time is left.
    for _ in range(stage):
        add((B, down), (B, back))
    for _ in range(stages - stage):
        add((B, down), (W, down))
    for chunk in (back, down):
        while order.count(W, chunk) < planned:
            add((W, chunk))
    return order.entries


def dualpipev(stages: int, microbatches: int) -> Schedule:
    """DualPipeV: forward and backward of the two chunks overlap in pairs, zero-bubble B and W at both ends.

    Made for at least 2 stages micro-batches.
    """
    check_sizes(stages, microbatches)
    planned = max(microbatches, 2 * stages)
    orders = (_dualpipev(s, stages, microbatches, planned) for s in range(stages))
    return schedule_of("dualpipev", microbatches, folded(stages), orders)


def _dualpipev(stage: int, stages: int, microbatches: int, planned: int) -> tuple[Entry, ...]:
    order = StageOrder(microbatches)
    down, back = stage, 2 * stages - 1 - stage
    below = stages - 1 - stage  # stages further down
    owed: deque[int] = deque()  # chunks of the B whose W is still to come

    def add_backward(chunk: int, whole: bool) -> None:
        order.add(BW if whole else B, chunk)
        if not whole:
            owed.append(chunk)

    def add_weight() -> None:
        if owed:
            order.add(W, owed.popleft())

    for _ in range(2 * below):
        order.add(F, down)
    for _ in range(stage + 1):
        order.add(F, down)
        order.add(F, back)
    for _ in range(below):
        add_backward(back, whole=False)
        add_weight()
        order.add(F, back)
    for turn in range(planned - 2 * stages + stage + 1):
        if turn == 0 and below == 0:  # the first gradient is made here: overlapping it would hold up everyone
            order.add(F, down)
            order.add(BW, back)
        else:
            order.add_pair(down, back)
        order.add_pair(back, down)
    for _ in range(below):
        order.add(BW, back)
        order.add_pair(back, down)
    # Of the last backwards, one per chunk and turn, the later half leaves its W for the end.
    whole = stage + 1
    for nth, chunk in enumerate((back, down) * (stage + 1)):
        add_backward(chunk, whole=nth < whole)
    for _ in range(below):
        add_weight()
        add_backward(down, whole=False)
    while owed:
        add_weight()
    return order.entries


def w(stages: int, microbatches: int) -> Schedule:
    """DHelix's W: two strands go down the stages and back together, the forward of one with the backward of the other.

    Micro-batches come in groups of `stages`, the strands alpha and beta in turn. The first group goes alone (warm-up);
    from then on the forward of micro-batch m is paired, in every chunk, with the backward of micro-batch m - stages
    (steady phase); the last group's backwards go alone (cool-down). One such packet enters every two slots of time, so
    that the ways down and back of successive packets take turns on every stage, and none waits. With
    no more micro-batches than stages nothing is paired.
    """
    check_sizes(stages, microbatches)
    orders = []
    for stage in range(stages):
        order = StageOrder(microbatches)
        down, back = stage, 2 * stages - 1 - stage
        packets = range(microbatches + stages)
        visits = [(2 * packet + hop, packet, hop) for packet in packets for hop in (down, back)]
        for _, packet, hop in sorted(visits):
            first, last = packet < stages, packet >= microbatches
            if not first and not last:
                order.add_pair(hop, 2 * stages - 1 - hop)
            elif not last:
                order.add(F, hop)
            elif not first:
                order.add(BW, 2 * stages - 1 - hop)
        orders.append(order.entries)
    return schedule_of("w", microbatches, folded(stages), orders)
