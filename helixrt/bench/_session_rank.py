"""What the ranks of `helixrt bench session` run: steps of a session, and of a plain loop in the same process, in turn.

In: `Settings`, in the environment. Out: a `RankFigures` as JSON in the folder of the measurement. The first step of a block is
not counted: its quorum formed while the other side ran.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import helixrt
from helixrt.job.session import Session
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk

VARIABLE = "HELIXRT_BENCH_SESSION"  # of the environment: the settings
CLIP = 1.0
_SEED, _BATCHES = 5, 16


@dataclass(frozen=True)
class Settings:
    """`rounds` pairs of blocks of `block` steps each are counted, after one that warms up. `store`: of the process group of the
    other side, as host:port. `calls`: count Python calls instead of time."""

    folder: str
    rounds: int
    block: int
    model: ModelConfig = field(default_factory=ModelConfig)
    batch: int = 16
    seq_len: int = 128
    store: str = ""
    calls: bool = False

    @property
    def steps(self) -> int:
        return (self.rounds + 1) * self.block

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Settings:
        raw = json.loads(text)
        return Settings(**{**raw, "model": ModelConfig(**raw["model"])})


@dataclass
class Side:
    """What one side took. `seconds`: per counted step, one figure a block; `cpu_seconds`, `switches` (voluntary context
    switches) likewise, of all threads of the process."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    loss: float = 0.0  # of the last step


@dataclass
class RankFigures:
    """`spans`: when the last bucket of each counted step was handed out and when its update was done, in seconds of the
    machine's monotonic clock. `calls`: Python calls per step of each thread, by the thread's name."""

    helixrt: Side = field(default_factory=Side)
    other: Side = field(default_factory=Side)
    spans: list[tuple[float, float]] = field(default_factory=list)
    calls: dict[str, float] = field(default_factory=dict)

    def write(self, settings: Settings, replica: int) -> None:
        Path(settings.folder, f"rank{replica}.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(settings: Settings, replica: int) -> RankFigures:
        raw = json.loads(Path(settings.folder, f"rank{replica}.json").read_text())
        spans = [(handed, done) for handed, done in raw["spans"]]
        return RankFigures(Side(**raw["helixrt"]), Side(**raw["other"]), spans, raw["calls"])


class BlockClock:
    """Measures blocks of one side; `step` is called after each step."""

    def __init__(self, side: Side, block: int) -> None:
        self._side, self._block, self._count = side, block, 0
        self._begun: tuple[float, float, int] = (0.0, 0.0, 0)

    def step(self) -> None:
        self._count += 1
        place = self._count % self._block
        if place == 1:
            self._begun = self._now()
        elif place == 0 and self._count > self._block:
            seconds, cpu_seconds, switches = (b - a for a, b in zip(self._begun, self._now(), strict=True))
            steps = self._block - 1
            self._side.seconds.append(seconds / steps)
            self._side.cpu_seconds.append(cpu_seconds / steps)
            self._side.switches.append(switches / steps)

    @staticmethod
    def _now() -> tuple[float, float, int]:
        return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


class CallCounter:
    """Counts Python calls of the threads that are started after it was made, by the names of the threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._counts[threading.current_thread().name] += 1

    def take(self) -> Counter[str]:
        """The counts since the last call."""
        taken, self._counts = self._counts, Counter()
        return taken

    def close(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)


def tiny() -> nn.Module:
    """So small that hardly anything but the cost of the session shows."""
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def _settings() -> Settings:
    return Settings.from_text(os.environ[VARIABLE])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loop(
    session: Session,
    settings: Settings,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    other: Callable[[int], None],
    data: list[Any],
) -> RankFigures:
    """The session's side; `other(first)` runs a block of the other side, from the batch at `first` on."""
    figures = RankFigures()
    clock = BlockClock(figures.helixrt, settings.block)
    counter = CallCounter() if settings.calls else None
    optimizer = _optimizer(model)
    session.register(model=model, optimizers=[optimizer], clip_norm=CLIP)
    loss: Any = 0.0
    for step in session.steps(data, until=settings.steps):
        for batch in step:
            step.backward(loss_of(model, batch))
        handed_s = time.monotonic()
        done = step.commit()
        updated_s = time.monotonic()
        loss = done.loss
        session.log({"loss": loss})
        clock.step()
        if step.number > settings.block and step.number % settings.block != 1:
            figures.spans.append((handed_s, updated_s))
        if step.number % settings.block == 0:
            if counter is not None and step.number == settings.block:
                counter.take()
            elif counter is None:
                other(step.number - settings.block)
    if counter is not None:
        figures.calls = {name: count / (settings.steps - settings.block) for name, count in counter.take().items()}
        counter.close()
    figures.helixrt.loss = float(loss)
    return figures


def _plain_loop(
    settings: Settings, model: nn.Module, loss_of: Callable[[nn.Module, Any], torch.Tensor], data: list[Any], side: Side
) -> Callable[[int], None]:
    """Runs a block of a loop without a session, from the batch at `first` on."""
    optimizer, clock = _optimizer(model), BlockClock(side, settings.block)

    def block(first: int) -> None:
        for number in range(first, first + settings.block):
            loss = loss_of(model, data[number % len(data)])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            side.loss = float(loss)  # read in each step, as the session's is
            clock.step()

    return block


def alone(session: helixrt.Session) -> None:
    """One replica beside the same loop without a session."""
    settings = _settings()
    generator = torch.Generator().manual_seed(_SEED)
    data = [(torch.randn(8, 32, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(_BATCHES)]
    model = session.parallelize(tiny())
    bare = copy.deepcopy(model)
    side = Side()

    def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(module(batch[0]), batch[1])

    figures = _loop(session, settings, model, loss_of, _plain_loop(settings, bare, loss_of, data, side), data)
    figures.other = side
    figures.write(settings, session.replica)


def pair(session: helixrt.Session) -> None:
    """One of two replicas beside torch's DistributedDataParallel over Gloo, in the same two processes."""
    settings = _settings()
    host, port = settings.store.rsplit(":", 1)
    client = dist.PrefixStore("ddp", dist.TCPStore(host, int(port), is_master=False))
    dist.init_process_group(
        "gloo", store=client, rank=session.replica, world_size=session.replicas, timeout=timedelta(seconds=600)
    )
    generator = torch.Generator().manual_seed(_SEED + session.replica)
    shape = (settings.batch, settings.seq_len + 1)
    data = [torch.randint(0, settings.model.vocab, shape, generator=generator) for _ in range(_BATCHES)]
    model = session.parallelize(build_chunk(settings.model, settings.seq_len, 0, 1, seed=_SEED))
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    side = Side()

    def loss_of(module: nn.Module, tokens: Any) -> torch.Tensor:
        return token_loss(module(tokens[:, :-1]), tokens[:, 1:])

    figures = _loop(session, settings, model, loss_of, _plain_loop(settings, parallel, loss_of, data, side), data)
    mean = torch.tensor([side.loss])
    dist.all_reduce(mean)  # the session's loss is the mean over replicas
    side.loss = float(mean) / session.replicas
    figures.other = side
    figures.write(settings, session.replica)
    dist.barrier()
    dist.destroy_process_group()
