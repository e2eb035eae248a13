"""How near the cut of an unmodified model into stages is to the best of its neighbours, by measured times of each stage.

A transformers model with this vocabulary is captured whole on fake tensors, and cut over the stages where `balanced` says for
a schedule: by estimated times of its units, and by measured ones, as a run measures them at its start by default
(`pipeline.measured_units`; what is on the disk does not count). A neighbour has one boundary moved by one unit. Every stage of
every such cut runs alone in this process, as the graphs of that stage (nothing is added up of units; stages whose graphs are
alike run once), all by turns; the time of one processor thread counts, and of its runs a low quantile. With these times a step
of each cut is simulated exactly, without delays between stages. The ratio is of the chosen cut to the best of its neighbours;
above `--most` the exit code is 1. Cuts by measured times decide about that, if they are among these.

With `--real` two processes then train the model over two stages, cut by estimates, each on a core of its own. The interval of
the step times (forward and backward of all micro-batches) stands beside two simulations: with the times of the two stages
alone, and with the times that the operations took in the run itself, where the stages share memory and caches.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._balance_ranks import SCHEDULE as REAL_SCHEDULE
from helixrt.bench._balance_ranks import STAGES as REAL_STAGES
from helixrt.bench._balance_ranks import real_steps
from helixrt.bench._figures import Spread, write
from helixrt.bench._unmodified import FAMILIES, Shape
from helixrt.compile.whole_model import WholeModel
from helixrt.errors import ConfigError, Fatal
from helixrt.job.heap import keep_freed_memory
from helixrt.passes.chunk_times import ChunkTimes, costs_of
from helixrt.passes.cut import cut
from helixrt.passes.cut_model import ModelChunk
from helixrt.passes.parts import Part
from helixrt.passes.unit_costs import balanced
from helixrt.passes.units import Units, units
from helixrt.pipeline.measured_units import expected, measure_units
from helixrt.pipeline.unit_times import times_of
from helixrt.schedule.costs import Costs
from helixrt.schedule.generators.classic import build
from helixrt.schedule.ir import Op
from helixrt.schedule.simulate import makespan_ms

SCHEDULES = ("1f1b", "zb")
MOST = 1.02
Starts = tuple[int, ...]
Limits = tuple[int, int]  # of a chunk: its first unit, and the unit behind it
Case = tuple[str, int]  # a schedule's name and its micro-batches


@dataclass(frozen=True)
class Settings:
    shapes: tuple[Shape, ...]
    stages: int
    microbatches: tuple[int, ...]
    costs: tuple[str, ...]
    passes: int
    rounds: int
    real_steps: int


@dataclass(frozen=True)
class Choice:
    """A cut that was chosen by some costs for a schedule, and the makespans of it and of its neighbours."""

    by: str
    case: Case
    starts: Starts
    makespans_ms: Mapping[Starts, float]

    @property
    def best(self) -> Starts:
        """Of the neighbours."""
        return min((ms, starts) for starts, ms in self.makespans_ms.items() if starts != self.starts)[1]

    @property
    def ratio(self) -> float:
        """Of the chosen cut to the best of its neighbours."""
        return self.makespans_ms[self.starts] / self.makespans_ms[self.best]


@dataclass(frozen=True)
class Measured:
    """`stages` has the times of each chunk by its first unit and the unit behind it. `units` are those that the cuts by
    measured costs were made with."""

    found: Units
    stages: Mapping[Limits, ChunkTimes]
    choices: Sequence[Choice]
    units: Mapping[str, ChunkTimes]


@dataclass(frozen=True)
class Run:
    """Two stages in two processes. Makespans by 1f1b: with times of the stages alone, and with the medians of the run."""

    units: str
    microbatches: int
    steps_ms: tuple[float, ...]
    alone_ms: float
    busy_ms: float
    operations_ms: tuple[Mapping[str, float], ...]  # by stage: medians of the run


def neighbours(starts: Starts, count: int) -> list[Starts]:
    """Cuts of `count` units with one boundary moved by one; a chunk has at least one unit."""
    limits = (0, *starts, count)
    found = []
    for at, step in itertools.product(range(len(starts)), (-1, 1)):
        if limits[at] < starts[at] + step < limits[at + 2]:
            found.append((*starts[:at], starts[at] + step, *starts[at + 1 :]))
    return found


def makespan(starts: Starts, times: Mapping[Limits, ChunkTimes], count: int, case: Case) -> float:
    """Milliseconds of a step with this cut of `count` units."""
    schedule = build(case[0], len(starts) + 1, case[1])
    return makespan_ms(schedule, costs_of([times[limits] for limits in itertools.pairwise((0, *starts, count))], schedule))


def chunks_of(joint: Part, cuts: Sequence[Starts], count: int) -> dict[Limits, ModelChunk]:
    """All chunks of these cuts, each once."""
    found: dict[Limits, ModelChunk] = {}
    for starts in cuts:
        limits = list(itertools.pairwise((0, *starts, count)))
        if not found.keys() >= set(limits):
            found |= dict(zip(limits, cut(joint, starts).chunks, strict=True))
    return found


def measure(settings: Settings, joint: Part) -> Measured:
    """Raises CaptureError, ConfigError for a model that cannot be cut into so many stages."""
    found = units(joint)
    unit_ms: Mapping[str, ChunkTimes] = {}
    if "measured" in settings.costs:
        unit_ms = unit_times(settings, joint)
    chosen: dict[tuple[str, Case], Starts] = {}
    for by, case in itertools.product(settings.costs, itertools.product(SCHEDULES, settings.microbatches)):
        schedule = build(case[0], settings.stages, case[1])
        chosen[by, case] = balanced(joint, schedule, measured=unit_ms if by == "measured" else None).starts
    cuts = {starts: [starts, *neighbours(starts, found.count)] for starts in chosen.values()}
    times = stage_times(settings, joint, [each for several in cuts.values() for each in several], found.count)
    choices = [
        Choice(by, case, starts, {each: makespan(each, times, found.count, case) for each in cuts[starts]})
        for (by, case), starts in chosen.items()
    ]
    return Measured(found, times, choices, unit_ms)


def unit_times(settings: Settings, joint: Part) -> Mapping[str, ChunkTimes]:
    """As a run measures them at its start. Raises Fatal where it would take estimates instead."""
    with tempfile.TemporaryDirectory() as nothing_known:
        schedule = build(SCHEDULES[0], settings.stages, settings.microbatches[0])
        made = measure_units(joint, expected(joint, schedule), cache=Path(nothing_known))
    if made.times is None:
        raise Fatal(f"a run would balance its stages by estimates now: {made.reason}")
    print(f"balance: the units were measured in {made.seconds:.1f} s")
    return made.times


def stage_times(settings: Settings, joint: Part, cuts: Sequence[Starts], count: int) -> dict[Limits, ChunkTimes]:
    """Of each chunk of these cuts, alone."""
    return stage_times_of(joint, cuts, count, settings.passes, settings.rounds)


def stage_times_of(joint: Part, cuts: Sequence[Starts], count: int, passes: int, rounds: int) -> dict[Limits, ChunkTimes]:
    """Of each chunk of these cuts of `count` units, alone."""
    chunks = chunks_of(joint, cuts, count)
    return dict(zip(chunks, times_of(list(chunks.values()), passes=passes, rounds=rounds), strict=True))


def real(settings: Settings, shape: Shape, joint: Part) -> Run:
    """Train over two stages, after their times alone were measured. Raises Fatal when the ranks have cut elsewhere."""
    count, microbatches = units(joint).count, settings.microbatches[0]
    schedule = build(REAL_SCHEDULE, REAL_STAGES, microbatches)
    starts = balanced(joint, schedule).starts
    alone = makespan(starts, stage_times(settings, joint, [starts], count), count, (REAL_SCHEDULE, microbatches))
    trained = real_steps(shape, microbatches, settings.real_steps)
    if trained.first != units(joint).names[starts[0]]:
        raise Fatal(f"the ranks began the second stage at {trained.first}, and {units(joint).names[starts[0]]} was measured")
    forward, whole = (tuple(stage[op] for stage in trained.busy_ms) for op in (Op.F, Op.BW))
    busy = Costs(schedule.placement, forward, whole, (0.0,) * REAL_STAGES)
    simulated = makespan_ms(schedule, busy)
    return Run(layers(starts, count), microbatches, tuple(trained.steps_ms), alone, simulated, tuple(trained.busy_ms))


def decisive(choices: Sequence[Choice]) -> Sequence[Choice]:
    """The cuts that a run makes by default, if they are among these."""
    return [choice for choice in choices if choice.by == "measured"] or choices


def captured(shape: Shape) -> Part:
    return WholeModel(shape.model(), None, ((), shape.tokens(shape.batch), None)).joint()


def layers(starts: Starts, count: int) -> str:
    """How many units each stage has."""
    return " + ".join(str(end - begin) for begin, end in itertools.pairwise((0, *starts, count)))


def show(settings: Settings, shape: Shape, found: Measured) -> None:
    count = found.found.count
    print(f"balance: {shape}, {settings.stages} stages of {count} units (the layers, what is before and what is after them)")
    print(f"  {'units':>14}{'F ms':>10}{'B ms':>10}{'W ms':>10}{'BW ms':>10}")
    for (begin, end), one in sorted(found.stages.items()):
        cells = (one.forward_ms, one.backward_ms, one.weight_ms, one.whole_ms)
        print(f"  {f'{begin} to {end - 1}':>14}" + "".join(f"{cell:>10.1f}" for cell in cells))
    print("  chosen / best neighbour:")
    for choice in found.choices:
        (name, microbatches), made = choice.case, choice.makespans_ms
        said = f"{layers(choice.starts, count):>16} {made[choice.starts]:6.0f} ms, {made[choice.best]:6.0f} ms with"
        print(f"    {choice.by:9} costs, {name:4}, {microbatches:2} micro-batches: {choice.ratio:.4f}  ({said}", end=" ")
        print(f"{layers(choice.best, count)})")


def plain(found: Measured) -> dict[str, Any]:
    """As JSON."""
    count = found.found.count
    return {
        "units": list(found.found.names),
        "stages_ms": {f"{begin}:{end}": asdict(one) for (begin, end), one in sorted(found.stages.items())},
        "units_ms": {name: asdict(one) for name, one in found.units.items()},
        "cuts": [
            {
                "costs": choice.by,
                "schedule": choice.case[0],
                "microbatches": choice.case[1],
                "starts": choice.starts,
                "units": layers(choice.starts, count),
                "ratio": choice.ratio,
                "makespans_ms": {layers(starts, count): ms for starts, ms in choice.makespans_ms.items()},
            }
            for choice in found.choices
        ],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--costs", nargs="+", default=["estimated", "measured"], choices=("estimated", "measured"))
    parser.add_argument("--passes", type=int, default=3, help="how often all stages are gone through")
    parser.add_argument("--rounds", type=int, default=4, help="runs of a stage each time")
    parser.add_argument("--real", type=int, default=0, metavar="STEPS", help="also train so many steps over two stages")
    parser.add_argument("--most", type=float, default=MOST, help="the largest ratio for exit code 0")
    add_json(parser)


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ConfigError."""
    size = (args.layers, args.dim, args.vocab, args.seq_len, args.batch)
    shapes = tuple(Shape(family, *size) for family in dict.fromkeys(args.family))
    check_least(args, stages=1, passes=1, rounds=1)
    if args.stages > args.layers:
        raise ConfigError("--stages", args.stages, f"must be at most --layers={args.layers}")
    if min(args.microbatches) < args.stages:
        raise ConfigError("--microbatches", min(args.microbatches), f"1f1b needs one per stage, --stages={args.stages}")
    if args.real and args.real < 2:
        raise ConfigError("--real", args.real, "must be 0, or at least 2 steps")
    costs = tuple(dict.fromkeys(args.costs))
    return Settings(shapes, args.stages, tuple(args.microbatches), costs, args.passes, args.rounds, args.real)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0, or 1 if a cut that was chosen is worse than `--most` times a neighbour.

    Raises ConfigError for settings that cannot work, before anything starts.
    """
    settings = settings_of(args)
    torch.set_num_threads(1)
    keep_freed_memory()
    spreads: dict[str, Spread] = {}
    figures: dict[str, Any] = {}
    most = 0.0
    for shape in settings.shapes:
        joint = captured(shape)
        found = measure(settings, joint)
        show(settings, shape, found)
        most = max(most, *(choice.ratio for choice in decisive(found.choices)))
        figures[shape.family] = plain(found)
        if settings.real_steps:
            run = real(settings, shape, joint)
            spread = spreads[f"{shape.family}/real_step_ms"] = Spread.of(run.steps_ms)
            figures[shape.family]["real"] = asdict(run)
            print(f"  {run.units} units in two processes, {run.microbatches} micro-batches, {REAL_SCHEDULE}: {spread} ms;")
            print(f"    simulated {run.alone_ms:.0f} ms by times of each stage alone, {run.busy_ms:.0f} ms by those of the run")
        write(args.json, "balance", asdict(settings), spreads, load=os.getloadavg(), models=figures)
    return int(most > args.most)
