"""What a session costs: a step of one replica beside the same loop without it, two replicas beside DistributedDataParallel.

Three measurements, each in processes that `helixrt.run` starts, with the sides in turn in the same processes:

- one replica, a tiny model: time, CPU time and context switches of a step, less those of the same loop in plain PyTorch;
- two replicas, a GPT-2-like model: steps per second beside torch's DistributedDataParallel over Gloo, and from the last bucket
  of a step (of the replica that is last) to its update;
- one replica again: Python calls per step, by thread. They do not depend on how busy the machine is.

Both sides start from the same weights and see the same batches; their last losses must agree, else there is no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from helixrt.bench._arguments import add_blocks, add_json, add_model, check_least
from helixrt.bench._figures import Spread, write
from helixrt.bench._session_rank import VARIABLE, RankFigures, Settings, alone, pair
from helixrt.errors import Fatal
from helixrt.job.launch import RunOptions
from helixrt.job.launch import run as run_session
from helixrt.replica.store import host_store
from helixrt.train.config import ModelConfig

LOSS_TOLERANCE = 1e-3  # float32 sums in another order, over some hundred steps
WORLD = 2
CALL_ROUNDS = 2


def measure(train: Callable[[Any], None], replicas: int, settings: Settings) -> list[RankFigures]:
    """Run `train` on the replicas and read what each measured. Raises Fatal when the sides did not train alike."""
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(settings, folder=folder)
        os.environ[VARIABLE] = settings.to_text()
        try:
            with open(Path(folder, "console.txt"), "w") as console, contextlib.redirect_stdout(console):
                run_session(
                    train, replicas=replicas, storage=folder, seed=3, device="cpu", launcher="local",
                    options=RunOptions(checkpoint_every=0),
                )  # fmt: skip
        finally:
            del os.environ[VARIABLE]
        found = [RankFigures.read(settings, replica) for replica in range(replicas)]
    if not settings.calls:
        for figures in found:
            own, other = figures.helixrt.loss, figures.other.loss
            if not math.isclose(own, other, rel_tol=LOSS_TOLERANCE, abs_tol=LOSS_TOLERANCE):
                raise Fatal(f"both sides must train alike, but their last losses are {own} and {other}")
    return found


def less(own: Sequence[float], other: Sequence[float], factor: float = 1.0) -> Spread:
    """Of the differences block by block, times `factor`."""
    return Spread.of([factor * (a - b) for a, b in zip(own, other, strict=True)])


def bucket_to_update_ms(ranks: Sequence[RankFigures]) -> dict[str, float]:
    """Median and 99th percentile over steps: from the last bucket of the replica that is last to the last update."""
    spans = zip(*(figures.spans for figures in ranks), strict=True)
    values = sorted(1e3 * (max(done for _, done in step) - max(handed for handed, _ in step)) for step in spans)
    return {"p50": statistics.median(values), "p99": values[min(len(values) - 1, math.ceil(0.99 * len(values)) - 1)]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, batch=16, of="replica and step")
    add_blocks(parser, block=6, note=" of two replicas; the first is not counted")
    parser.add_argument("--tiny-block", type=int, default=50, help="steps in a block of one replica")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    check_least(args, rounds=2, block=3, tiny_block=3)
    model = ModelConfig("gpt", args.layers, args.dim, ffn=4 * args.dim)
    one = Settings("", args.rounds, args.tiny_block)
    two = Settings("", args.rounds, args.block, model, args.batch, args.seq_len)
    (single,) = measure(alone, 1, one)
    (counted,) = measure(alone, 1, replace(one, rounds=CALL_ROUNDS, calls=True))
    server, address = host_store()
    ranks = measure(pair, WORLD, replace(two, store=address))
    del server
    own, other = ranks[0].helixrt, ranks[0].other
    spreads = {
        "one_replica_cost_ms": less(single.helixrt.seconds, single.other.seconds, 1e3),
        "one_replica_cpu_ms": less(single.helixrt.cpu_seconds, single.other.cpu_seconds, 1e3),
        "one_replica_switches": less(single.helixrt.switches, single.other.switches),
        "plain_loop_ms": Spread.of([1e3 * s for s in single.other.seconds]),
        "helixrt_steps_per_s": Spread.of([1 / s for s in own.seconds]),
        "ddp_steps_per_s": Spread.of([1 / s for s in other.seconds]),
        "ratio": Spread.of([theirs / ours for ours, theirs in zip(own.seconds, other.seconds, strict=True)]),
    }
    latency = bucket_to_update_ms(ranks)
    calls = dict(sorted(counted.calls.items(), key=lambda item: -item[1]))
    print(f"a session: one replica with a tiny model, {WORLD} replicas with {args.layers} layers x {args.dim}")
    for name, spread in spreads.items():
        print(f"  {name:30} {spread}")
    print(f"  {'last bucket to update, ms':30} p50 {latency['p50']:.4g}  p99 {latency['p99']:.4g}")
    print(f"  {'Python calls per step':30} {sum(calls.values()):.0f}")
    for name, count in calls.items():
        print(f"    {name:28} {count:.1f}")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write(args.json, "session", settings, spreads, last_bucket_to_update_ms=latency, calls_per_step=calls)
    return 0
