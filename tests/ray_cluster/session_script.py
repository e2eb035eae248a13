"""A user's script for a Ray job: `python session_script.py CASE FOLDER`.

`killed`: replica 1 ends by SIGKILL after step 3. Replica 0 waits in step 5 until the new incarnation has begun, and goes on
slowly until that takes part again. `no commit`: a step is not committed. `lambda`: the train function is a lambda.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import helixrt

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
STEPS = 40  # seconds enough for the new incarnation to take part, while steps are slow
KILLED, AGAIN, BACK = FOLDER / "killed", FOLDER / "again", FOLDER / "back"


def train(session: helixrt.Session, steps: int) -> None:
    if session.replica == 1 and KILLED.exists():
        AGAIN.touch()
    model = session.parallelize(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.register(model=model, optimizers=[optimizer])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 4, generator=generator)
    items = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(items, batch_size=4, sampler=session.sampler(items, shuffle=True))
    for step in session.steps(loader, until=steps):
        for inputs, targets in step:
            step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        if CASE == "no commit":
            continue
        done = step.commit()
        session.log({"loss": done.loss})
        if session.replica == 1 and KILLED.exists():
            BACK.touch()
        if session.replica == 1 and done.step == 3 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if session.replica == 0 and done.step >= 5 and not BACK.exists():
            with session.busy("waiting for the other replica", 200.0):
                while not AGAIN.exists():
                    time.sleep(0.02)
                time.sleep(0.5)


if __name__ == "__main__":
    replicas = 1 if CASE == "no commit" else 2
    function = (lambda session: None) if CASE == "lambda" else train
    options = helixrt.RunOptions(step_timeout_s=240.0, checkpoint_every=0)  # a busy machine may take minutes to start ranks
    arguments = {} if CASE == "lambda" else {"steps": STEPS}
    result = helixrt.run(function, replicas=replicas, storage=FOLDER, seed=1, arguments=arguments, options=options)
    print(f"ended at step {result.step} of {result.lineage}")
