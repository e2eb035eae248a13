"""`helixrt replay`: step times of policies in a run with slow links and failed NICs.

In: a trace (the package's own is ADAPTRA's Table 3), costs and policies. Out: on stdout or in a file, every policy's
total, how it compares with the others, and its throughput over the iterations, as text or JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace

from helixrt.commands import output
from helixrt.commands import problem as problems
from helixrt.schedule.adaptation import trace as traces
from helixrt.schedule.adaptation.replay import ADAPTIVE, STRATEGIES, Replayed, Strategy, replay
from helixrt.schedule.adaptation.trace import Trace
from helixrt.schedule.exchange.svg import number
from helixrt.schedule.exchange.text import axis
from helixrt.schedule.generators import policies
from helixrt.schedule.simulate import DELEGATED, Delegated, Direct

EPILOG = """A policy may say how its stages communicate: zb:delegated, adaptra:direct or 1f1b:direct:3. By itself, adaptra
and helix are delegated, plan again when links change and survive a NIC failure; all others communicate directly, keep
their schedule and restart. The trace is JSON: {"stages": S, "iterations": N, "events": [{"first": i, "last": j, "links":
[[a, b], ..], "delay_ms": d}, {"iteration": i, "nic_failure": stage}, ..]}, a delay being both ways. Without a profile all
stages cost --cost."""
FORMATS = ("text", "json")
_COST, _MICROBATCHES = "10,10,10", "32"  # the setting in which the paper's Table 3 is replayed here
_BLOCKS, _PLAIN, _ROWS = " ▁▂▃▄▅▆▇█", " .::-=+*#", 3  # plots: one character is eighths of a line


@dataclass(frozen=True)
class Compared:
    """All strategies over one trace."""

    trace: Trace
    runs: tuple[Replayed, ...]

    def faster(self, run: Replayed, other: Replayed) -> float:
        """How many times faster `run` is done with the trace."""
        return other.total_s / run.total_s if run.total_s else 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument("--trace", metavar="FILE", help="the trace's JSON file (default: ADAPTRA's Table 3)")
    problems.add_costs(parser)
    parser.add_argument("--policy", metavar="P,P", help=f"policies (default {','.join(s.name for s in STRATEGIES)})")
    parser.add_argument(
        "--detection-lag", metavar="N", help="iterations between a change of links and the reaction (default 2)"
    )
    parser.add_argument("--switch-cost", metavar="MS", help="time of a switch to another schedule, in ms (default 100)")
    parser.add_argument(
        "--restart", metavar="S", help="time that policies without failover lose at a NIC failure, in s (default 60)"
    )
    output.add_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say. Returns 0; raises ConfigError for what they get wrong."""
    form = output.chosen_format(args, FORMATS)
    trace = traces.table3() if args.trace is None else traces.read(problems.read_text("--trace", args.trace))
    if args.profile is None:
        args.cost, args.microbatches = args.cost or _COST, args.microbatches or _MICROBATCHES
    problem = problems.problem(args, stages=trace.stages, of="the trace's")
    strategies = _strategies(args)
    compared = Compared(trace, tuple(replay(trace, problem.plan, problem.microbatches, s) for s in strategies))
    output.put(args, _json(compared) if form == "json" else _text(compared, output.width(), _encodable(args)))
    return 0


def _strategies(args: argparse.Namespace) -> list[Strategy]:
    """The strategies that the arguments name, each under its own name."""
    given = {
        "detection_lag": problems.whole("--detection-lag", args.detection_lag, least=0),
        "switch_ms": problems.number("--switch-cost", args.switch_cost),
        "restart_s": problems.number("--restart", args.restart),
    }
    settings = {key: value for key, value in given.items() if value is not None}
    names = args.policy.split(",") if args.policy is not None else [s.name for s in STRATEGIES]
    known = {s.name: s for s in STRATEGIES}
    chosen: list[Strategy] = []
    for name in names:
        policy, _, mode = name.partition(":")
        policies.policy(policy)
        adaptive = policy in ADAPTIVE
        strategy = known.get(policy) or Strategy(name=policy, policy=policy, comm=DELEGATED if adaptive else Direct())
        if mode:
            strategy = replace(strategy, name=name, comm=problems.comm(mode))
        chosen.append(replace(strategy, **settings))  # type: ignore[arg-type]
    return chosen


def _json(compared: Compared) -> str:
    trace = compared.trace
    runs = []
    for run in compared.runs:
        strategy = run.strategy
        runs.append(
            {
                "policy": strategy.name,
                "comm": _comm(strategy),
                "total_s": run.total_s,
                "undisturbed_s": run.undisturbed_ms * trace.iterations / 1e3,
                "slowdown": run.slowdown,
                "faster_than": {other.strategy.name: compared.faster(run, other) for other in compared.runs},
                "switches": [switch.iteration for switch in run.switches],
                "iteration_ms": list(run.iteration_ms),
            }
        )
    return json.dumps({"stages": trace.stages, "iterations": trace.iterations, "runs": runs}, indent=1) + "\n"


def _comm(strategy: Strategy) -> str:
    return "delegated" if isinstance(strategy.comm, Delegated) else f"direct, {strategy.comm.depth} in flight"


def _text(compared: Compared, width: int, blocks: str) -> str:
    trace, runs = compared.trace, compared.runs
    events = f"slow spells: {len(trace.stragglers)}, NIC failures: {len(trace.failures)}"
    lines = [f"{trace.iterations} iterations of {runs[0].microbatches} micro-batches on {trace.stages} stages; {events}", ""]
    lines += output.table(
        [
            ("policy", "communication", "total s", "slow-down", "switches", *(f"x {r.strategy.name}" for r in runs)),
            *(
                (
                    r.strategy.name,
                    _comm(r.strategy),
                    number(r.total_s),
                    f"{r.slowdown:.3f}",
                    str(len(r.switches)),
                    *(f"{compared.faster(r, other):.2f}" for other in runs),
                )
                for r in runs
            ),
        ]
    )
    lines += ["", "slow-down: against a run in which nothing happens; x P: how many times faster than P", ""]
    lines += _plot(compared, width, blocks)
    return "\n".join(lines) + "\n"


def _plot(compared: Compared, width: int, blocks: str) -> list[str]:
    """Throughput over the iterations, one band of `_ROWS` lines per policy, all on one scale from 0."""
    left = max(len(run.strategy.name) for run in compared.runs) + 1
    columns = max(min(width - left, compared.trace.iterations), 10)
    iterations = compared.trace.iterations
    rates = [_rates(run, columns) for run in compared.runs]
    best = max((rate for line in rates for rate in line), default=0.0)
    lines = [f"micro-batches per second, 0 to {number(best)}:"]
    for run, line in zip(compared.runs, rates, strict=True):
        levels = [round(rate / best * 8 * _ROWS) if best else 0 for rate in line]
        lines.append("")
        for row in reversed(range(_ROWS)):
            name = run.strategy.name if row == 0 else ""
            lines.append((name.ljust(left) + "".join(blocks[min(max(at - 8 * row, 0), 8)] for at in levels)).rstrip())
    marks = ["-" if compared.trace.delays_ms(int((c + 0.5) * iterations / columns)) else " " for c in range(columns)]
    for failure in compared.trace.failures:
        marks[int(failure.iteration / iterations * columns)] = "X"
    lines.append(("links".ljust(left)[:left] + "".join(marks)).rstrip())
    return [*lines, *axis(iterations, left, columns, ""), "iterations (- links are slow, X a NIC fails)"]


def _rates(run: Replayed, columns: int) -> list[float]:
    """Micro-batches per second in each of `columns` equal parts of the run, by iterations."""
    count = len(run.iteration_ms)
    rates = []
    for column in range(columns):
        first = column * count // columns
        part = run.iteration_ms[first : max((column + 1) * count // columns, first + 1)]
        rates.append(run.microbatches * len(part) / sum(part) * 1e3 if sum(part) else 0.0)
    return rates


def _encodable(args: argparse.Namespace) -> str:
    """Block characters where the output can show them."""
    try:
        _BLOCKS.encode("utf-8" if args.output is not None else sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return _PLAIN
    return _BLOCKS
