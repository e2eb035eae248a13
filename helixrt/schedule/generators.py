"""Schedules by name: functions from (stages, micro-batches) to the IR.

Linear placement: chunk k on stage k. W stands right after its B, as long as nothing gains from
moving it.
"""

from __future__ import annotations

from collections.abc import Callable

from helixrt.errors import ConfigError
from helixrt.schedule.ir import Op, Operation, Schedule


def _linear(name: str, microbatches: int, entries: list[list[Operation]]) -> Schedule:
    stages = len(entries)
    return Schedule(name, stages, microbatches, tuple(range(stages)), tuple(tuple(e) for e in entries))


def _backward(chunk: int, microbatch: int) -> list[Operation]:
    return [Operation(Op.B, chunk, microbatch), Operation(Op.W, chunk, microbatch)]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Every stage holds the activations of all micro-batches."""
    entries: list[list[Operation]] = []
    for stage in range(stages):
        order = [Operation(Op.F, stage, m) for m in range(microbatches)]
        for m in range(microbatches):
            order += _backward(stage, m)
        entries.append(order)
    return _linear("gpipe", microbatches, entries)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B: stage i runs stages - i forwards ahead, then one backward for one forward (PipeDream-flush).

    Stage i holds the activations of at most stages - i micro-batches.
    Raises ConfigError for fewer micro-batches than stages: the pipeline would never fill.
    """
    if microbatches < stages:
        raise ConfigError("schedule.microbatches", microbatches, f"1f1b needs at least as many as stages (mesh.pp={stages})")
    entries: list[list[Operation]] = []
    for stage in range(stages):
        ahead = stages - stage
        order = [Operation(Op.F, stage, m) for m in range(ahead)]
        for m in range(microbatches):
            order += _backward(stage, m)
            if m + ahead < microbatches:
                order.append(Operation(Op.F, stage, m + ahead))
        entries.append(order)
    return _linear("1f1b", microbatches, entries)


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Forwards alone, for evaluation."""
    entries = [[Operation(Op.F, stage, m) for m in range(microbatches)] for stage in range(stages)]
    return _linear("forward_only", microbatches, entries)


GENERATORS: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule called `name`. Raises ConfigError for an unknown name or numbers it cannot serve."""
    if name not in GENERATORS:
        raise ConfigError("schedule.name", name, f"must be one of {', '.join(sorted(GENERATORS))}")
    if stages < 1:
        raise ConfigError("mesh.pp", stages, "must be at least 1")
    if microbatches < 1:
        raise ConfigError("schedule.microbatches", microbatches, "must be at least 1")
    return GENERATORS[name](stages, microbatches)
