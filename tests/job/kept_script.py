"""A user's script whose run has a keeper: `python kept_script.py FOLDER [RESUME]`.

Two replicas train, slowly enough to be seen, until the file `stop` is in FOLDER. They leave their process ids there.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import helixrt
from helixrt.job.config import JobConfig

FOLDER = Path(sys.argv[1])


def train(session: helixrt.Session) -> None:
    (FOLDER / f"r{session.replica}.{os.getpid()}").touch()
    model = session.parallelize(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register(model=model, optimizers=[optimizer])
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(3))
    items = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(items, batch_size=4, sampler=session.sampler(items, shuffle=True))
    for step in session.steps(loader, until=100_000):
        for inputs, targets in step:
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        done = step.commit()
        session.log({"loss": done.loss})
        if (FOLDER / "stop").exists():
            session.stop("the test has seen enough")
        time.sleep(0.05)


if __name__ == "__main__":
    base = replace(JobConfig(), driver_away_s=float(os.environ.get("AWAY_S", "60")))
    options = helixrt.RunOptions(step_timeout_s=60.0, checkpoint_every=20, base=base)
    resume = sys.argv[2] if len(sys.argv) > 2 else None
    how = os.environ.get("LAUNCHER", "auto")
    result = helixrt.run(train, replicas=2, storage=FOLDER / "runs", seed=1, options=options, resume=resume, launcher=how)
    print(f"ended at step {result.step} of {result.lineage}")
