"""Unit times: how long each unit of a captured model takes on this device, for `balanced`.

In: the joint graph of a model. Out: `ChunkTimes` by the unit's first module. Each unit is cut out as a
chunk of its own and runs as a stage runs it (`chunk_timer`), one after the other, in the memory of one layer and of what is
before and after the layers; units with equal graphs run once. What is before or after the layers without parameters runs
with the layer beside it, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from helixrt.passes.alike import structure
from helixrt.passes.chunk_times import ChunkTimes
from helixrt.passes.cut import cut
from helixrt.passes.cut_model import ModelChunk
from helixrt.passes.example_values import Pool
from helixrt.passes.parts import Part
from helixrt.passes.unit_costs import unit_costs
from helixrt.passes.units import units
from helixrt.pipeline.chunk_timer import ChunkTimer
from helixrt.schedule.ir import Op

PASSES, ROUNDS = 3, 4


def times_of(chunks: Sequence[ModelChunk], *, passes: int = PASSES, rounds: int = ROUNDS) -> list[ChunkTimes]:
    """Of each chunk. All are measured by turns, `passes` times `rounds` runs each, so that all have the same noise; those with
    equal graphs are measured once. Raises VerifyError, ValueError as `ChunkTimer`."""
    pool = Pool()
    names = [structure(chunk.part) for chunk in chunks]
    timers = {name: ChunkTimer(chunk, pool) for name, chunk in dict(zip(names, chunks, strict=True)).items()}
    taken: dict[bytes, dict[Op, list[float]]] = {name: {} for name in timers}
    for _ in range(passes):
        for name, timer in timers.items():
            for op, values in timer.run(rounds).items():
                taken[name].setdefault(op, []).extend(values)
    found = {name: ChunkTimes.of(values) for name, values in taken.items()}
    return [found[name] for name in names]


def unit_times(joint: Part, *, passes: int = PASSES, rounds: int = ROUNDS) -> dict[str, ChunkTimes]:
    """For `balanced(measured=...)`. Raises CaptureError for a model that cannot be cut, else as `times_of`."""
    found = units(joint)
    trained = [bool(cost.lasting_bytes) for cost in unit_costs(joint, found)]
    starts = [unit for unit in range(1, found.count) if trained[unit] and (unit > 1 or trained[0])]
    measured = times_of(cut(joint, starts).chunks, passes=passes, rounds=rounds)
    times = dict.fromkeys(found.names, ChunkTimes.sum(()))
    for unit, one in zip((0 if trained[0] else 1, *starts), measured, strict=True):
        times[found.names[unit]] = one
    return times
