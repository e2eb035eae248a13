"""The first order of a captured model's pipeline: by the options of `helixrt.compile`, and by measured times of its chunks.

In: the options, the number of stages, the times of the chunks where they were measured. Out: a `Schedule`; the chunks of the
model are cut for it, and a `Planned` order runs the same chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from helixrt.compile.options import Options
from helixrt.engines.staged import check_adaptation, scheduled
from helixrt.errors import ConfigError
from helixrt.passes.chunk_times import ChunkTimes, costs_of
from helixrt.schedule.exchange.as_json import order_key
from helixrt.schedule.generators.policies import BY_COSTS, build
from helixrt.schedule.ir import Pair, Schedule
from helixrt.schedule.simulate import makespan_ms


def weaves(schedule: Schedule) -> bool:
    """Whether it runs a forward and a backward as one."""
    return any(isinstance(entry, Pair) for line in schedule.entries for entry in line)


def pipeline_schedule(options: Options, stages: int) -> Schedule:
    """The schedule that the options of `helixrt.compile` ask for. Raises ConfigError for what a pipeline does not have."""
    if options.codegen != "eager":
        raise ConfigError("codegen", options.codegen, "a pipeline runs operators one by one so far: codegen='eager'")
    if not options.strict:
        raise ConfigError("strict", False, "there is no plain loop for a pipeline: a model is captured, or it is an error")
    name = "1f1b" if options.schedule == "auto" else options.schedule
    schedule = scheduled(name, stages, options.microbatches, options.costs)
    check_adaptation(options.adapt, schedule)
    if options.strands == 1 and weaves(schedule):
        raise ConfigError("strands", 1, f"cannot be with schedule {schedule.name}, which weaves a forward with a backward")
    if options.cuts is not None and len(options.cuts) + 1 != schedule.chunks:
        rule = f"must name {schedule.chunks - 1} modules: {schedule.name} over mesh.pp={stages} has {schedule.chunks} chunks"
        raise ConfigError("cuts", list(options.cuts), rule)
    return schedule


@dataclass(frozen=True)
class Planned:
    """A first order that was planned from measured times of the chunks. By them a step takes `makespan_ms`, and all stages
    together hold the activations of at most `held` micro-batches; `equal_*` is the same for the order for equal times."""

    schedule: Schedule
    makespan_ms: float
    held: int
    equal_ms: float
    equal_held: int

    @staticmethod
    def of(name: str, times: Sequence[ChunkTimes], equal: Schedule) -> Planned:
        """By the policy of this name, which is given the memory that its order for equal times needs (zb does not ask)."""
        costs = costs_of(times, equal)
        held = [0.0] * equal.stages
        for chunk, most in enumerate(equal.in_flight):
            held[equal.placement[chunk]] += most
        made = build(name, replace(costs, memory=tuple(held)), equal.microbatches)
        takes_ms, equal_ms = makespan_ms(made, costs_of(times, made)), makespan_ms(equal, costs)
        return Planned(made, takes_ms, sum(made.in_flight), equal_ms, sum(equal.in_flight))


def planned_by(times: Sequence[ChunkTimes] | None, options: Options, equal: Schedule) -> Planned | None:
    """None where no times were measured, the options name other costs, or the policy does not plan by costs; and where its
    order for equal times is faster, holds fewer micro-batches on a stage, or is the one that was planned."""
    if times is None or options.costs or not isinstance(options.schedule, str) or options.schedule not in BY_COSTS:
        return None
    planned = Planned.of(options.schedule, times, equal)
    same = order_key(planned.schedule) == order_key(equal)
    more = any(now > before for now, before in zip(planned.schedule.in_flight, equal.in_flight, strict=True))
    return None if same or more or planned.makespan_ms > planned.equal_ms else planned
