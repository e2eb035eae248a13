"""What the processes of `helixrt bench cuda_session` run: a rank of a session, and of the same loop in plain PyTorch.

In: `Settings`. Out: JSON files in the folder of the measurement. Times are Unix times of one machine.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from helixrt.job.session import Session
from helixrt.replica.contracts import Number
from helixrt.replica.store import split_address
from helixrt.train.config import ModelConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk

REPLICAS = 2
KILLED = 1  # the replica that is killed once
SEED, CLIP = 5, 1.0
_BATCHES = 8
_TIMEOUT_S = 120.0
_UNTIL = 1_000_000


Row = tuple[int, int, list[float], list[float]]  # step, replicas, and the times of a `Commit` when they are known


@dataclass(frozen=True)
class Settings:
    """`kill_at`: the step after whose commit a replica is killed; `after`: the steps of both replicas behind its return. The
    run ends at the latest `limit_s` after its first step. `steps`: of each block of the other sides; `steps_one`: of the
    session of one replica, and of its plain loop."""

    folder: str
    device: str
    dtype: str
    model: ModelConfig
    batch: int
    seq_len: int
    kill_at: int
    after: int
    limit_s: float
    steps: int
    steps_one: int

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> Settings:
        return Settings(**{**raw, "model": ModelConfig(**raw["model"])})

    def built(self) -> nn.Module:
        return build_chunk(self.model, self.seq_len, 0, 1, seed=SEED)

    def data(self, replica: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(SEED + replica)
        shape = (self.batch, self.seq_len + 1)
        return [torch.randint(0, self.model.vocab, shape, generator=generator) for _ in range(_BATCHES)]


@dataclass
class Commit:
    """`backward_s`: when the device was done with the step's backward; `committed_s`: when it was done with its update."""

    step: int
    replicas: int
    backward_s: float
    committed_s: float


@dataclass
class RankFigures:
    commits: list[Commit] = field(default_factory=list)
    peak_bytes: int = 0  # of device memory
    parameters: int = 0
    losses: list[float] = field(default_factory=list)  # of the first steps

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(file: Path) -> RankFigures:
        raw = json.loads(file.read_text())
        return RankFigures(**{**raw, "commits": [Commit(**each) for each in raw["commits"]]})


class DeviceTimes:
    """When the device has come to points of its work, without a wait of the thread that queues it: another one waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: queue.SimpleQueue[tuple[torch.cuda.Event | None, list[float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="bench-device-times", daemon=True)
        self._thread.start()

    def point(self) -> list[float]:
        """A list that gets the time at which what the calling thread has queued is done."""
        found: list[float] = []
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
        else:
            found.append(time.time())
        self._points.put((event, found))
        return found

    def _wait(self) -> None:
        while (point := self._points.get()) is not None:
            event, found = point
            if event is not None:
                event.synchronize()
                found.append(time.time())

    def close(self) -> None:
        """All points have their times then."""
        self._points.put(None)
        self._thread.join()


@contextmanager
def device_times(device: torch.device) -> Iterator[DeviceTimes]:
    times = DeviceTimes(device)
    try:
        yield times
    finally:
        times.close()


def train(session: Session, settings: Mapping[str, Any]) -> None:
    """A rank of the session. Replica 0 ends the run when the other one is back for so many steps, or at the limit."""
    given = Settings.from_plain(settings)
    folder, killed = Path(given.folder), Path(given.folder, "killed")
    first_life = not killed.exists()
    model = session.parallelize(given.built())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.register(model=model, optimizers=[optimizer], clip_norm=CLIP)
    figures = RankFigures(parameters=sum(p.numel() for p in model.parameters()))
    rows: list[Row] = []
    losses: list[Number] = []
    together, began_s, asked = 0, time.monotonic(), False
    with device_times(session.device) as times:
        for step in session.steps(given.data(session.replica), until=_UNTIL):
            for tokens in step:
                tokens = tokens.to(session.device)
                step.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
            backward = times.point()
            done = step.commit()
            if not done.committed:
                continue
            rows.append((done.step, len(done.contributors), backward, times.point()))
            if len(losses) < given.steps:
                losses.append(done.loss)
            if session.replica == KILLED and first_life and done.step == given.kill_at:
                killed.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            if session.replica != KILLED and not asked:
                together += len(done.contributors) == REPLICAS and done.step > given.kill_at
                if together > given.after or time.monotonic() - began_s > given.limit_s:
                    session.stop("all is measured")
                    asked = True
    figures.commits = _commits(rows)
    figures.losses = [float(loss) for loss in losses]
    figures.peak_bytes = _peak_bytes(session.device)
    figures.write(folder / f"session{session.replica}.json")


def train_one(session: Session, settings: Mapping[str, Any]) -> None:
    """The only replica of a session, and then the plain loop in the same process."""
    given = Settings.from_plain(settings)
    model = session.parallelize(given.built())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.register(model=model, optimizers=[optimizer], clip_norm=CLIP)
    rows: list[Row] = []
    losses: list[Number] = []
    with device_times(session.device) as times:
        for step in session.steps(given.data(0), until=given.steps_one):
            for tokens in step:
                tokens = tokens.to(session.device)
                step.backward(token_loss(model(tokens[:, :-1]), tokens[:, 1:]))
            backward = times.point()
            losses.append(step.commit().loss)
            rows.append((step.number, 1, backward, times.point()))
    own = RankFigures(_commits(rows), 0, 0, [float(loss) for loss in losses])
    own.write(Path(given.folder, "one.session.json"))
    plain = _loop(replace(given, steps=given.steps_one), given.built().to(session.device), session.device, 0)
    plain.write(Path(given.folder, "one.plain.json"))


def other_side(rank: int, settings: Settings, address: str, name: str) -> None:
    """The same loop in a process without a session: first alone, then with DistributedDataParallel over Gloo."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, port = split_address(address)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=REPLICAS)
    for side in ("plain", "ddp"):
        model = settings.built().to(device)
        trained = nn.parallel.DistributedDataParallel(model) if side == "ddp" else model
        dist.barrier()
        _loop(settings, trained, device, rank).write(Path(settings.folder, f"{name}.{side}{rank}.json"))
        del model, trained
    dist.destroy_process_group()


def _loop(settings: Settings, model: nn.Module, device: torch.device, rank: int) -> RankFigures:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    figures = RankFigures(parameters=sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data, losses = settings.data(rank), []
    rows: list[Row] = []
    reduced = settings.dtype == "bfloat16"
    with device_times(device) as times:
        for number in range(settings.steps):
            tokens = data[number % len(data)].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=reduced):
                loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            backward = times.point()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            rows.append((number + 1, REPLICAS, backward, times.point()))
    figures.commits = _commits(rows)
    figures.losses = [float(loss) for loss in losses]
    figures.peak_bytes = _peak_bytes(device)
    return figures


def _commits(rows: Sequence[Row]) -> list[Commit]:
    """Called when all times are known."""
    return [Commit(step, replicas, backward[0], update[0]) for step, replicas, backward, update in rows]


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
