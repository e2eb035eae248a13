"""FTAR's fault matrix on real processes: thirteen faults in six phases, and how long survivors are blocked.

Every cell starts three ranks, brings them into the phase, injects the fault into one of them at a fixed point, and
checks that no rank hangs or crashes, that no sum is wrong, and that the next generation works. `fault_matrix/cells.py`
has the requirements. Printed: the table with the longest time that a survivor was blocked, and percentiles.
With `--minutes` also: whether a running peer is reported as lost, with `--loaded` while every core is busy.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from helixrt.bench._arguments import add_json
from helixrt.bench._figures import Spread, write
from helixrt.bench.fault_matrix.cell_run import run_cell
from helixrt.bench.fault_matrix.cells import (
    DEATH_S,
    SHARED_MEMORY_CELLS,
    SILENCE_PERIODS,
    TCP_CELLS,
    Cell,
    Consequence,
    Fault,
    Finding,
    Phase,
)
from helixrt.bench.fault_matrix.endurance import Endurance, endure
from helixrt.bench.fault_matrix.processes import HEARTBEAT_S, RankProcesses
from helixrt.errors import ConfigError

FAULTS = {fault.name.lower().replace("_", "-"): fault for fault in Fault}
PHASES = {phase.name.lower().replace("_", "-"): phase for phase in Phase}
_BURNERS_PER_CORE = 2

Findings = dict[Cell, list[Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=1, help="how often each cell is run; 0: no cell is run")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="only these")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES), help="only these")
    parser.add_argument("--transports", nargs="+", default=["tcp", "shared_memory"], choices=["tcp", "shared_memory"])
    parser.add_argument("--minutes", type=float, default=0.0, help="check for so long that no running peer is reported as lost")
    parser.add_argument("--loaded", action="store_true", help="with --minutes: while two busy processes per core run")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run, print, write. Returns 0 if every cell meets its requirements, within the time bounds; else 1."""
    if args.rounds < 0:
        raise ConfigError("--rounds", args.rounds, "must not be negative")
    if not 0 <= args.minutes < math.inf:
        raise ConfigError("--minutes", args.minutes, "must be 0 or more")
    cells, left_out = _chosen(args)
    findings: Findings = {cell: [] for cell in cells}
    endured: dict[str, Endurance] = {}
    with RankProcesses() as owner:
        for turn in range(args.rounds):
            for cell in cells:
                finding = run_cell(owner, cell)
                findings[cell].append(finding)
                for problem in finding.problems:
                    print(f"  {cell}, round {turn}: {problem}", flush=True)
        if args.minutes:
            burners = _BURNERS_PER_CORE * (os.cpu_count() or 1) if args.loaded else 0
            endured = endure(owner, args.transports, 60 * args.minutes, burners)
    spreads: dict[str, Spread] = {}
    tails: dict[str, Tail] = {}
    good = True
    if args.rounds:
        _print_table(findings)
        for reason in left_out:
            print(f"  not run: {reason}")
        spreads, tails = _report(findings)
        good = all(not f.problems and not f.late(HEARTBEAT_S) for of_cell in findings.values() for f in of_cell)
    for transport, seen in endured.items():
        verdict = "; ".join(seen.problems) or "no running peer was reported as lost"
        print(
            f"{seen.seconds / 60:g} minutes over {transport} beside {seen.burners} busy processes: {verdict}; "
            f"{seen.sums} sums, the longest took {seen.longest_s:.3f} s"
        )
        good = good and not seen.problems
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "benchmark", "command")}
    table = [_row(cell, of_cell) for cell, of_cell in findings.items() if of_cell]
    more = {
        "tails": {name: asdict(tail) for name, tail in tails.items()},
        "left_out": left_out,
        "endured": {transport: asdict(seen) for transport, seen in endured.items()},
    }
    write(args.json, "faults", settings, spreads, table=table, **more)
    return 0 if good else 1


def _chosen(args: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    """The cells to run, and why others are not."""
    from helixrt.lab.machine import unavailable

    faults, phases = {FAULTS[name] for name in args.faults}, {PHASES[name] for name in args.phases}
    all_cells = (TCP_CELLS if "tcp" in args.transports else ()) + (
        SHARED_MEMORY_CELLS if "shared_memory" in args.transports else ()
    )
    cells = [cell for cell in all_cells if cell.fault in faults and cell.phase in phases]
    if any(cell.fault is Fault.HALF_OPEN for cell in cells) and (lack := unavailable()) is not None:
        return [cell for cell in cells if cell.fault is not Fault.HALF_OPEN], [f"{Fault.HALF_OPEN.title}: {lack}"]
    return cells, []


# ---------------------------------------------------------------- what is printed and written


def _entry(of_cell: Sequence[Finding]) -> str:
    """fine, or how long the slowest survivor was blocked; FAILED, or LATE beside the time."""
    if any(finding.problems for finding in of_cell):
        return "FAILED"
    blocked = [s for finding in of_cell for s in finding.unblocked_s]
    if not blocked:
        return "fine"
    late = " LATE" if any(finding.late(HEARTBEAT_S) for finding in of_cell) else ""
    return f"{1000 * max(blocked):.3g} ms{late}"


def _print_table(findings: Mapping[Cell, Sequence[Finding]]) -> None:
    print("fault matrix, 3 ranks: fine, or the longest that a survivor was blocked")
    for transport in dict.fromkeys(cell.transport for cell in findings):
        print(f"  {transport:20}" + "".join(f"{phase.value:>17}" for phase in Phase))
        for fault in Fault:
            row = {cell.phase: of for cell, of in findings.items() if cell.fault is fault and cell.transport == transport}
            if row:
                entries = (_entry(row[phase]) if phase in row else "" for phase in Phase)
                print(f"  {fault.title:20}" + "".join(f"{entry:>17}" for entry in entries))


@dataclass(frozen=True)
class Tail:
    """The slow end of a sample, in milliseconds, and the bound that it must not exceed."""

    times: int
    p99: float
    most: float
    bound: float


def _report(findings: Findings) -> tuple[dict[str, Spread], dict[str, Tail]]:
    spreads: dict[str, Spread] = {}
    tails: dict[str, Tail] = {}
    for consequence, title, bound_s in (
        (Consequence.GONE, "the end of a process or garbage", DEATH_S),
        (Consequence.SILENT, "a process stopped or a link was cut", SILENCE_PERIODS * HEARTBEAT_S),
    ):
        blocked = [
            1000 * s for cell, of in findings.items() if cell.consequence is consequence for f in of for s in f.unblocked_s
        ]
        if len(blocked) < 2:
            continue
        name = f"unblocked_after_{consequence.value}_ms"
        spreads[name] = Spread.of(blocked)
        tail = tails[name] = Tail(len(blocked), percentile(blocked, 0.99), max(blocked), 1000 * bound_s)
        print(
            f"survivors are unblocked after {title}, ms: {spreads[name]}  p99 {tail.p99:.4g}  most {tail.most:.4g}  "
            f"(bound {tail.bound:g}; {tail.times} times)"
        )
    return spreads, tails


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that at least `part` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _row(cell: Cell, of_cell: Sequence[Finding]) -> dict[str, Any]:
    return {
        "fault": cell.fault.title,
        "phase": cell.phase.value,
        "transport": cell.transport,
        "rounds": len(of_cell),
        "shows": _entry(of_cell),
        "unblocked_ms": [round(1000 * s, 3) for finding in of_cell for s in finding.unblocked_s],
        "said": sorted({said for finding in of_cell for said in finding.said}),
        "problems": [problem for finding in of_cell for problem in finding.problems],
    }
