"""Distance of the helix planner's schedules from the optimum, and its time, compared with ADAPTRA's algorithm and CP-SAT.

Random instances (`helixrt.schedule.planner.instances`), one chunk per stage: helix's makespan above the best bound known,
its own or, where that does not prove it optimal, the one that CP-SAT proves when it starts from helix's schedule (what
`helixrt schedule --exact` does). Beside it ADAPTRA's algorithm as published, under the same caps, and CP-SAT from
scratch. Every published schedule that fits the caps is compared with helix in the same placement; one that is faster is
a loss and makes the exit code 1. Then eight stages with one slow link, whose optima are known, and large
instances. Planning times are processor time of one core, CP-SAT's are by the clock, with one worker.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import write
from helixrt.errors import ConfigError
from helixrt.schedule.costs import Costs, Link, uniform, with_delays
from helixrt.schedule.generators.policies import POLICIES
from helixrt.schedule.ir import Schedule, folded, interleaved, linear
from helixrt.schedule.memory import peak_memory
from helixrt.schedule.planner.instances import random_instance
from helixrt.schedule.planner.optimum import optimum
from helixrt.schedule.planner.plan import Plan, plan
from helixrt.schedule.simulate import makespan_ms

TOLERANCE = 1e-9  # relative; makespans are sums of floats
PLACEMENTS = {"linear": linear, "folded": folded, "interleaved": interleaved}
CAPS = {"no cap": math.inf, "1.5 x 1F1B": 1.5, "1 x 1F1B": 1.0}


@dataclass(frozen=True)
class Settings:
    instances: int
    first_seed: int
    exact_limit_s: float
    from_scratch: int
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Exact:
    """What CP-SAT makes of an instance."""

    makespan_ms: float
    bound_ms: float
    solve_ms: float
    proven: bool


@dataclass(frozen=True)
class Compared:
    """A published schedule that fits the caps of an instance, and helix in the same placement."""

    policy: str
    makespan_ms: float
    helix_ms: float
    solve_ms: float

    @property
    def outcome(self) -> str:
        """Of helix: win, tie or loss."""
        if abs(self.helix_ms - self.makespan_ms) <= TOLERANCE * self.makespan_ms:
            return "tie"
        return "win" if self.helix_ms < self.makespan_ms else "loss"


@dataclass(frozen=True)
class Measured:
    """One instance. `exact` starts from helix's schedule, where its own bound leaves a gap; `scratch` from nothing."""

    seed: int
    helix: dict[str, Plan]  # by placement
    exact: Exact | None
    scratch: Exact | None
    compared: list[Compared] = field(default_factory=list)

    @property
    def bound_ms(self) -> float:
        """The best bound known for one chunk per stage."""
        known = [self.helix["linear"].lower_bound_ms, *(e.bound_ms for e in (self.exact, self.scratch) if e)]
        return min(max(known), self.helix["linear"].makespan_ms)

    def gap(self, found_ms: float) -> float:
        return found_ms / self.bound_ms - 1.0


def measure(seed: int, settings: Settings) -> Measured:
    """Plan, compare and solve the instance of a seed."""
    costs, microbatches = random_instance(seed)
    plans, compared = {}, []
    for name, place in PLACEMENTS.items():
        placement = place(costs.stages)
        placed = costs if placement == costs.placement else costs.split(placement)
        plans[name] = plan(placed, microbatches, clock=time.process_time)
        compared += list(_published(placed, microbatches, plans[name].makespan_ms))
    own = plans["linear"]
    exact = scratch = None
    if settings.exact_limit_s and own.gap > TOLERANCE:
        exact = _solve(costs, microbatches, settings.exact_limit_s, own.schedule)
    if settings.exact_limit_s and seed - settings.first_seed < settings.from_scratch:
        scratch = _solve(costs, microbatches, settings.exact_limit_s, None)
    return Measured(seed, plans, exact, scratch, compared)


def _published(costs: Costs, microbatches: int, helix_ms: float) -> Sequence[Compared]:
    found = []
    for name, policy in POLICIES.items():
        if name == "helix" or policy.placement(costs.stages) != costs.placement:
            continue
        begun = time.process_time()
        try:
            schedule = policy.schedule(costs, microbatches)
        except ConfigError:  # not for these numbers of stages and micro-batches, or not within this cap
            continue
        solve_ms = (time.process_time() - begun) * 1e3
        peaks = zip(peak_memory(schedule, costs), costs.memory, strict=True)
        if all(peak <= cap * (1 + TOLERANCE) for peak, cap in peaks):
            found.append(Compared(name, makespan_ms(schedule, costs), helix_ms, solve_ms))
    return found


def _solve(costs: Costs, microbatches: int, limit_s: float, hint: Schedule | None) -> Exact:
    begun = time.perf_counter()
    found = optimum(costs, microbatches, time_limit_s=limit_s, hint=hint)
    return Exact(found.makespan_ms, found.bound_ms, (time.perf_counter() - begun) * 1e3, found.proven)


@dataclass(frozen=True)
class Known:
    """Eight stages, 32 micro-batches of unit costs, one link in the middle with a delay both ways."""

    cap: float
    delay_ms: float
    helix_ms: float
    helix_solve_ms: float
    exact: Exact | None


def known_optima(settings: Settings) -> list[Known]:
    found = []
    for cap in (math.inf, 12.0, 8.0):
        for delay_ms in (0.0, 1.0, 2.0, 4.0):
            costs = with_delays(uniform(8, memory=cap), {(3, 4): delay_ms, (4, 3): delay_ms})
            made = plan(costs, 32, clock=time.process_time)
            exact = _solve(costs, 32, settings.exact_limit_s, None) if settings.exact_limit_s else None
            found.append(Known(cap, delay_ms, made.makespan_ms, made.solve_ms or 0.0, exact))
    return found


@dataclass(frozen=True)
class Large:
    size: str
    cap: str
    spread: str
    gap: float
    solve_ms: float


def large(size: str) -> list[Large]:
    """Near-uniform and fourfold costs, delays on some links, three caps. The gap is to the planner's own bound."""
    stages, microbatches = _size(size)
    found = []
    for spread, (low, high) in {"within 10%": (19, 21), "fourfold": (10, 40)}.items():
        for name, cap in CAPS.items():
            draw = random.Random(stages)
            forward, backward, weight = (tuple(float(draw.randint(low, high)) for _ in range(stages)) for _ in range(3))
            links = {}
            for stage in range(stages - 1):
                if draw.random() < 0.4:
                    links[stage, stage + 1] = links[stage + 1, stage] = Link(float(draw.randint(1, 60)))
            memory = (cap * min(stages, microbatches),) * stages
            costs = Costs(linear(stages), forward, backward, weight, links=links, memory=memory)
            made = plan(costs, microbatches, clock=time.process_time)
            found.append(Large(size, name, spread, made.gap, made.solve_ms or 0.0))
    return found


def _size(text: str) -> tuple[int, int]:
    stages, x, microbatches = text.partition("x")
    if not (x and stages.isdigit() and microbatches.isdigit() and int(stages) and int(microbatches)):
        raise ConfigError("--sizes", text, "must be STAGESxMICROBATCHES, for example 32x128")
    return int(stages), int(microbatches)


def at_share(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything that is printed and written about the random instances."""
    own = [m.helix["linear"] for m in measured]
    adaptra = [(m, c) for m in measured for c in m.compared if c.policy == "adaptra"]
    scratch = [(m, m.scratch) for m in measured if m.scratch]
    solved = [m.exact for m in measured if m.exact]
    spreads: dict[str, Sequence[float]] = {
        "helix_gap": [m.gap(p.makespan_ms) for m, p in zip(measured, own, strict=True)],
        "helix_gap_to_its_own_bound": [p.gap for p in own],
        "helix_exact_gap": [
            m.gap(m.exact.makespan_ms if m.exact else p.makespan_ms) for m, p in zip(measured, own, strict=True)
        ],
        "adaptra_gap": [m.gap(c.makespan_ms) for m, c in adaptra],
        "cp_sat_from_scratch_gap": [m.gap(e.makespan_ms) for m, e in scratch],
        "helix_solve_ms": [p.solve_ms or 0.0 for p in own],
        "adaptra_solve_ms": [c.solve_ms for _, c in adaptra],
        "cp_sat_from_helix_solve_ms": [e.solve_ms for e in solved],
        "cp_sat_from_scratch_solve_ms": [e.solve_ms for _, e in scratch],
    }
    for name in ("folded", "interleaved"):
        spreads[f"helix_{name}_gap_to_its_own_bound"] = [m.helix[name].gap for m in measured]
        spreads[f"helix_{name}_solve_ms"] = [m.helix[name].solve_ms or 0.0 for m in measured]
    against: dict[str, dict[str, Any]] = {}
    for policy in (name for name in POLICIES if name != "helix"):
        rows = [c for m in measured for c in m.compared if c.policy == policy]
        outcomes = [row.outcome for row in rows]
        against[policy] = {"fits": len(rows), **{f"{o}": outcomes.count(o) for o in ("win", "tie", "loss")}}
        if rows:
            against[policy]["median_ratio"] = at_share([row.makespan_ms / row.helix_ms for row in rows], 0.5)
    proven = [m.gap(p.makespan_ms) <= TOLERANCE for m, p in zip(measured, own, strict=True)]
    return {
        "spreads": {
            key: {"median": at_share(v, 0.5), "p95": at_share(v, 0.95), "most": max(v)} for key, v in spreads.items() if v
        },
        "helix_optimal_by_its_own_bound": sum(p.gap <= TOLERANCE for p in own),
        "helix_optimal_proven": sum(proven),
        "exact_optimal_proven": sum(ok or bool(m.exact and m.exact.proven) for ok, m in zip(proven, measured, strict=True)),
        "cp_sat_from_scratch": {
            "runs": len(scratch),
            "proven": sum(e.proven for _, e in scratch),
            "better_than_helix": sum(e.makespan_ms < m.helix["linear"].makespan_ms * (1 - TOLERANCE) for m, e in scratch),
            "worse_than_helix": sum(e.makespan_ms > m.helix["linear"].makespan_ms * (1 + TOLERANCE) for m, e in scratch),
        },
        "against": against,
        "largest_gaps": {
            m.seed: m.gap(m.helix["linear"].makespan_ms)
            for m in sorted(measured, key=lambda m: -m.gap(m.helix["linear"].makespan_ms))[:20]
            if m.gap(m.helix["linear"].makespan_ms) > TOLERANCE
        },
    }


def _print(settings: Settings, figures: dict[str, Any], known: Sequence[Known], larger: Sequence[Large]) -> None:
    last = settings.first_seed + settings.instances - 1
    print(f"schedule: {settings.instances} random instances, seeds {settings.first_seed} to {last}")
    print(f"  {'':44}{'median':>10}{'p95':>10}{'most':>10}")
    for key, spread in figures["spreads"].items():
        factor, unit = (100.0, "%") if "gap" in key else (1.0, "ms")
        cells = "".join(f"{factor * spread[q]:>10.3f}" for q in ("median", "p95", "most"))
        print(f"  {key.removesuffix('_ms').replace('_', ' ') + ', ' + unit:44}{cells}")
    print(
        f"  helix is proven optimal on {figures['helix_optimal_proven']} of {settings.instances}"
        f" ({figures['helix_optimal_by_its_own_bound']} by its own bound);"
        f" with --exact the optimum is proven on {figures['exact_optimal_proven']}"
    )
    scratch = figures["cp_sat_from_scratch"]
    if scratch["runs"]:
        print(
            f"  CP-SAT from scratch, {settings.exact_limit_s:g} s: proven {scratch['proven']} of {scratch['runs']},"
            f" better than helix {scratch['better_than_helix']}, worse {scratch['worse_than_helix']}"
        )
    print(f"  {'helix against':16}{'fits':>8}{'wins':>8}{'ties':>8}{'losses':>8}{'their time / helix':>22}")
    for policy, row in figures["against"].items():
        ratio = f"{row['median_ratio']:.4f}" if "median_ratio" in row else "-"
        print(f"  {policy:16}{row['fits']:>8}{row['win']:>8}{row['tie']:>8}{row['loss']:>8}{ratio:>22}")
    print("8 stages, 32 micro-batches, unit costs, one slow link")
    print(f"  {'cap':>6}{'delay':>7}{'helix':>8}{'ms':>8}{'CP-SAT':>9}{'ms':>8}")
    for one in known:
        exact = f"{'-':>9}{'-':>8}"
        if one.exact:
            note = "" if one.exact.proven else f"  proven only above {one.exact.bound_ms:g}"
            exact = f"{one.exact.makespan_ms:>9g}{one.exact.solve_ms:>8.0f}{note}"
        print(f"  {one.cap:>6g}{one.delay_ms:>7g}{one.helix_ms:>8g}{one.helix_solve_ms:>8.0f}{exact}")
    if larger:
        print(f"large instances\n  {'size':10}{'costs':14}{'cap':14}{'gap to own bound, %':>20}{'ms':>8}")
    for row in larger:
        print(f"  {row.size:10}{row.spread:14}{row.cap:14}{100 * row.gap:>20.3f}{row.solve_ms:>8.0f}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=100, help="random instances")
    parser.add_argument("--first-seed", type=int, default=0, help="the first instance's seed")
    parser.add_argument("--exact-limit", type=float, default=30.0, help="seconds for CP-SAT per instance; 0: do not run it")
    parser.add_argument(
        "--from-scratch", type=int, default=20, help="instances that CP-SAT also solves without a start solution"
    )
    parser.add_argument("--sizes", default="32x128,64x512", help="stages x micro-batches of large instances; empty: none")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0, or 1 if a published schedule that fits was faster than helix.

    Raises ConfigError for settings that cannot work, MissingExtra without OR-tools unless `--exact-limit 0`.
    """
    check_least(args, instances=1, exact_limit=0)
    sizes = tuple(size for size in args.sizes.split(",") if size)
    for size in sizes:
        _size(size)
    settings = Settings(args.instances, args.first_seed, args.exact_limit, args.from_scratch, sizes)
    known = known_optima(settings)
    measured = []
    for seed in range(settings.first_seed, settings.first_seed + settings.instances):
        measured.append(measure(seed, settings))
        if sys.stderr.isatty():
            print(f"\r{len(measured)} of {settings.instances}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    larger = [row for size in settings.sizes for row in large(size)]
    figures = summary(measured)
    _print(settings, figures, known, larger)
    rows = {"known_optima": [_plain(asdict(k)) for k in known], "large": [asdict(row) for row in larger]}
    write(args.json, "schedule", asdict(settings), {}, random_instances=figures, **rows)
    return 1 if any(row["loss"] for row in figures["against"].values()) else 0


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: no cap is null."""
    return {key: None if value == math.inf else value for key, value in row.items()}
