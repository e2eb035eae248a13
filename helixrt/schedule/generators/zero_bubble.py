"""Zero-bubble orders of one chunk per stage: `zb`, ZB-H1 and ZB-H2.

In: numbers of stages and micro-batches, and for `zb` costs. Out: schedules in which W fills the time that 1F1B waits.
ZB-H1 and ZB-H2 are the handcrafted ones of Qi et al. 2023 ("Zero Bubble Pipeline Parallelism", Section 2); `zb` is
the base of ADAPTRA's experiments (Sections 3.1 and 4.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.adaptra import adapted_warmups
from helixrt.schedule.generators.classic import check_sizes, schedule_of
from helixrt.schedule.generators.orchestrate import orchestrate
from helixrt.schedule.generators.stage_order import StageOrder
from helixrt.schedule.ir import Op, Schedule, linear


def handcrafted(name: str, stages: int, microbatches: int, ahead: Callable[[int], int], late: Callable[[int], int]) -> Schedule:
    """Stage i runs ahead(i) forwards, then B, W, F in turn, each W late(i) micro-batches behind its B."""
    check_sizes(stages, microbatches)
    orders = []
    for stage in range(stages):
        order = StageOrder(microbatches)
        for _ in range(ahead(stage)):
            order.add(Op.F, stage)
        for microbatch in range(microbatches + late(stage)):
            order.add(Op.B, stage)
            if microbatch >= late(stage):
                order.add(Op.W, stage)
            order.add(Op.F, stage)
        orders.append(order.entries)
    return schedule_of(name, microbatches, linear(stages), orders)


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B's warm-up, and W of stage i put off by i micro-batches.

    Every stage holds as much as 1F1B's first, `stages` micro-batches from F to W.
    """
    return handcrafted("zb-h1", stages, microbatches, lambda i: stages - i, lambda i: i)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: 2 (stages - i) - 1 forwards ahead on stage i, and its W put off by 2 i micro-batches.

    No bubble with equal costs; every stage holds up to 2 stages - 1 micro-batches from F to W.
    """
    return handcrafted("zb-h2", stages, microbatches, lambda i: 2 * (stages - i) - 1, lambda i: 2 * i)


def zb(costs: Costs, microbatches: int) -> Schedule:
    """ADAPTRA's zero-bubble base: Algorithms 2 to 4 planned without delays and without a memory cap.

    Without delays Algorithm 2 asks for a slack of 2 on equal stages: 2 (S - i) - 1 warm-ups, as ZB-H2 has.
    Raises ConfigError for costs that are not of one chunk per stage.
    """
    undisturbed = replace(costs, links={}, memory=())
    return orchestrate("zb", undisturbed, microbatches, adapted_warmups(undisturbed, microbatches))
