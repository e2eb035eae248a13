"""How long F, B and W of each chunk of a model take, measured chunk by chunk, each alone in this process.

In: a model's configuration, into how many chunks it is cut, the shape of a micro-batch. Out: medians in ms per chunk. A
chunk is captured and split as the job does it where W runs apart from B, and runs on one thread, whose processor time counts:
what else the machine does hardly matters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from helixrt.pipeline.buckets import GradientBuckets
from helixrt.pipeline.graph_stage import Example, GraphStage
from helixrt.pipeline.program import compile_program
from helixrt.pipeline.stage import StageChunk, Task
from helixrt.schedule.costs import uniform
from helixrt.schedule.generators import policies
from helixrt.schedule.ir import Op
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk

SEED = 7
WARM_UP = 2  # micro-batches before those that count


@dataclass(frozen=True)
class ChunkTimes:
    """Medians, in ms."""

    forward_ms: float
    backward_ms: float
    weight_ms: float


def chunk_times(model: ModelConfig, chunks: int, batch: int, seq_len: int, samples: int) -> list[ChunkTimes]:
    """Of each chunk, with micro-batches of `batch` sequences. Raises ConfigError for a model that cannot be built or cut so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_measured(model, chunk, chunks, batch, seq_len, samples) for chunk in range(chunks)]
    finally:
        torch.set_num_threads(threads)


def _measured(model: ModelConfig, chunk: int, chunks: int, batch: int, seq_len: int, samples: int) -> ChunkTimes:
    module, last = build_chunk(model, seq_len, chunk, chunks, seed=SEED), chunk + 1 == chunks
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = torch.randint(0, model.vocab, (2, batch, seq_len), generator=generator)
    hidden = torch.randn(batch, seq_len, model.dim, generator=generator)
    x, target = tokens if chunk == 0 else hidden, targets if last else None
    stage = GraphStage({chunk: StageChunk(module, token_loss if last else None)}, {chunk: Example(x, target)})
    stage.prepare(compile_program(policies.build("zb-h1", uniform(chunks), chunks), chunk))
    buckets = GradientBuckets({chunk: module}, bucket_bytes=1 << 22)
    buckets.begin(lambda bucket: None)
    taken: dict[Op, list[float]] = {Op.F: [], Op.B: [], Op.W: []}

    def timed(task: Task) -> torch.Tensor | None:
        op, begun_s = task.op, time.thread_time()
        (result,) = stage.compute([task], buckets)
        taken[op].append((time.thread_time() - begun_s) * 1e3)
        return result

    for number in range(WARM_UP + samples):
        y = timed(Task(Op.F, chunk, number, x, target))
        assert y is not None
        timed(Task(Op.B, chunk, number, y.new_full((), 1.0) if last else torch.randn(y.shape, generator=generator)))
        timed(Task(Op.W, chunk, number, None))
    return ChunkTimes(*(median(taken[op][WARM_UP:]) for op in (Op.F, Op.B, Op.W)))
