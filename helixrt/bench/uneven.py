"""Stages that differ: orders planned from costs measured stage by stage, beside those planned for equal costs, on real ranks.

A GPT with a large vocabulary at four stages: the first has the embedding, the last the head and the loss. F, B and W of
every stage are measured alone. Orders are planned from these times, and for equal costs as a job plans that has not measured;
also 1F1B. Each is simulated under the measured times, and run by ranks that sleep them, behind the executor and the channels
of a job. One chunk per stage, and two: interleaved and folded; without a memory cap, and under 1F1B's. Beside the gains stands
what a step would save per ms of its dearest stage (`schedule.planner.prices`): where one stage bounds the step, no order helps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from statistics import median

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import write
from helixrt.bench._sleeping_rank import Round
from helixrt.bench.adaptation import _ask, _ranks
from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, uniform
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Schedule, folded, interleaved, linear
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.planner.prices import Kind, prices, replanned
from helixrt.schedule.simulate import DELEGATED, makespan_ms
from helixrt.train.config import ModelConfig
from helixrt.train.models.build import check_model

STAGES = 4
PLACEMENTS = {"linear": linear(STAGES), "interleaved": interleaved(STAGES), "folded": folded(STAGES)}
CAPS = {"none": math.inf, "1F1B's": float(STAGES)}  # of a stage, 1 per micro-batch of all its layers
HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """Orders by what they were planned from, and the measured costs of their placement."""

    placement: str
    cap: str
    costs: Costs
    orders: dict[str, Schedule]


@dataclass(frozen=True)
class Result:
    """Times of a step in ms by order; `dearest` is the stage whose time is worth most to the measured order."""

    placement: str
    cap: str
    bound_ms: float
    simulated_ms: dict[str, float]
    measured_ms: dict[str, float]
    steps_ms: dict[str, list[float]]
    dearest: str
    saved_per_ms: float

    def gains(self, times_ms: dict[str, float]) -> dict[str, float]:
        """How many times faster than each other order the one from measured costs is."""
        return {name: ms / times_ms["measured"] for name, ms in times_ms.items() if name != "measured"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--layers", type=int, default=8, help="at least 8: one for each of two chunks per stage")
    parser.add_argument("--dim", type=int, default=768, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--samples", type=int, default=9, help="micro-batches that are measured of each stage")
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), choices=list(PLACEMENTS))
    parser.add_argument("--scale", type=float, default=1.0, help="ranks sleep so many times what was measured")
    parser.add_argument("--steps", type=int, default=5, help="of each order, in turns; the median counts")
    parser.add_argument("--transport", default="auto", choices=["auto", "tcp", "shared_memory"])
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work, before anything is measured."""
    check_least(args, batch=1, seq_len=1, microbatches=1, samples=1, steps=1)
    if not args.scale > 0:
        raise ConfigError("--scale", args.scale, "must be above 0")
    most = max(len(PLACEMENTS[name]) for name in args.placements)
    if args.layers < most:
        raise ConfigError("--layers", args.layers, f"must be at least one per chunk, {most}")
    if args.microbatches % STAGES:
        raise ConfigError("--microbatches", args.microbatches, f"must be a multiple of {STAGES}")
    if args.dim < 1 or args.dim % HEAD_DIM:
        raise ConfigError("--dim", args.dim, f"must be a multiple of {HEAD_DIM}")
    heads = args.dim // HEAD_DIM
    model = ModelConfig(layers=args.layers, dim=args.dim, heads=heads, ffn=4 * args.dim, vocab=args.vocab)
    check_model(model)
    costs = _costs(args, model)
    cases = [case for name in costs for case in _cases(name, costs[name], args.microbatches)]
    with _ranks(STAGES, args.transport) as ranks:
        results = [_measure(ranks, case, args.steps) for case in cases]
    _print(args, costs, results)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "command", "benchmark")}
    measured = {name: {"forward": c.forward, "backward": c.backward, "weight": c.weight} for name, c in costs.items()}
    rows = [{**asdict(r), "predicted": r.gains(r.simulated_ms), "gain": r.gains(r.measured_ms)} for r in results]
    write(args.json, "uneven", settings, {}, measured_ms=measured, cases=rows)
    return 0


def _costs(args: argparse.Namespace, model: ModelConfig) -> dict[str, Costs]:
    """By placement: what each of its chunks takes, measured alone, times the scale. Activations are counted by layers."""
    from helixrt.bench._chunk_times import chunk_times  # brings torch's compiler, which takes seconds

    placements = {name: PLACEMENTS[name] for name in args.placements}
    cuts = sorted({len(placement) for placement in placements.values()})
    times = {chunks: chunk_times(model, chunks, args.batch, args.seq_len, args.samples) for chunks in cuts}
    return {
        name: replace(
            uniform(STAGES).split(placement),
            forward=tuple(args.scale * each.forward_ms for each in times[len(placement)]),
            backward=tuple(args.scale * each.backward_ms for each in times[len(placement)]),
            weight=tuple(args.scale * each.weight_ms for each in times[len(placement)]),
        )
        for name, placement in placements.items()
    }


def _cases(name: str, costs: Costs, microbatches: int) -> Iterator[Case]:
    for cap, most in CAPS.items():
        capped = replace(costs, memory=(most,) * STAGES)
        equal = uniform(STAGES, memory=most).split(costs.placement)
        present = plan(equal, microbatches).schedule
        orders = {"measured": replanned(present, capped, capped).schedule, "equal": present}
        if costs.placement == linear(STAGES):
            orders["1f1b"] = policies.build("1f1b", uniform(STAGES), microbatches)
        yield Case(name, cap, capped, orders)


def _measure(ranks: Sequence[Connection], case: Case, steps: int) -> Result:
    steps_ms: dict[str, list[float]] = {name: [] for name in case.orders}
    for _ in range(steps):
        for name, order in case.orders.items():
            answers = _ask(ranks, Round(order, case.costs, DELEGATED, 1))
            steps_ms[name].append(max(answer.ends_ms[0] for answer in answers))
    order = case.orders["measured"]
    stages = [price for price in prices(order, case.costs) if price.kind is Kind.STAGE]
    dearest = max(stages, key=lambda price: price.per_ms)
    return Result(
        case.placement,
        case.cap,
        bound_ms=lower_bound(case.costs, order.microbatches),
        simulated_ms={name: makespan_ms(order, case.costs) for name, order in case.orders.items()},
        measured_ms={name: median(times) for name, times in steps_ms.items()},
        steps_ms=steps_ms,
        dearest=dearest.place,
        saved_per_ms=dearest.per_ms,
    )


def _print(args: argparse.Namespace, costs: dict[str, Costs], results: Sequence[Result]) -> None:
    print(
        f"uneven: GPT, {args.layers} layers of {args.dim}, vocabulary {args.vocab}, {STAGES} stages, {args.microbatches} x "
        f"{args.batch} x {args.seq_len} tokens; ranks sleep {args.scale:g} times the measured times"
    )
    for name, of in costs.items():
        print(f"  {name}: ms of F, B, W by chunk: {_shown(of.forward)} | {_shown(of.backward)} | {_shown(of.weight)}")
    print(
        f"  {'chunks':12}{'cap':8}{'bound':>8}{'planned from measured costs':>29}{'gain over (predicted)':>34}{'dearest':>17}"
    )
    for each in results:
        mine = f"{each.measured_ms['measured']:.0f} ({each.simulated_ms['measured']:.0f})"
        said = ", ".join(
            f"{name} {gain:.3f} ({predicted:.3f})"
            for (name, gain), predicted in zip(
                each.gains(each.measured_ms).items(), each.gains(each.simulated_ms).values(), strict=True
            )
        )
        dearest = f"{each.dearest}: {each.saved_per_ms:.2g}"
        print(f"  {each.placement:12}{each.cap:8}{each.bound_ms:>8.0f}{mine:>29}  {said:>42}{dearest:>17}")


def _shown(values: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)
