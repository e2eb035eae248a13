"""Training steps per second at pp=2, compared with torch.distributed.pipelining's 1F1B.

Both sides train the same model from the same weights on the same batches, in the same two processes, over
Gloo, with fused AdamW and clipping over both stages. Blocks of steps alternate, so that both have the same
noise; a ratio is taken per pair of blocks. The losses of both sides must agree, else there is no figure.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from helixrt.bench._arguments import add_blocks, add_json, add_model
from helixrt.bench._figures import Spread, print_spreads, write
from helixrt.bench._job_engine import pipeline_engine
from helixrt.errors import ConfigError, Fatal
from helixrt.job.heap import keep_freed_memory
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk, check_model
from helixrt.train.optimizer import adamw, cosine_with_warmup
from helixrt.train.schedules import job_schedule

STAGES = 2
SEED = 11
LOSS_TOLERANCE = 1e-3  # nats; float32 sums in another order, over some hundred steps


@dataclass(frozen=True)
class Settings:
    family: str
    layers: int
    dim: int
    batch: int
    seq_len: int
    microbatches: int
    rounds: int
    block: int

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(family=self.family, layers=self.layers, dim=self.dim, ffn=5 * self.dim)

    @property
    def steps(self) -> int:
        return (self.rounds + 1) * self.block

    def batch_at(self, position: int) -> torch.Tensor:
        """Tokens with something to learn: every sequence counts upwards in its own stride."""
        generator = torch.Generator().manual_seed(position)
        start, stride = torch.randint(1, 17, (2, self.batch, 1), generator=generator)
        return (start + stride * torch.arange(self.seq_len + 1)) % self.model.vocab


OPTIM = OptimConfig(bucket_bytes=1 << 20)

Step = Callable[[int], float]  # number of the step (first is 1) -> its loss


def ours(settings: Settings, stage: int) -> Step:
    engine = pipeline_engine(
        settings.model,
        OPTIM,
        ScheduleConfig("1f1b", settings.microbatches),
        batch=settings.batch,
        seq_len=settings.seq_len,
        steps=settings.steps,
        seed=SEED,
        stage=stage,
        stages=STAGES,
        group=dist.group.WORLD,
        batch_at=settings.batch_at,
        validation=settings.batch_at,
        record=FlightRecord(f"pp{stage}"),
    )

    def step(number: int) -> float:
        result = engine.run(number, lambda bucket: None)
        engine.apply(CommitRecord(number, number, "", ((0, 0),), {}, "bench"), engine.buckets)
        return float(result.loss)

    return step


def torch_pipelining(settings: Settings, stage: int) -> Step:
    module = build_chunk(settings.model, settings.seq_len, stage, STAGES, seed=SEED)
    placed = PipelineStage(module, stage, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(placed, settings.microbatches, loss_fn=token_loss)
    parameters = list(module.parameters())
    optimizer = adamw(parameters, OPTIM)
    scheduler = cosine_with_warmup(optimizer, settings.steps, OPTIM)

    def step(number: int) -> float:
        tokens = settings.batch_at(number)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(tokens[:, :-1], return_outputs=False)
        else:
            schedule.step(target=tokens[:, 1:], losses=losses, return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # One message carries the squared norm and the loss, which only the last stage has.
        shared = torch.stack([norm.square(), torch.stack(losses).mean() if losses else torch.zeros(())]).detach()
        dist.all_reduce(shared)
        torch.nn.utils.clip_grads_with_norm_(parameters, OPTIM.clip, shared[0].sqrt())
        optimizer.step()
        scheduler.step()
        return float(shared[1])

    return step


def _rank(stage: int, rendezvous: str, settings: Settings, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=stage, world_size=STAGES, timeout=timedelta(seconds=60)
    )
    sides = {"helixrt": ours(settings, stage), "torch": torch_pipelining(settings, stage)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for turn in range(settings.rounds + 1):  # the first round warms up
        order = list(sides) if turn % 2 else list(reversed(sides))
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            for number in range(turn * settings.block + 1, (turn + 1) * settings.block + 1):
                losses[name] = sides[name](number)
            dist.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - begin) / settings.block)
    if stage == 0:
        results.put((seconds, losses))
    dist.barrier()
    dist.destroy_process_group()


def measure(settings: Settings) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds per step of each block, and the last loss, by side. Raises Fatal if the losses differ."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (str(Path(folder, "rendezvous")), settings, results), nprocs=STAGES)
        seconds, losses = results.get()
    if not math.isclose(losses["helixrt"], losses["torch"], rel_tol=0, abs_tol=LOSS_TOLERANCE):
        raise Fatal(f"both sides must train the same, but their losses are {losses}")
    return seconds, losses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", default="gpt", choices=("gpt", "llama"))
    add_model(parser, batch=16, of="step")
    parser.add_argument("--microbatches", type=int, default=4)
    add_blocks(parser, block=5, note="")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0. Raises ConfigError for settings that cannot work, before anything starts."""
    settings = Settings(
        args.family, args.layers, args.dim, args.batch, args.seq_len, args.microbatches, args.rounds, args.block
    )
    if settings.batch % settings.microbatches:
        raise ConfigError("--microbatches", settings.microbatches, f"must divide --batch={settings.batch}")
    if settings.rounds < 2 or settings.block < 1:
        raise ConfigError("--rounds", settings.rounds, "must be at least 2, of blocks (--block) of at least one step")
    check_model(settings.model)
    schedule = ScheduleConfig("1f1b", settings.microbatches)
    job_schedule(schedule, stages=STAGES, layers=settings.layers, batch=settings.batch)
    seconds, losses = measure(settings)
    ratios = [theirs / own for own, theirs in zip(seconds["helixrt"], seconds["torch"], strict=True)]
    spreads = {
        "helixrt_steps_per_s": Spread.of([1 / s for s in seconds["helixrt"]]),
        "torch_pipelining_steps_per_s": Spread.of([1 / s for s in seconds["torch"]]),
        "ratio": Spread.of(ratios),
    }
    print(f"pipeline, pp={STAGES}, 1F1B, {settings.microbatches} micro-batches, {settings.family}: steps/s")
    print_spreads(spreads)
    print(f"  last loss: {losses['helixrt']:.5f} and {losses['torch']:.5f} nats")
    write(args.json, "pipeline", asdict(settings), spreads, losses=losses)
    return 0
