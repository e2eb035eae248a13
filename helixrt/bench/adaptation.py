"""Step times of every policy under slow links, on real ranks whose operations sleep, compared with the exact simulation.

Every rank is a process that runs its part of a schedule by the executor of a job over the channels of a job; its F, B and W
sleep until a deadline, and tensors are tiny. Links are slowed down as `chaos.link` does it, by multiples of an operation, one
or three at once, both ways. Measured: the time from the common beginning of a step to the end of its last operation, with
direct and delegated communication; beside it the exact simulation of the same schedule, and for helix the proven
bound. Policies that plan from costs plan for the delays (`helixrt.schedule.adaptation.stragglers`). How late sleeps end and
what the ranks use of the processors is reported with it: both belong to this machine, not to the schedules.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.bench._sleeping_rank import Measured, Round, main
from helixrt.errors import ConfigError, Fatal
from helixrt.schedule.adaptation.replay import ADAPTIVE
from helixrt.schedule.adaptation.stragglers import COMMS, POLICIES, Place, places
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Schedule
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.simulate import makespan_ms

ANSWER_S = 600.0  # a rank that does not answer for so long has failed
PRELOAD = ["torch", "helixrt.bench._sleeping_rank", "helixrt.transport.auto"]
FACTORS = (0.0, 1.0, 2.0, 4.0, 6.0)
NOISE = 0.02  # of two measured steps that are equal by the simulation
HEALTHY = Place("none", ())


@dataclass(frozen=True)
class Size:
    stages: int
    microbatches: int
    operation_ms: float

    def __str__(self) -> str:
        return f"{self.stages}x{self.microbatches}@{self.operation_ms:g}"

    @staticmethod
    def parse(text: str) -> Size:
        """Raises ConfigError."""
        try:
            shape, _, operation = text.partition("@")
            stages, _, microbatches = shape.partition("x")
            size = Size(int(stages), int(microbatches), float(operation))
        except ValueError:
            size = Size(0, 0, 0.0)
        if size.stages < 4 or size.microbatches < 1 or not size.operation_ms > 0:
            raise ConfigError("--sizes", text, "must be STAGESxMICROBATCHES@MS with at least 4 stages, for example 4x12@10")
        return size


@dataclass(frozen=True)
class Case:
    """One schedule under one set of delays."""

    place: Place
    factor: float
    policy: str
    comm: str
    schedule: Schedule
    costs: Costs
    bound_ms: float


@dataclass(frozen=True)
class Result:
    """`late_ms` and `processors` are over all ranks: how late sleeps ended, and how many cores the ranks kept busy."""

    place: str
    factor: float
    policy: str
    comm: str
    step_ms: float
    steps_ms: list[float]
    simulated_ms: float
    bound_ms: float
    late_ms: Spread
    processors: float

    @property
    def ratio(self) -> float:
        """Measured to simulated."""
        return self.step_ms / self.simulated_ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["4x12@10", "8x32@20"],
        help="pipelines, as STAGESxMICROBATCHES@MS; MS: time of an operation",
    )
    parser.add_argument(
        "--factors", nargs="+", type=float, default=list(FACTORS), help="link delays as multiples of the time of an operation"
    )
    parser.add_argument("--places", nargs="+", default=["first", "middle", "last", "three"], help="which links are slow")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--comms", nargs="+", default=list(COMMS), choices=list(COMMS))
    parser.add_argument("--steps", type=int, default=3, help="steps of each case; the median is reported")
    parser.add_argument("--elements", type=int, default=4, help="float32 values in a message between stages")
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shared_memory"])
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    sizes = [Size.parse(text) for text in args.sizes]
    check_least(args, steps=1, elements=1)
    found: dict[str, list[Result]] = {}
    for size in sizes:
        cases = list(_cases(size, args.places, args.factors, args.policies, args.comms))
        with _ranks(size.stages, args.transport) as ranks:
            warm_up = Round(cases[0].schedule, cases[0].costs, COMMS[cases[0].comm], 1, args.elements)
            _ask(ranks, warm_up)
            found[str(size)] = [_measure(ranks, case, args.steps, args.elements) for case in cases]
        _print(size, found[str(size)])
    _write(args, found)
    return 0


def _cases(
    size: Size, where: Sequence[str], factors: Sequence[float], names: Sequence[str], comms: Sequence[str]
) -> Iterator[Case]:
    """As `straggler_table` has them: helix keeps its order of before where the new one is slower in that communication."""
    costs = uniform(size.stages, size.operation_ms, size.operation_ms, size.operation_ms)
    known = {place.name: place for place in places(size.stages)}
    if unknown := [name for name in where if name not in known]:
        raise ConfigError("--places", unknown[0], f"must be one of {', '.join(known)}")
    fixed = {name: policies.build(name, costs, size.microbatches) for name in names}
    slow = [(known[name], factor) for name, factor in product(where, factors) if factor > 0]
    for place, factor in [(HEALTHY, 0.0)] * (0.0 in factors) + slow:
        ways = [way for i in place.links for way in ((i, i + 1), (i + 1, i))]
        slowed = with_delays(costs, dict.fromkeys(ways, factor * size.operation_ms))
        bound_ms = lower_bound(slowed, size.microbatches)
        for name in names:
            planned = policies.build(name, slowed, size.microbatches) if name in ADAPTIVE and factor > 0 else fixed[name]
            priced = policies.costs_for(name, slowed)
            for comm in comms:
                options = [planned, fixed[name]] if name == "helix" else [planned]
                schedule = min(options, key=lambda one: makespan_ms(one, priced, COMMS[comm]))
                yield Case(place, factor, name, comm, schedule, priced, bound_ms)


@contextmanager
def _ranks(stages: int, transport: str) -> Iterator[list[Connection]]:
    """Processes that have connected to each other; forked off one that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    barrier, beginning = context.Barrier(stages), context.Value("d", 0.0)
    pipes, processes = [], []
    try:
        for stage in range(stages):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(stage, stages, transport, theirs, barrier, beginning), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        addresses = dict(enumerate(_answers(pipes)))
        for pipe in pipes:
            pipe.send(addresses)
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(ANSWER_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _ask(ranks: Sequence[Connection], asked: Round) -> list[Measured]:
    for rank in ranks:
        rank.send(asked)
    return _answers(ranks)


def _answers(ranks: Sequence[Connection]) -> list[Any]:
    """The next answer of each. Raises Fatal for one that ended or does not answer."""
    found = []
    for number, rank in enumerate(ranks):
        try:
            if not rank.poll(ANSWER_S):
                raise Fatal(f"rank {number} said nothing for {ANSWER_S:g} s")
            found.append(rank.recv())
        except (EOFError, OSError) as error:
            raise Fatal(f"rank {number} ended; its error is above") from error
    return found


def _measure(ranks: Sequence[Connection], case: Case, steps: int, elements: int) -> Result:
    answers = _ask(ranks, Round(case.schedule, case.costs, COMMS[case.comm], steps, elements))
    steps_ms = [max(answer.ends_ms[step] for answer in answers) for step in range(steps)]
    return Result(
        case.place.name,
        case.factor,
        case.policy,
        case.comm,
        step_ms=median(steps_ms),
        steps_ms=steps_ms,
        simulated_ms=makespan_ms(case.schedule, case.costs, COMMS[case.comm]),
        bound_ms=case.bound_ms,
        late_ms=Spread.of([late for answer in answers for late in answer.late_ms]),
        processors=sum(answer.processor_s for answer in answers) / max(answer.clock_s for answer in answers),
    )


def _print(size: Size, results: Sequence[Result]) -> None:
    columns = list(dict.fromkeys((r.policy, r.comm) for r in results))
    by_place = {(r.place, r.factor, r.policy, r.comm): r for r in results}
    print(
        f"adaptation: {size.stages} stages, {size.microbatches} micro-batches, operations that sleep {size.operation_ms:g} ms"
    )
    print("  step in ms, measured (and measured / simulated)")
    print(f"  {'slow links':12}{'delay':>6}" + "".join(f"{f'{policy} {comm}':>20}" for policy, comm in columns))
    for place, factor in dict.fromkeys((r.place, r.factor) for r in results):
        row = [by_place[place, factor, policy, comm] for policy, comm in columns]
        figures = "".join(f"{f'{one.step_ms:.0f} ({one.ratio:.3f})':>20}" for one in row)
        print(f"  {place:12}{factor:>5g}x{figures}")
    for line in _summary(results).items():
        print(f"  {line[0]}: {line[1]}")


def _summary(results: Sequence[Result]) -> dict[str, Any]:
    """The figures that are asked for; ratios to the simulation are medians over all cases of one way to communicate."""
    said: dict[str, Any] = {}
    for comm in dict.fromkeys(r.comm for r in results):
        ratios = [r.ratio for r in results if r.comm == comm]
        said[f"measured / simulated, {comm}"] = {"median": round(median(ratios), 4), "worst": round(max(ratios), 4)}
    helix = [r for r in results if (r.policy, r.comm) == ("helix", "delegated")]
    if helix:
        said["helix measured / proven bound, worst"] = round(max(r.step_ms / r.bound_ms for r in helix), 4)
    alone = [r.step_ms for r in helix if r.factor == 0]
    single = [r.step_ms for r in helix if r.factor > 0 and r.place != "three"]
    if alone and single:
        said["helix, one slow link / undisturbed, worst"] = round(max(single) / alone[0], 4)
    fastest = [min(r.step_ms for r in _beside(one, results)) for one in helix]
    if helix:
        near = sum(one.step_ms <= (1 + NOISE) * least for one, least in zip(helix, fastest, strict=True))
        said[f"helix delegated within {NOISE:.0%} of the fastest"] = f"{near} of {len(helix)} cases"
    said["sleeps end late by, ms (p20, p50, p80)"] = [
        round(median(getattr(r.late_ms, part) for r in results), 3) for part in ("p20", "p50", "p80")
    ]
    said["processors used by all ranks"] = round(median(r.processors for r in results), 3)
    return said


def _beside(one: Result, results: Sequence[Result]) -> list[Result]:
    """The results under the same delays."""
    return [r for r in results if (r.place, r.factor) == (one.place, one.factor)]


def _write(args: argparse.Namespace, found: dict[str, list[Result]]) -> None:
    names = ("sizes", "factors", "places", "steps", "elements", "transport")
    settings = {name: getattr(args, name) for name in names}
    cases = {size: [{**asdict(r), "ratio": r.ratio} for r in results] for size, results in found.items()}
    write(args.json, "adaptation", settings, {}, summary={s: _summary(r) for s, r in found.items()}, cases=cases)
