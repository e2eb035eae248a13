"""A user's script for a Ray cluster: `python train.py STORAGE SIGNS [RESUME]`.

Three replicas of one rank train until the file `stop` is in SIGNS. Each leaves its host's address and its process there.
CHECKPOINT_EVERY in the environment: steps between two checkpoints; none by default.
AWAY_S: how long the ranks train on without a driver.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import helixrt
from helixrt.job.config import JobConfig

STORAGE, SIGNS = Path(sys.argv[1]), Path(sys.argv[2])


def train(session: helixrt.Session) -> None:
    model = session.parallelize(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register(model=model, optimizers=[optimizer])
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
    items = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(items, batch_size=4, sampler=session.sampler(items, shuffle=True))
    (SIGNS / f"r{session.replica}.process.{os.getpid()}").touch()
    for step in session.steps(loader, until=100_000):
        for inputs, targets in step:
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        done = step.commit()
        session.log({"loss": done.loss})
        (SIGNS / f"r{session.replica}.on.{os.environ.get('HELIXRT_ADDRESS', 'here')}").touch()
        if (SIGNS / "stop").exists():
            session.stop("the test has seen enough")
        time.sleep(0.1)


if __name__ == "__main__":
    every = int(os.environ.get("CHECKPOINT_EVERY", "0"))
    base = JobConfig(driver_away_s=float(os.environ.get("AWAY_S", "-1")))
    options = helixrt.RunOptions(step_timeout_s=30.0, checkpoint_every=every, restarts=10, base=base)
    (SIGNS / f"driver.process.{os.getpid()}").touch()
    resume = sys.argv[3] if len(sys.argv) > 3 else None
    result = helixrt.run(train, replicas=3, storage=STORAGE, seed=1, options=options, launcher="ray", resume=resume)
    print(f"ended at step {result.step} of {result.lineage}")
