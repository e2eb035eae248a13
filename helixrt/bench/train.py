"""Steps per second of the built-in job (2 replicas, pp=1), compared with torch's DistributedDataParallel over Gloo.

Ours is the job as it is: quorum, exchange, vote, commit record, durable lineage, flight record and
metrics at every step. The other side is a plain loop around DDP with fused AdamW and clipping. Same
model, weights, batches and number of processes. Blocks of steps alternate, one side waiting in its data
source while the other runs; the first step of a block is not counted, since its preparation may overlap
the wait. The losses must agree, else there is no figure.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helixrt.bench._figures import Spread, write
from helixrt.errors import Fatal
from helixrt.job.config import ChaosConfig, CheckpointConfig, MeshConfig
from helixrt.job.heap import keep_freed_memory
from helixrt.job.rank import RankRuntime
from helixrt.job.session_config import SessionConfig
from helixrt.job.session_rank import opened_session
from helixrt.protocol.step.lineage import genesis
from helixrt.replica.contracts import Coordinate, RankSpec
from helixrt.replica.membership import serve_lighthouse
from helixrt.replica.run_keys import EXIT_KEY, done_key
from helixrt.replica.runlog import RunLog
from helixrt.replica.store import TcpRunStore, host_store
from helixrt.timeouts import derive
from helixrt.train.config import DataConfig, EvalConfig, ModelConfig, OptimConfig, ScheduleConfig, TrainConfig
from helixrt.train.data import ReplicaStream, load_corpus
from helixrt.train.engine import token_loss
from helixrt.train.loop import LoopHooks, train
from helixrt.train.models.build import build_chunk
from helixrt.train.optimizer import adamw, cosine_with_warmup

WORLD = 2
SIDES = ("helixrt", "ddp")
LOSS_TOLERANCE = 2e-2  # nats on one batch; float32 sums in another order, over some hundred steps


class Gate:
    """Lets the sides, of `world` processes each, run blocks in turn. `pass_block(side)` is called by each process before a
    block."""

    def __init__(self, context: Any, rounds: int, world: int = WORLD) -> None:
        self.rounds, self.world = rounds, world
        self._changed = context.Condition()
        self._turn = context.Value("i", 0, lock=False)
        self._arrived = context.Array("i", [0, 0], lock=False)

    def pass_block(self, side: int, block: int) -> None:
        """Say that `block` - 1 is done and wait for `block`'s turn. The order within a round alternates."""
        with self._changed:
            if block:
                self._arrived[side] += 1
                if self._arrived[side] == self.world:
                    self._arrived[side] = 0
                    self._turn.value += 1
                    self._changed.notify_all()
            if block > self.rounds:
                return
            mine = 2 * block + (side if block % 2 else 1 - side)
            if not self._changed.wait_for(lambda: self._turn.value >= mine, timeout=600):
                raise Fatal(f"the other side did not finish its block in 600 s (turn {self._turn.value}, waiting for {mine})")


class Stopwatch:
    """A batch source that passes the gate before each block and notes how long the counted steps took."""

    def __init__(self, batch_at: Callable[[int], torch.Tensor], side: int, gate: Gate, block: int) -> None:
        self._batch_at, self._side, self._gate, self._block = batch_at, side, gate, block
        self._began = 0.0
        self.seconds: list[float] = []  # per counted step, by block

    def __call__(self, position: int) -> torch.Tensor:
        number, within = divmod(position, self._block)
        if within == 0:
            self.lap()
            self._gate.pass_block(self._side, number)
        elif within == 1:
            self._began = time.perf_counter()
        return self._batch_at(position)

    def lap(self) -> None:
        if self._began:
            self.seconds.append((time.perf_counter() - self._began) / (self._block - 1))


@dataclass(frozen=True)
class Outcome:
    side: str
    rank: int
    seconds: list[float]
    loss: float


def run_ours(spec: RankSpec, gate: Gate, block: int, results: Any) -> None:
    """The job's loop, with the gate in front of its data."""
    config = TrainConfig.from_plain(spec.config)
    settings = SessionConfig.of(config, device="cpu")
    watches: list[Stopwatch] = []
    last: list[float] = []

    def gated(stream: ReplicaStream) -> Stopwatch:
        watches.append(Stopwatch(stream.batch_at, 0, gate, block))
        return watches[0]

    def note(step: int, loss: float) -> None:
        last.append(loss)
        if step == config.steps:  # no further batch will be asked for
            watches[0].lap()
            gate.pass_block(0, gate.rounds + 1)

    with RankRuntime(spec, settings) as runtime, opened_session(runtime, settings) as session:
        train(session, config, LoopHooks(batches=gated, updated=note))
        results.put(Outcome("helixrt", session.replica, watches[0].seconds, last[-1]))


def run_ddp(config: TrainConfig, rank: int, store: str, gate: Gate, block: int, results: Any) -> None:
    torch.set_num_threads(config.threads)
    keep_freed_memory()
    host, port = store.rsplit(":", 1)
    client = dist.PrefixStore("ddp", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group("gloo", store=client, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600))
    data = config.data
    stream = ReplicaStream(load_corpus(data), rank, WORLD, data.batch, data.seq_len, config.seed)
    watch = Stopwatch(stream.batch_at, 1, gate, block)
    model = build_chunk(config.model, data.seq_len, 0, 1, seed=config.seed)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, config.optim)
    scheduler = cosine_with_warmup(optimizer, config.steps, config.optim)
    loss = torch.zeros(())
    for number in range(1, config.steps + 1):
        tokens = watch(number - 1)
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
    """What all four processes measured. Raises Fatal when the sides did not train alike."""
    context = multiprocessing.get_context("spawn")
    gate, results = Gate(context, rounds), context.Queue()
    server, address = host_store()
    store, timeouts = TcpRunStore(address), derive(config.step_timeout_s, config.heartbeat_s)
    RunLog(store).append(0, genesis("bench", WORLD))
    lighthouse, lighthouse_address = serve_lighthouse(timeouts)
    with tempfile.TemporaryDirectory() as folder:
        epoch_s = time.time()
        specs = [
            RankSpec("bench", Coordinate(r), 0, address, lighthouse_address, folder, "bench", epoch_s, config.to_plain())
            for r in range(WORLD)
        ]
        processes = [context.Process(target=run_ours, args=(s, gate, block, results)) for s in specs]
        processes += [context.Process(target=run_ddp, args=(config, r, address, gate, block, results)) for r in range(WORLD)]
        for process in processes:
            process.start()
        try:
            for replica in range(WORLD):
                store.wait(done_key(replica), 3600)
            store.put_if_absent(EXIT_KEY, "ok")
            outcomes = [results.get(timeout=60) for _ in processes]
            for process in processes:
                process.join(60)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            lighthouse.shutdown()
            del server
    for rank in range(WORLD):
        losses = [o.loss for o in outcomes if o.rank == rank]
        if not math.isclose(*losses, rel_tol=0, abs_tol=LOSS_TOLERANCE):
            raise Fatal(f"both sides must train alike, but their last losses on rank {rank} are {losses}")
    return outcomes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", default="gpt", choices=("gpt", "llama"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences per replica and step")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks that are measured")
    parser.add_argument("--block", type=int, default=6, help="steps in a block; the first is not counted")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")


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
    print(f"the main job, {WORLD} replicas, pp=1, {args.family}, batch {args.batch} x {args.seq_len}: steps/s")
    for name, spread in spreads.items():
        print(f"  {name:30} {spread}")
    if args.json is not None:
        write(args.json, "train", asdict(config), spreads)
        print(f"  written to {args.json}")
    return 0
