"""Train functions of a tiny model on the rank's device: `python cuda_script.py STEPS FOLDER SCRIPT CASE DEVICE [RESUME]`.
`tests/examples/killed.py` runs `train` too, and kills a replica.

CASE: `adamw` | `fused` are optimizers; `scaled` has float16 and a gradient scaler, whose scale is far too high at first.
`memory` and `waits` leave figures in FOLDER: bytes on the device, and where the host waits for it (one replica)."""

from __future__ import annotations

import gc
import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helixrt

SEED, BATCH, ITEMS = 1, 6, 96
WIDTH = 1024  # of the model whose memory is counted
_MARGIN = 4  # steps until every buffer and every kernel is there


class Model(nn.Module):
    """With running buffers, dropout, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.outer = nn.Linear(32, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


def data() -> torch.utils.data.TensorDataset:
    x = torch.randn(ITEMS, 8, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - y).square().sum()


def optimizer_of(model: nn.Module, case: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=case == "fused")


def train(session: helixrt.Session) -> None:
    case = sys.argv[4]
    if case in ("memory", "waits"):
        return {"memory": memory, "waits": waits}[case](session)
    model = session.parallelize(Model())
    scaler = torch.amp.GradScaler(session.device.type, init_scale=2.0**24, growth_interval=4) if case == "scaled" else None
    clip_norm = None if scaler is not None else 1.0
    session.register(model=model, optimizers=[optimizer_of(model, case)], scaler=scaler, clip_norm=clip_norm)
    given = data()
    loader = torch.utils.data.DataLoader(given, batch_size=BATCH, sampler=session.sampler(given, shuffle=True))
    for step in session.steps(loader, until=int(sys.argv[1])):
        for x, y in step:
            x, y = x.to(session.device), y.to(session.device)
            # `enabled=False` would switch the session's own autocast off, which it has for dtype="bfloat16"
            with nullcontext() if scaler is None else torch.autocast(session.device.type, torch.float16):
                loss = loss_of(model, x, y)
            step.backward(loss, weight=len(x))
        done = step.commit()
        session.log({"loss": done.loss, "applied": float(done.applied)})


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def memory(session: helixrt.Session) -> None:
    """Bytes that a plain loop's tensors hold behind an update, gradients included, and those of the session by kind."""
    batches = [torch.randn(4, WIDTH, device=session.device) for _ in range(4)]

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if session.device.type == "cuda" else 0

    plain = wide().to(session.device)
    optimizer: Any = torch.optim.AdamW(plain.parameters())
    for x in batches[:2]:
        optimizer.zero_grad()
        plain(x).square().sum().backward()
        optimizer.step()
    both = held()
    del plain, optimizer
    empty = held()  # but for what the libraries hold
    model = session.parallelize(wide())
    session.register(model=model, optimizers=[torch.optim.AdamW(model.parameters())])
    worst: dict[str, int] = {}
    most = 0
    for step in session.steps(batches, until=int(sys.argv[1])):
        for x in step:
            step.backward(model(x).square().sum())
            most = max(most, held() - empty)
        step.commit()
        live = session._host._runtime._worker.live_bytes()  # type: ignore[attr-defined]
        for kind, found in live.items():
            worst[kind] = max(worst.get(kind, 0), found.get(session.device.type, 0))
        most = max(most, held() - empty)
    set_bytes = sum(4 * p.numel() for p in model.parameters())
    figures = {"plain": both - empty, "session": most, "set": set_bytes, "live": worst}
    Path(sys.argv[2], f"memory{session.replica}.json").write_text(json.dumps(figures))


def waits(session: helixrt.Session) -> None:
    """A wait for the device in forward or backward is an error; those of a commit are noted, with the functions of the package
    that they are in. One replica: all its waits are in this thread. The last step's checkpoint is copied in its commit."""
    model = session.parallelize(wide())
    session.register(model=model, optimizers=[torch.optim.AdamW(model.parameters())], clip_norm=1.0)
    batches = [torch.randn(4, WIDTH, device=session.device) for _ in range(4)]
    places: list[list[str]] = []
    for step in session.steps(batches, until=int(sys.argv[1])):
        watched = step.number > _MARGIN
        for x in step:
            torch.cuda.set_sync_debug_mode("error" if watched else "default")
            step.backward(model(x).square().sum(), weight=len(x))
        torch.cuda.set_sync_debug_mode("warn" if watched else "default")
        with noted_waits() as found:
            step.commit()
        torch.cuda.set_sync_debug_mode("default")
        if watched:
            places.append(found)
    Path(sys.argv[2], "waits.json").write_text(json.dumps(places))


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Of each wait that torch warns of: the innermost functions of the package, from the outer to the inner one."""
    found: list[str] = []

    def note(message: Warning | str, *more: object) -> None:
        if "synchron" in str(message):
            stack = [frame for frame in traceback.extract_stack() if "/helixrt/" in frame.filename]
            found.append(" > ".join(f"{Path(frame.filename).stem}.{frame.name}:{frame.lineno}" for frame in stack[-4:]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found


if __name__ == "__main__":
    resume = sys.argv[6] if len(sys.argv) > 6 else None
    replicas = 1 if sys.argv[4] == "waits" else 2
    options = helixrt.RunOptions(step_timeout_s=240.0, checkpoint_every=4)
    helixrt.run(train, replicas=replicas, storage=sys.argv[2], seed=SEED, device=sys.argv[5], resume=resume, options=options)
