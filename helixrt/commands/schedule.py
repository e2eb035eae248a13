"""`helixrt schedule`: make, check, time, draw and compare schedules.

In: a planning problem (`commands.problem`) and a policy, or an order in a file. Out: on stdout or in a file, the schedule's
timing as text, JSON, SVG or Chrome trace, or its order as torch's CSV; with `compare`, a table of all policies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from helixrt.commands import order_file, output, schedule_check
from helixrt.commands import problem as problems
from helixrt.commands.problem import Problem
from helixrt.errors import ConfigError, MissingExtra
from helixrt.schedule.check import check
from helixrt.schedule.costs import Costs
from helixrt.schedule.exchange import as_json, chrome, svg, text, torch_csv
from helixrt.schedule.exchange.svg import number
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Schedule, ScheduleError, folded
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.simulate import Comm, simulate
from helixrt.schedule.timeline import Timeline

EPILOG = """Times are in ms. --delay I:MS is the link between stages I and I+1, both ways; I>J:MS is one way; both may be
repeated. A schedule is planned under --delay and replayed under --run-delay when that is given. --memory is a cap per
stage in the profile's unit; without a profile a micro-batch holds 1 from F to W. The profile is JSON: {"stages": S,
"microbatches": N, "f": [..], "b": [..], "w": [..], "delay": [[forward, backward], ..], "memory": [..], "activation":
[..]}, lists of length S, delay of length S-1, of which f, b and w are needed."""
FORMATS = ("text", "json", "csv", "svg", "chrome")
_SLIP = 1e-9  # relative; memory is a sum of floats


@dataclass(frozen=True)
class Replay:
    """A schedule that was made under one set of costs and run under another."""

    policy: str
    timeline: Timeline
    lower_bound_ms: float
    solve_ms: float


@dataclass(frozen=True)
class Row:
    """One policy of a comparison; `note`: why there are no figures, or that the schedule does not fit its cap.

    `lower_bound_ms` holds under the caps, so what does not fit may be below it and has no gap.
    """

    policy: str
    makespan_ms: float | None = None
    lower_bound_ms: float | None = None
    gap: float | None = None
    bubble_rate: float | None = None
    peak_memory: tuple[float, ...] | None = None
    fits: bool = False
    solve_ms: float | None = None
    note: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument(
        "action", nargs="?", metavar="compare|check", help="compare: all policies in a table; check: verify an order in a file"
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="for check: torch's CSV, or the JSON that --format json prints")
    problems.add_costs(parser)
    problems.add_replay(parser)
    parser.add_argument("--policy", metavar="P", help=f"{', '.join(policies.POLICIES)} (default helix)")
    parser.add_argument(
        "--order", metavar="FILE", help="check and time this order: torch's CSV, or the JSON that --format json prints"
    )
    parser.add_argument("--chunks", metavar="1|2", help="chunks per stage that helix plans with (default 1)")
    parser.add_argument("--exact", action="store_true", help="continue the search until the optimum is proven (extra 'exact')")
    parser.add_argument("--time-limit", metavar="S", help="seconds that --exact may take (default 30)")
    parser.add_argument(
        "--prices", action="store_true", help="with check: time that a step saves per ms less on a link or a stage"
    )
    output.add_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Returns 0, or 1 for an order that fails its check; raises ConfigError for what they get
    wrong."""
    if args.action == "check":
        return schedule_check.run(args)
    if args.action not in (None, "compare"):
        raise ConfigError("helixrt schedule", args.action, "must be compare or nothing or check FILE, before options")
    for option, given in (("FILE", args.file), ("--prices", args.prices or None)):
        if given is not None:
            raise ConfigError(option, given, "goes with check")
    try:
        written = _compare(args) if args.action else _schedule(args)
    except ScheduleError as error:
        raise ConfigError("--order", args.order, str(error)) from None
    output.put(args, written)
    return 0


def _schedule(args: argparse.Namespace) -> str:
    form, comm = output.chosen_format(args, FORMATS), problems.comm(args.comm)
    replay = _of_order(args, comm) if args.order is not None else _of_policy(args, comm)
    timeline = replay.timeline
    if form == "json":
        return as_json.write(timeline, replay.lower_bound_ms, replay.solve_ms, replay.policy)
    if form == "csv":
        return torch_csv.write(timeline.schedule)
    if form == "svg":
        return svg.write(timeline, replay.lower_bound_ms)
    if form == "chrome":
        return chrome.write(timeline)
    solve_ms = None if args.order is not None else replay.solve_ms
    return text.write(timeline, replay.lower_bound_ms, solve_ms, output.width(), output.colored(args))


def _of_order(args: argparse.Namespace, comm: Comm) -> Replay:
    for option in ("policy", "chunks", "time_limit"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')}", getattr(args, option), "does not go with --order")
    if args.exact:
        raise ConfigError("--exact", True, "does not go with --order")
    path, schedule = Path(args.order), order_file.read("--order", args.order)
    check(schedule)
    costs = order_file.costs(args, schedule)
    timeline = simulate(replace(schedule, name=path.stem), costs, comm)
    _must_fit(path.name, timeline)
    return Replay(path.stem, timeline, order_file.bound_ms(schedule, costs), 0.0)


def _of_policy(args: argparse.Namespace, comm: Comm) -> Replay:
    policy = "helix" if args.policy is None else args.policy
    policies.policy(policy)
    chunks = _chunks(args, policy)
    problem = problems.problem(args)
    if args.exact and policy != "helix":
        raise ConfigError("--exact", policy, "goes with --policy helix")
    if args.time_limit is not None and not args.exact:
        raise ConfigError("--time-limit", args.time_limit, "goes with --exact")
    replay = _replay(policy, problem, comm, chunks, _exact(args) if args.exact else None)
    _must_fit(policy, replay.timeline)
    return replay


Refine = Callable[[Costs, int, Schedule], tuple[Schedule, float]]


def _exact(args: argparse.Namespace) -> Refine:
    """How a plan is searched on: (costs, micro-batches, plan) -> (schedule, proven bound in ms)."""
    limit = "30" if args.time_limit is None else args.time_limit
    try:
        limit_s = float(limit)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < 1e6:
        raise ConfigError("--time-limit", limit, "must be a number of seconds above 0")
    from helixrt.schedule.planner.optimum import optimum  # OR-tools behind it takes its time to load

    def refine(costs: Costs, microbatches: int, plan: Schedule) -> tuple[Schedule, float]:
        found = optimum(costs, microbatches, time_limit_s=limit_s, hint=plan)
        return found.schedule, found.bound_ms

    return refine


def _replay(policy: str, problem: Problem, comm: Comm, chunks: int, refine: Refine | None = None) -> Replay:
    """Plan and run one policy. The plan sees `problem.plan` alone; bound and times are those of `problem.run`."""

    def placed(costs: Costs) -> Costs:
        return costs.split(folded(costs.stages)) if chunks == 2 else policies.costs_for(policy, costs)

    planned, costs = placed(problem.plan), placed(problem.run)
    begun = time.perf_counter()
    bound_ms = 0.0
    if policy == "helix":
        from helixrt.schedule.planner.plan import plan

        schedule = plan(planned, problem.microbatches).schedule
        if refine is not None:
            schedule, bound_ms = refine(planned, problem.microbatches, schedule)
    else:
        schedule = policies.build(policy, planned, problem.microbatches)
    solve_ms = (time.perf_counter() - begun) * 1e3
    check(schedule)
    timeline = simulate(replace(schedule, name=policy), costs, comm)
    least_ms = lower_bound(costs, problem.microbatches)
    return Replay(policy, timeline, max(least_ms, bound_ms) if planned == costs else least_ms, solve_ms)


def _chunks(args: argparse.Namespace, policy: str) -> int:
    if args.chunks not in (None, "1", "2"):
        raise ConfigError("--chunks", args.chunks, "must be 1 or 2")
    if args.chunks is not None and policy != "helix":
        raise ConfigError("--chunks", args.chunks, f"goes with --policy helix; {policy} has its own placement")
    return int(args.chunks or 1)


def _over(timeline: Timeline) -> int | None:
    """The first stage that holds more than its cap."""
    pairs = zip(timeline.peak_memory, timeline.costs.memory, strict=True)
    return next((stage for stage, (peak, cap) in enumerate(pairs) if peak > cap * (1 + _SLIP)), None)


def _must_fit(name: str, timeline: Timeline) -> None:
    stage = _over(timeline)
    if stage is not None:
        cap, peak = timeline.costs.memory[stage], timeline.peak_memory[stage]
        rule = f"{name} needs {number(peak)} on stage {stage}; raise the cap, or take --policy helix, which plans for it"
        raise ConfigError("schedule.memory", number(cap), rule)


def _compare(args: argparse.Namespace) -> str:
    for option in ("policy", "order", "chunks", "time_limit"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')}", getattr(args, option), "does not go with compare")
    form, comm, problem = output.chosen_format(args, ("text", "json")), problems.comm(args.comm), problems.problem(args)
    rows = [_row(policy, policy, problem, comm, 1) for policy in policies.POLICIES]
    rows.append(_row("helix, 2 chunks", "helix", problem, comm, 2))
    if args.exact:
        rows.append(_row("optimum, 1 chunk", "helix", problem, comm, 1, _exact(args)))
    if form == "json":
        return json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    return _table(rows)


def _row(name: str, policy: str, problem: Problem, comm: Comm, chunks: int, refine: Refine | None = None) -> Row:
    try:
        replay = _replay(policy, problem, comm, chunks, refine)
    except MissingExtra:
        raise
    except ConfigError as error:
        return Row(name, note=str(error))
    timeline = replay.timeline
    stage = _over(timeline)
    return Row(
        policy=name,
        makespan_ms=timeline.makespan_ms,
        lower_bound_ms=replay.lower_bound_ms,
        gap=as_json.gap(timeline.makespan_ms, replay.lower_bound_ms) if stage is None else None,
        bubble_rate=timeline.bubble_rate,
        peak_memory=timeline.peak_memory,
        fits=stage is None,
        solve_ms=replay.solve_ms,
        note="" if stage is None else f"stage {stage} may hold {number(timeline.costs.memory[stage])}",
    )


def _table(rows: list[Row]) -> str:
    head = ("policy", "makespan ms", "bound ms", "gap", "idle", "peak memory", "fits", "planned in ms", "")
    body = [head]
    for row in rows:
        peak = max(row.peak_memory) if row.peak_memory is not None else None
        body.append(
            (
                row.policy,
                _shown(row.makespan_ms, number),
                _shown(row.lower_bound_ms, number),
                _shown(row.gap, "{:.2%}".format),
                _shown(row.bubble_rate, "{:.1%}".format),
                _shown(peak, number),
                "yes" if row.fits else "no",
                _shown(row.solve_ms, "{:.1f}".format),
                row.note,
            )
        )
    figures = output.table([line[:-1] for line in body])
    return "\n".join(f"{line}  {notes[-1]}".rstrip() for line, notes in zip(figures, body, strict=True)) + "\n"


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)
