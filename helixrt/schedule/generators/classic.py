"""The fixed orders whose backward is one piece: GPipe, 1F1B and interleaved 1F1B.

In: numbers of stages and micro-batches. Out: a `Schedule`, the same whatever the costs. The whole backward is one
operation BW, whose gradient leaves at its end; orders that move W are in `zero_bubble` and `v_shaped`. Any number
of micro-batches from 1 on is served: with too few to fill the pipeline it only stands idle for longer.
`policies` lists every schedule by name.
"""

from __future__ import annotations

from collections.abc import Iterable

from helixrt.errors import ConfigError
from helixrt.schedule import ir
from helixrt.schedule.costs import uniform
from helixrt.schedule.generators.stage_order import StageOrder
from helixrt.schedule.ir import Entry, Op, Operation, Schedule


def check_sizes(stages: int, microbatches: int) -> None:
    """Raise ConfigError unless there is at least one of each."""
    if stages < 1:
        raise ConfigError("stages", stages, "must be at least 1")
    if microbatches < 1:
        raise ConfigError("microbatches", microbatches, "must be at least 1")


def schedule_of(name: str, microbatches: int, placement: tuple[int, ...], orders: Iterable[Iterable[Entry]]) -> Schedule:
    """The schedule of these orders, one per stage."""
    entries = tuple(tuple(order) for order in orders)
    return Schedule(name, len(entries), microbatches, placement, entries)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe). Every stage holds all micro-batches' activations."""
    check_sizes(stages, microbatches)
    orders = [[Operation(op, s, m) for op in (Op.F, Op.BW) for m in range(microbatches)] for s in range(stages)]
    return schedule_of("gpipe", microbatches, ir.linear(stages), orders)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: stage i runs stages - i forwards ahead, then one backward for one forward (PipeDream-flush).

    Stage i holds the activations of at most stages - i micro-batches.
    """
    check_sizes(stages, microbatches)
    orders = []
    for stage in range(stages):
        order = StageOrder(microbatches)
        for _ in range(stages - stage):
            order.add(Op.F, stage)
        for _ in range(microbatches):
            order.add(Op.BW, stage)
            order.add(Op.F, stage)
        orders.append(order.entries)
    return schedule_of("1f1b", microbatches, ir.linear(stages), orders)


def interleaved(stages: int, microbatches: int, rounds: int = 2) -> Schedule:
    """Interleaved 1F1B over `rounds` chunks per stage (Narayanan et al. 2021, Megatron-LM), interleaved placement.

    A stage goes through its chunks in turn, `stages` micro-batches at a time. Stage i runs
    (rounds - 1) * stages + 2 * (stages - 1 - i) forwards ahead, then one forward for one backward. Micro-batches that
    do not fill the last turn are served by the order for the next multiple of `stages`, its surplus left out.
    """
    check_sizes(stages, microbatches)
    if rounds < 1:
        raise ConfigError("rounds", rounds, "must be at least 1")
    total = -(-microbatches // stages) * stages * rounds
    orders = []
    for stage in range(stages):
        order = StageOrder(microbatches)
        ahead = min((rounds - 1) * stages + 2 * (stages - 1 - stage), total)
        for step in range(total + ahead):
            if step < total:
                order.add(Op.F, step // stages % rounds * stages + stage)
            if step >= ahead:
                order.add(Op.BW, (rounds - 1 - (step - ahead) // stages % rounds) * stages + stage)
        orders.append(order.entries)
    return schedule_of("interleaved", microbatches, ir.interleaved(stages, rounds), orders)


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of the policy called `name`; one that plans by costs takes them all equal, without delays.

    Raises ConfigError, by the keys of a training run, for an unknown name or numbers below 1.
    """
    from helixrt.schedule.generators.policies import POLICIES  # above this module: it lists these generators among others

    if name not in POLICIES:
        raise ConfigError("schedule.name", name, f"must be one of {', '.join(POLICIES)}")
    if stages < 1:
        raise ConfigError("mesh.pp", stages, "must be at least 1")
    if microbatches < 1:
        raise ConfigError("schedule.microbatches", microbatches, "must be at least 1")
    placement = POLICIES[name].placement(stages)
    return POLICIES[name].schedule(uniform(stages).split(placement), microbatches)
