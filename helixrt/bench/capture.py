"""Time and memory with which a rank captures a model larger than its memory, and divides it into stages.

Every rank of a pipeline does this at its start (`session.parallelize`): the transformers model is built on the meta device,
captured whole on fake tensors as one graph of forward and backward, balanced for 1f1b by estimated costs, and cut. Each run is
a process of its own, as a rank is, one after the other. The processor time of the process counts, which other programs do not
lengthen much; the time on the clock stands beside it. Memory is what the process grew by at its peak, beside the parameters
that the model would have. A median above `--most-s` is exit code 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from helixrt.bench._arguments import add_json, check_least
from helixrt.bench._figures import Spread, write
from helixrt.bench._unmodified import FAMILIES, Shape
from helixrt.errors import ConfigError

MOST_S = 60.0
SCHEDULE, MICROBATCHES = "1f1b", 4  # for each stage


@dataclass(frozen=True)
class Settings:
    shapes: tuple[Shape, ...]
    stages: int
    repeats: int


@dataclass(frozen=True)
class Run:
    """One process. `grown_bytes` is how much higher the peak of its memory was after than before; `kept_bytes` how much it
    still held more at the end; `parameter_bytes` are those that were not allocated."""

    capture_cpu_s: float
    capture_clock_s: float
    cut_cpu_s: float
    cut_clock_s: float
    grown_bytes: int
    kept_bytes: int
    parameter_bytes: int
    nodes: int

    @property
    def cpu_s(self) -> float:
        return self.capture_cpu_s + self.cut_cpu_s

    @property
    def clock_s(self) -> float:
        return self.capture_clock_s + self.cut_clock_s


def measured(shape: Shape, stages: int) -> Run:
    """In a process of its own. Raises what it raised."""
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (shape, stages, results), nprocs=1)
    found: Run = results.get()
    return found


def _rank(_: int, shape: Shape, stages: int, results: Any) -> None:
    from helixrt.compile.whole_model import WholeModel
    from helixrt.passes.cut import cut
    from helixrt.passes.unit_costs import balanced
    from helixrt.schedule.generators.classic import build

    torch.set_num_threads(1)
    model = shape.model()  # brings transformers, before memory is counted
    held, peak = _memory_bytes("VmRSS"), _memory_bytes("VmHWM")
    joint, capture_cpu_s, capture_clock_s = _timed(WholeModel(model, None, ((), shape.tokens(shape.batch), None)).joint)
    schedule = build(SCHEDULE, stages, MICROBATCHES * stages)
    _, cut_cpu_s, cut_clock_s = _timed(lambda: cut(joint, balanced(joint, schedule).starts))
    results.put(
        Run(
            capture_cpu_s,
            capture_clock_s,
            cut_cpu_s,
            cut_clock_s,
            grown_bytes=_memory_bytes("VmHWM") - peak,
            kept_bytes=_memory_bytes("VmRSS") - held,
            parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
            nodes=len(joint.graph.nodes),
        )
    )


def _timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it gave, seconds of the processor, seconds of the clock."""
    cpu, clock = time.process_time(), time.perf_counter()
    found = work()
    return found, time.process_time() - cpu, time.perf_counter() - clock


def _memory_bytes(key: str) -> int:
    """Of this process, as Linux counts it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=50_000)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1, help="sequences per micro-batch")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each family")
    parser.add_argument(
        "--most-s", type=float, default=MOST_S, help="largest median of processor seconds for which the exit code is 0"
    )
    add_json(parser)


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ConfigError."""
    size = (args.layers, args.dim, args.vocab, args.seq_len, args.batch)
    shapes = tuple(Shape(family, *size) for family in dict.fromkeys(args.family))
    if not 1 <= args.stages <= args.layers:
        raise ConfigError("--stages", args.stages, f"must be from 1 to --layers={args.layers}")
    check_least(args, repeats=2)
    return Settings(shapes, args.stages, args.repeats)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0, or 1 if a model takes longer than `--most-s`. Raises ConfigError."""
    settings = settings_of(args)
    spreads: dict[str, Spread] = {}
    figures: dict[str, Any] = {}
    longest = 0.0
    for shape in settings.shapes:
        runs = [measured(shape, settings.stages) for _ in range(settings.repeats)]
        longest = max(longest, statistics.median(one.cpu_s for one in runs))
        figures[shape.family] = [asdict(one) for one in runs]
        cpu, clock = (Spread.of(values) for values in ([one.cpu_s for one in runs], [one.clock_s for one in runs]))
        spreads |= {f"{shape.family}/cpu_s": cpu, f"{shape.family}/clock_s": clock}
        grown, whole = max(one.grown_bytes for one in runs), runs[0].parameter_bytes
        print(f"capture: {shape}, one graph of {runs[0].nodes} operators, {settings.stages} stages")
        print(f"  processor s  {cpu}\n  clock s      {clock}")
        print(f"  memory grew by at most {grown / 1e9:.2f} GB; the parameters would take {whole / 1e9:.1f} GB")
    write(args.json, "capture", asdict(settings), spreads, load=os.getloadavg(), runs=figures)
    return int(longest > args.most_s)
