"""Scripts that tests start: `python launched.py CASE FOLDER [REPLICAS [RESUME]]`. Each case is a train function of a tiny
model. With CHECKPOINTS=storage in the environment checkpoints are in a storage: the folder `bucket` in FOLDER."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import helixrt
from helixrt.job.leaving import ASK_S
from helixrt.job.step import Committed
from helixrt.replica.run_keys import leave_key
from tests.examples.matrix import Average
from tests.job import object_store

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
REPLICAS = int(sys.argv[3]) if len(sys.argv) > 3 else 2
RESUME = sys.argv[4] if len(sys.argv) > 4 else None
STEPS, ACCUMULATE = 12, 2
STORAGE = f"{object_store.PROTOCOL}://{FOLDER.resolve()}/bucket" if os.environ.get("CHECKPOINTS") == "storage" else ""


class Carry:
    """A sum over all batches of one replica: state per replica."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.total = state["total"]


def build(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))


def data(items: int = 96) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(items, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def drain(session: helixrt.Session, done: Committed) -> None:
    """Replica 1 is drained in step 3 and asked back in step 8. Step 9 waits until it asks for a quorum again; then steps are
    slow, since it can come in only between two."""
    if done.step in (3, 8):
        back = ["--back"] if done.step == 8 else []
        command = [sys.executable, "-m", "helixrt.cli", "drain", "1", "--run", str(FOLDER / "latest"), *back]
        with session.busy("running the command", 120.0):
            subprocess.run(command, check=True)
    if done.step >= 9:
        flight = FOLDER / "latest" / "flight" / "r1.pp0.inc1.jsonl"
        with session.busy("waiting for the other replica", 120.0):
            while not (flight.exists() and '"quorum_join"' in flight.read_text()):
                time.sleep(0.02)
            time.sleep(3.0)


def await_request(session: helixrt.Session, replica: int) -> None:
    store = session._host._runtime.context.store  # type: ignore[attr-defined]
    with session.busy("waiting until the run's store has the request", 60.0):
        while store.get(leave_key(replica, 0)) is None:
            time.sleep(0.02)
        time.sleep(2 * ASK_S)  # the next quorum reads it


def train(session: helixrt.Session) -> None:
    if CASE == "other weights" and session.replica == 1:
        torch.manual_seed(99)
    model = session.parallelize(build(7 if CASE == "other layout" and session.replica == 1 else 6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    average, carry = Average(model), Carry()
    session.register(
        model=model,
        optimizers=[optimizer],
        schedulers=[scheduler],
        extra={"average": average},
        per_replica={"carry": carry},
    )

    @session.update
    def update(record: object) -> None:
        optimizer.step()
        scheduler.step()
        average.follow(model)

    items = data(108 if CASE == "longer loader" and session.replica == 1 else 96)
    sampler = session.sampler(items, shuffle=True)
    workers = 2 if CASE == "sound" else 0
    loader = torch.utils.data.DataLoader(items, batch_size=4, sampler=sampler, num_workers=workers)
    session.evaluate(lambda: {"squares": sum((p * p).sum() for p in model.parameters())}, every=5, at_start=True)
    for step in session.steps(loader, until=STEPS, accumulate=ACCUMULATE):
        for x, y in step:
            carry.total = carry.total + x.double().sum()
            step.backward(nn.functional.mse_loss(model(x), y, reduction="sum"), weight=len(x))
        done = step.commit()
        session.log({"loss": done.loss})
        if CASE == "exception" and session.replica == 1 and done.step == 3 and not (FOLDER / "raised").exists():
            (FOLDER / "raised").touch()
            raise ValueError("the disk is full")
        if CASE == "native" and session.replica == 1 and done.step == 3 and not (FOLDER / "broke").exists():
            (FOLDER / "broke").touch()
            ctypes.string_at(0)
        if CASE == "all die" and done.step == 7 and not (FOLDER / f"died{session.replica}").exists():
            with session.busy("waiting for the checkpoint of step 5", 60.0):
                while not list(FOLDER.glob("bucket/*/*/complete.json" if STORAGE else "latest/checkpoints/*/complete.json")):
                    time.sleep(0.02)
            (FOLDER / f"died{session.replica}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "interrupted" and session.replica == 0 and done.step == 8 and not (FOLDER / "interrupted").exists():
            with session.busy("waiting for the checkpoint of step 5", 60.0):
                while not list(FOLDER.glob("bucket/*/*/complete.json" if STORAGE else "latest/checkpoints/*/complete.json")):
                    time.sleep(0.02)
            (FOLDER / "interrupted").touch()
            os.kill(os.getppid(), signal.SIGTERM)
            await_request(session, 0)
        if CASE == "stop" and session.replica == 1 and done.step == 4:
            session.stop("the loss is low enough")
        if CASE == "sigterm" and session.replica == 1 and done.step == 3 and not (FOLDER / "asked").exists():
            (FOLDER / "asked").touch()
            os.kill(os.getpid(), signal.SIGTERM)
            await_request(session, 1)
        if CASE == "drain" and session.replica == 0:
            drain(session, done)
    (FOLDER / f"carry{session.replica}").write_text(repr(float(carry.total)))
    if CASE == "sound":
        time.sleep(25.0 if session.replica == 0 else 0.0)  # longer than ranks of the built-in job may stay
        (FOLDER / f"saved{session.replica}").touch()


if __name__ == "__main__" or (CASE == "no guard" and "HELIXRT_RANK" in os.environ):
    options = helixrt.RunOptions(checkpoint_every=5, checkpoint_path=STORAGE, loader_every=4)
    result = helixrt.run(train, replicas=REPLICAS, storage=FOLDER, seed=4, resume=RESUME, options=options)
    print(f"ended at step {result.step} of {result.lineage} {result.stopped}")
