"""Steps per second of a session with 2 replicas x dp_shard 2, compared with torch's HSDP (FSDP2 on a 2-D mesh, over Gloo).

Ours is the session as it is: quorum, exchange between replicas, vote, commit record, durable lineage and flight record at every
step. The other side is a plain loop around `fully_shard` on a mesh replicate x shard, whose gradients torch reduce-scatters and
then all-reduces. Same model, blocks, weights, batches, AdamW, clipping and number of processes. Blocks of steps alternate, one
side waiting with its next batch while the other runs; the first step of a block is not counted. The losses must agree, else
there is no figure.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.bench._arguments import add_blocks, add_json, add_model
from helixrt.bench._figures import Spread, print_spreads, write
from helixrt.bench._two_sides import Gate, Outcome, Stopwatch, run_two_sides, text_batches
from helixrt.engines.sharded import blocks
from helixrt.errors import Fatal
from helixrt.job.config import CheckpointConfig, MeshConfig
from helixrt.job.heap import keep_freed_memory
from helixrt.job.places import coordinates, group_rank
from helixrt.job.rank import RankRuntime
from helixrt.job.session import Session
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_rank import RankHost
from helixrt.replica.contracts import RankSpec
from helixrt.timeouts import derive
from helixrt.train.config import DataConfig, ModelConfig
from helixrt.train.data import load_corpus, text_loader, training_windows
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk

REPLICAS, SHARDS = 2, 2
WORLD = REPLICAS * SHARDS
SIDES = ("helixrt", "torch")
SEED, RATE, CLIP = 0, 3e-4, 1.0
LOSS_TOLERANCE = 2e-2  # nats on one batch; float32 sums in another order, over some hundred steps


class Work:
    """What both sides train: `steps` updates of one model, on batches of `data`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rounds, self.block, self.threads = args.rounds, args.block, args.threads
        self.steps = (args.rounds + 1) * args.block
        self.model_config = ModelConfig("gpt", args.layers, args.dim, ffn=4 * args.dim)
        self.data = DataConfig(batch=args.batch, seq_len=args.seq_len)

    def model(self) -> torch.nn.Module:
        return build_chunk(self.model_config, self.data.seq_len, 0, 1, seed=SEED)


def run_ours(spec: RankSpec, gate: Gate, results: Any, work: Work) -> None:
    config = SessionConfig.from_plain(spec.config)
    with RankRuntime(spec, config) as runtime, RankHost(runtime) as host:
        session = Session(config.session(spec.coordinate.replica, spec.coordinate.dp_shard), host)
        watch, losses = Stopwatch(0, gate, work.block), [0.0]
        model = session.parallelize(work.model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        session.register(model=model, optimizers=[optimizer], clip_norm=CLIP)
        windows = training_windows(load_corpus(work.data), work.data, session.streams)
        loader = text_loader(windows, session.sampler(windows, shuffle=True), work.data.batch)
        for step in session.steps(loader, until=work.steps):
            for tokens in step:
                watch(step.position)
                step.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
            done = step.commit()
            if step.number == work.steps:  # no further batch will be asked for
                losses[0] = float(done.loss)
                watch.lap()
                gate.pass_block(0, gate.rounds + 1)
    results.put(Outcome("helixrt", session.stream, watch.seconds, losses[0]))


def run_torch(rank: int, store: str, gate: Gate, results: Any, work: Work) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(work.threads)
    keep_freed_memory()
    host, port = store.rsplit(":", 1)
    client = dist.PrefixStore("hsdp", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=client, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    batches, watch = text_batches(work.data, rank, WORLD, SEED), Stopwatch(1, gate, work.block)
    model = work.model()
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss = torch.zeros(())
    for position, tokens in zip(range(work.steps), batches, strict=False):
        watch(position)
        loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    watch.lap()
    gate.pass_block(1, gate.rounds + 1)
    mean = loss.detach().clone()
    dist.all_reduce(mean)  # as the session's loss: over all ranks
    results.put(Outcome("torch", rank, watch.seconds, float(mean) / WORLD))
    dist.barrier()
    dist.destroy_process_group()


def measure(work: Work) -> list[Outcome]:
    """The outcomes of all eight processes. Raises Fatal if the sides did not train the same."""
    mesh = MeshConfig(REPLICAS, 1, SHARDS)
    config = SessionConfig(
        name="bench",
        mesh=mesh,
        threads=work.threads,
        step_timeout_s=600.0,  # one side waits while the other runs its block
        checkpoint=CheckpointConfig(every=0),
        device="cpu",
        seed=SEED,
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warning for each wait in the store that times out
    os.environ.setdefault("RUST_LOG", "error")  # torchft's server prints every quorum otherwise
    places = [place for replica in range(REPLICAS) for place in coordinates(mesh, replica)]
    assert [at.replica * SHARDS + group_rank(mesh, at) for at in places] == list(range(WORLD))
    timeouts = derive(config.step_timeout_s, config.heartbeat_s)
    outcomes = run_two_sides(places, config.to_plain(), timeouts, work.rounds, run_ours, run_torch, (work,))
    losses = [outcome.loss for outcome in outcomes]
    if not max(losses) - min(losses) <= LOSS_TOLERANCE or not math.isfinite(sum(losses)):
        raise Fatal(f"both sides must train the same, but their last losses are {losses}")
    return outcomes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, batch=8, of="rank and step")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per rank")
    add_blocks(parser, block=6)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    work = Work(args)
    outcomes = measure(work)
    seconds = {side: next(o.seconds[1:] for o in outcomes if o.side == side and o.rank == 0) for side in SIDES}
    spreads = {
        **{f"{side}_steps_per_s": Spread.of([1 / s for s in seconds[side]]) for side in SIDES},
        "ratio": Spread.of([theirs / own for own, theirs in zip(seconds["helixrt"], seconds["torch"], strict=True)]),
    }
    print(f"{REPLICAS} replicas x dp_shard {SHARDS}, gpt, batch {args.batch} x {args.seq_len} per rank: steps/s")
    print_spreads(spreads)
    settings = {
        "model": asdict(work.model_config),
        "data": asdict(work.data),
        "threads": args.threads,
        "rounds": work.rounds,
    }
    write(args.json, "hsdp", settings, spreads)
    return 0
