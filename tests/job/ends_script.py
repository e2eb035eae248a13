"""`python ends_script.py FOLDER CASE [REPLICAS [RANKS]]`: a run of a tiny model that ends as CASE says."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import helixrt
from helixrt.job.config import JobConfig
from helixrt.passes.errors import CaptureError

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
REPLICAS = int(sys.argv[3]) if len(sys.argv) > 3 else 2
RANKS = int(sys.argv[4]) if len(sys.argv) > 4 else 1  # of a replica

UNTIL, LIVES = {"killed often": 10_000, "signal SIGHUP nohup": 40}.get(CASE, 10_000 if CASE.startswith("signal") else 3), 6


def live_for_a_step(session: helixrt.Session) -> None:
    """Replica 1 kills itself after the first step of each life but the last one, which ends the run."""
    lives = len(list(FOLDER.glob("life*")))
    if session.replica == 0:
        time.sleep(0.05)
    elif session.committed and lives < LIVES:
        (FOLDER / f"life{lives}").touch()
        if lives + 1 < LIVES:
            os.kill(os.getpid(), signal.SIGKILL)
        session.stop("enough")


def train(session: helixrt.Session) -> None:
    if CASE == "exit before" and session.replica == 0:
        sys.exit(0)
    if CASE == "raise before":
        raise ValueError("no such file")
    if CASE == "capture":
        raise CaptureError("model.py:3", "it prints", "do not") from KeyError("inputs")
    model = session.parallelize(torch.nn.Linear(8, 1))
    session.register(model=model, optimizers=[torch.optim.AdamW(model.parameters())])
    for step in session.steps([torch.full((4, 8), 1.0 + session.replica)] * 20, until=UNTIL):
        for x in step:
            loss = (model(x) - 1).square().mean()
            if CASE in ("raise in", "raise changed") and step.number == 2:
                if CASE == "raise changed":
                    with torch.no_grad():
                        next(model.parameters()).add_(1)
                raise ValueError("a bad record")
            last = (session.replica, session.shard) == (1, RANKS - 1)
            if CASE == "raise once" and last and step.number == 2 and not (FOLDER / "raised").exists():
                (FOLDER / "raised").touch()
                raise ValueError("a flaky library")
            step.backward(loss)
        step.commit()
        if CASE == "killed often":
            live_for_a_step(session)
        if CASE.startswith("signal"):
            time.sleep(0.05)
            if session.replica == 0 and step.number == 3:
                for _ in range(1 + ("twice" in CASE)):  # as a shell and the kernel do when a terminal is closed
                    os.kill(os.getppid(), getattr(signal, CASE.split()[1]))
                    time.sleep(0.1)
        if CASE == "exit in" and session.replica == 0:
            sys.exit()
    if CASE == "exit behind":
        sys.exit(0)
    if CASE == "raise behind" and session.replica == 0:
        raise RuntimeError("cannot write the model")


if __name__ == "__main__":
    if "nohup" in CASE:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    options = helixrt.RunOptions(base=JobConfig(driver_away_s=60.0 if "kept" in CASE else 0.0))
    helixrt.run(train, replicas=REPLICAS, mesh=helixrt.Mesh(dp_shard=RANKS), storage=FOLDER, options=options)
    print("returned")
