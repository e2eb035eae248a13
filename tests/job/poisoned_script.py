"""`python poisoned_script.py FOLDER`: one replica in one process, which is killed whenever it works on the batch at position
POISONED. Steps are short, so records of the steps before are on their way to the run's store then."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import helixrt
from helixrt.job.config import JobConfig

FOLDER = Path(sys.argv[1])
STEPS, POISONED, EVERY = 120, 57, 20


def train(session: helixrt.Session) -> None:
    model = session.parallelize(torch.nn.Linear(4, 1))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=1e-3)])
    for step in session.steps([torch.ones(2, 4)] * 16, until=STEPS):
        for x in step:
            if step.batch == POISONED:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).square().mean())
        step.commit()


if __name__ == "__main__":
    options = helixrt.RunOptions(checkpoint_every=EVERY, restarts=3, base=JobConfig(on_poison="skip"))
    helixrt.run(train, replicas=1, storage=FOLDER, device="cpu", launcher="local", options=options)
