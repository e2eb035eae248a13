"""Steps per second of the built-in job (2 replicas, pp=1), compared with torch's DistributedDataParallel over Gloo.

Ours is the job as it is: quorum, exchange, vote, commit record, durable lineage, flight record and
metrics at every step. The other side is a plain loop around DDP with fused AdamW and clipping. Same
model, weights, batches and number of processes. Blocks of steps alternate, one side waiting with its
next batch while the other runs; the first step of a block is not counted, since its preparation may overlap
the wait. The losses must agree, else there is no figure.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.bench._arguments import add_blocks, add_json, add_model
from helixrt.bench._figures import Spread, print_spreads, write
from helixrt.bench._two_sides import Gate, Outcome, Stopwatch, run_two_sides, text_batches
from helixrt.errors import Fatal
from helixrt.job.config import ChaosConfig, CheckpointConfig, MeshConfig
from helixrt.job.heap import keep_freed_memory
from helixrt.job.rank import RankRuntime
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_rank import opened_session
from helixrt.replica.contracts import Coordinate, RankSpec
from helixrt.timeouts import derive
from helixrt.train.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig
from helixrt.train.engine import token_loss
from helixrt.train.loop import LoopHooks, train
from helixrt.train.models.build import build_chunk
from helixrt.train.optimizer import adamw, cosine_with_warmup

WORLD = 2
SIDES = ("helixrt", "ddp")
LOSS_TOLERANCE = 2e-2  # nats on one batch; float32 sums in another order, over some hundred steps


def run_ours(spec: RankSpec, gate: Gate, results: Any, config: TrainConfig, block: int) -> None:
    """The job's loop, with the gate behind its data."""
    settings = SessionConfig.of(config, device="cpu")
    watch = Stopwatch(0, gate, block)
    last: list[float] = []

    def note(step: int, loss: float) -> None:
        last.append(loss)
        if step == config.steps:  # no further batch will be asked for
            watch.lap()
            gate.pass_block(0, gate.rounds + 1)

    with RankRuntime(spec, settings) as runtime, opened_session(runtime, settings) as session:
        train(session, config, LoopHooks(batch=lambda position, tokens: watch(position), updated=note))
        results.put(Outcome("helixrt", session.replica, watch.seconds, last[-1]))


def run_ddp(rank: int, store: str, gate: Gate, results: Any, config: TrainConfig, block: int) -> None:
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    host, port = store.rsplit(":", 1)
    client = dist.PrefixStore("ddp", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=client, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    batches, watch = text_batches(config.data, rank, WORLD, config.seed), Stopwatch(1, gate, block)
    model = build_chunk(config.model, config.data.seq_len, 0, 1, seed=config.seed)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, config.optim)
    scheduler = cosine_with_warmup(optimizer, config.steps, config.optim)
    loss = torch.zeros(())
    for position, tokens in zip(range(config.steps), batches, strict=False):
        watch(position)
        loss = token_loss(parallel(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = loss.detach()
    watch.lap()
    gate.pass_block(1, gate.rounds + 1)
    results.put(Outcome("ddp", rank, watch.seconds, float(loss)))
    dist.barrier()
    dist.destroy_process_group()


def measure(config: TrainConfig, rounds: int, block: int) -> list[Outcome]:
    """The outcomes of all four processes. Raises Fatal if the sides did not train the same."""
    places = [Coordinate(replica) for replica in range(WORLD)]
    timeouts = derive(config.step_timeout_s, config.heartbeat_s)
    outcomes = run_two_sides(places, config.to_plain(), timeouts, rounds, run_ours, run_ddp, (config, block))
    for rank in range(WORLD):
        losses = [o.loss for o in outcomes if o.rank == rank]
        if not math.isclose(*losses, rel_tol=0, abs_tol=LOSS_TOLERANCE):
            raise Fatal(f"both sides must train the same, but their last losses on rank {rank} are {losses}")
    return outcomes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", default="gpt", choices=("gpt", "llama"))
    add_model(parser, batch=16, of="replica and step")
    add_blocks(parser, block=6)
    add_json(parser)


def config_of(args: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        name="bench",
        steps=(args.rounds + 1) * args.block,
        model=ModelConfig(args.family, args.layers, args.dim, ffn=4 * args.dim),
        data=DataConfig(batch=args.batch, seq_len=args.seq_len),
        mesh=MeshConfig(replicas=WORLD, pp=1),
        schedule=ScheduleConfig("gpipe", 1),
        optim=OptimConfig(),
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=0, batches=1),
        chaos=ChaosConfig(),
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    config = config_of(args)
    outcomes = measure(config, args.rounds, args.block)
    seconds = {side: next(o.seconds[1:] for o in outcomes if o.side == side and o.rank == 0) for side in SIDES}
    spreads = {
        **{f"{side}_steps_per_s": Spread.of([1 / s for s in seconds[side]]) for side in SIDES},
        "ratio": Spread.of([theirs / own for own, theirs in zip(seconds["helixrt"], seconds["ddp"], strict=True)]),
    }
    print(f"the built-in job, {WORLD} replicas, pp=1, {args.family}, batch {args.batch} x {args.seq_len}: steps/s")
    print_spreads(spreads)
    write(args.json, "train", asdict(config), spreads)
    return 0
