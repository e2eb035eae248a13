"""Step times of schedules under slow links, by exact simulation: the straggler table, and ADAPTRA's Table 3 trace.

The setting is that of ADAPTRA's Figures 14 to 17 and 21 made plain: 8 stages, 32 micro-batches, every F, B and W 10 ms. Each
policy runs with direct and with delegated communication, under delays on the first, the middle and the last link, and
on all three. The trace is replayed for 1F1B and the zero-bubble base as they are run today (direct, a restart when a
NIC fails) and for ADAPTRA's algorithm and helix (delegated). Nothing is timed: the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import groupby
from typing import Any

from helixrt.bench._arguments import add_json
from helixrt.bench._figures import write
from helixrt.schedule.adaptation.replay import STRATEGIES, Replayed, replay
from helixrt.schedule.adaptation.stragglers import Cell, straggler_table
from helixrt.schedule.adaptation.trace import table3
from helixrt.schedule.costs import uniform

STAGES, MICROBATCHES, OPERATION_MS = 8, 32, 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate, print, write. Returns 0."""
    costs = uniform(STAGES, OPERATION_MS, OPERATION_MS, OPERATION_MS)
    cells = straggler_table(costs, MICROBATCHES)
    replayed = {one.name: replay(table3(), costs, MICROBATCHES, one) for one in STRATEGIES}
    _print_table(cells)
    _print_trace(replayed)
    settings = {"stages": STAGES, "microbatches": MICROBATCHES, "operation_ms": OPERATION_MS}
    write(args.json, "stragglers", settings, {}, table=[_row(c) for c in cells], trace=_trace(replayed))
    return 0


def _row(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "place": cell.place.name}


def _trace(replayed: dict[str, Replayed]) -> dict[str, Any]:
    return {
        name: {
            "total_s": run.total_s,
            "slowdown": run.slowdown,
            "switches": len(run.switches),
            "times_faster_than": {other: replayed[other].total_s / run.total_s for other in replayed},
        }
        for name, run in replayed.items()
    }


def _print_table(cells: tuple[Cell, ...]) -> None:
    columns = list(dict.fromkeys((cell.policy, cell.comm) for cell in cells))
    print(f"stragglers: {STAGES} stages, {MICROBATCHES} micro-batches, F = B = W = {OPERATION_MS:g} ms; step in ms (slow-down)")
    print(f"  {'slow links':12}{'delay':>6}" + "".join(f"{f'{policy} {comm}':>20}" for policy, comm in columns))
    for (place, delay_ms), row in groupby(cells, key=lambda cell: (cell.place.name, cell.delay_ms)):
        figures = "".join(f"{f'{cell.makespan_ms:g} ({cell.slowdown:.2f})':>20}" for cell in row)
        print(f"  {place:12}{delay_ms:>6g}{figures}")


def _print_trace(replayed: dict[str, Replayed]) -> None:
    print("Table 3 of ADAPTRA replayed: 1200 iterations, nine slow spells, one NIC failure")
    print(f"  {'policy':10}{'total s':>9}{'slow-down':>11}" + "".join(f"{f'x {name}':>11}" for name in replayed))
    for name, run in replayed.items():
        ratios = "".join(f"{other.total_s / run.total_s:>11.2f}" for other in replayed.values())
        print(f"  {name:10}{run.total_s:>9.0f}{run.slowdown:>11.3f}{ratios}")
