"""Unit times: how long each unit of a captured model takes on this device, for `balanced`.

In: the joint graph of a model. Out: `ChunkTimes` by the unit's first module. Each unit is cut out as a
chunk of its own and runs as a stage runs it (`chunk_timer`), one after the other, in the memory of one layer and of what is
before and after the layers; units with equal graphs run once. What is before or after the layers without parameters runs
with the layer beside it, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

Taken = dict[bytes, dict[Op, list[float]]]  # microseconds of several runs, by the graph's digest


class Turns:
    """Chunks that are run by turns, by the digests of their graphs, so that all meet the same noise.

    Raises VerifyError, ValueError as `ChunkTimer`.
    """

    def __init__(self, chunks: Mapping[bytes, ModelChunk]) -> None:
        pool = Pool()
        self._timers = {name: ChunkTimer(chunk, pool) for name, chunk in chunks.items()}

    def run(self, rounds: int) -> Taken:
        """`rounds` runs of each."""
        return {name: timer.run(rounds) for name, timer in self._timers.items()}


def united(passes: Sequence[Taken]) -> dict[bytes, ChunkTimes]:
    """The times of each graph by all runs of these passes."""
    found = {}
    for name in passes[0]:
        by_op = {op: [value for one in passes for value in one[name][op]] for op in passes[0][name]}
        found[name] = ChunkTimes.of(by_op)
    return found


def times_of(chunks: Sequence[ModelChunk], *, passes: int = PASSES, rounds: int = ROUNDS) -> list[ChunkTimes]:
    """Of each chunk. All are measured by turns, `passes` times `rounds` runs each, so that all have the same noise; those with
    equal graphs are measured once. Raises VerifyError, ValueError as `ChunkTimer`."""
    names = [structure(chunk.part) for chunk in chunks]
    turns = Turns(dict(zip(names, chunks, strict=True)))
    found = united([turns.run(rounds) for _ in range(passes)])
    return [found[name] for name in names]


def single_units(joint: Part) -> dict[str, ModelChunk]:
    """Each unit as a chunk of its own, by its first module; those without parameters are in the chunk beside them. Raises
    CaptureError for a model that cannot be cut."""
    found = units(joint)
    trained = [bool(cost.lasting_bytes) for cost in unit_costs(joint, found)]
    starts = [unit for unit in range(1, found.count) if trained[unit] and (unit > 1 or trained[0])]
    names = [found.names[unit] for unit in (0 if trained[0] else 1, *starts)]
    return dict(zip(names, cut(joint, starts).chunks, strict=True))


def by_unit(joint: Part, measured: Mapping[str, ChunkTimes]) -> dict[str, ChunkTimes]:
    """For `balanced(measured=...)`, from the times of `single_units`: units that are none of these take nothing."""
    return dict.fromkeys(units(joint).names, ChunkTimes.sum(())) | dict(measured)


def unit_times(joint: Part, *, passes: int = PASSES, rounds: int = ROUNDS) -> dict[str, ChunkTimes]:
    """For `balanced(measured=...)`. Raises CaptureError for a model that cannot be cut, else as `times_of`."""
    single = single_units(joint)
    measured = times_of(list(single.values()), passes=passes, rounds=rounds)
    return by_unit(joint, dict(zip(single, measured, strict=True)))
