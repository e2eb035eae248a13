"""A captured model trained over two stages in two processes, each on a core of its own, for `helixrt bench balance --real`.

In: a model's shape and micro-batches. Out: the time of each step's forward and backward on the slower rank, and how long
each operation kept its stage busy.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helixrt.bench._unmodified import Shape
from helixrt.compile.options import Options
from helixrt.compile.train_step import TrainStep
from helixrt.engines.captured import CapturedModel
from helixrt.engines.captured_engine import CapturedEngine
from helixrt.engines.example_batch import ExampleBatch
from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagePlace
from helixrt.job.heap import keep_freed_memory
from helixrt.record import FlightRecord, Kind

STAGES = 2
WARM_UP = 2  # steps that do not count
SCHEDULE = "1f1b"
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Real:
    """`steps_ms` by step. `busy_ms` by stage: the median of F and of BW. `first` is the module that the second stage begins
    with."""

    first: str
    steps_ms: list[float]
    busy_ms: list[dict[str, float]]


def real_steps(shape: Shape, microbatches: int, steps: int) -> Real:
    """Train; raises what a rank raised."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (str(Path(folder, "rendezvous")), shape, microbatches, steps, results), nprocs=STAGES)
        by_stage = dict(results.get() for _ in range(STAGES))
    first, ends = by_stage[STAGES - 1][0], [by_stage[stage][1] for stage in range(STAGES)]
    return Real(first, [max(step) for step in zip(*ends, strict=True)], [by_stage[stage][2] for stage in range(STAGES)])


def _rank(stage: int, rendezvous: str, shape: Shape, microbatches: int, steps: int, results: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[stage % len(cores)]})
    torch.set_num_threads(1)
    keep_freed_memory()
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=stage, world_size=STAGES, timeout=timeout)
    record = FlightRecord(f"pp{stage}")
    batch = shape.tokens(shape.batch * microbatches)
    unmodified = shape.model()
    step = TrainStep(unmodified, Options(microbatches=microbatches, schedule=SCHEDULE))
    model = CapturedModel(step, ExampleBatch(**batch), StagePlace(stage, STAGES, dist.group.WORLD, record))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine = model.engine(Registered.of(model, [optimizer]))
    assert isinstance(engine, CapturedEngine)
    taken_ms = []
    for number in range(WARM_UP + steps):
        dist.barrier()
        begin = record.clock()
        engine.begin(lambda bucket: None)
        engine.seed(number)
        model.train_batch((), batch, None)
        engine.end()
        taken_ms.append((record.clock() - begin) * 1e3)
    busy = defaultdict(list)
    for event in record.events():
        if event.kind is Kind.OPERATION:
            busy[event.detail["op"]].append((event.end_s - event.begin_s) * 1e3)
    medians = {op: statistics.median(values[WARM_UP * microbatches :]) for op, values in busy.items()}
    first = model.cut.chunks[stage].first
    results.put((stage, (first, taken_ms[WARM_UP:], medians)))
    dist.barrier()
    dist.destroy_process_group()
