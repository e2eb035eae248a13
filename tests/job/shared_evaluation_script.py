"""A user's script whose validation is shared by its replicas: `python shared_evaluation_script.py CASE FOLDER`.

CASE "killed": replica 1 is killed once in the validation of step 4, before it has told its sums, and comes back; replica 2 is
killed once in that of the last step, and comes back. "given up": replica 1 is killed in the validation of the last step, and is
not started again. "calm": nobody is killed.
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
STEPS, EVERY, REPLICAS, ITEMS = 24, 4, 3, 50


def build() -> torch.nn.Linear:
    torch.manual_seed(4)
    return torch.nn.Linear(4, 1).double()


def data(seed: int, items: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(items, 1, generator=generator).double())


def errors(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y, reduction="sum")


def kill_once(name: str) -> None:
    if not (FOLDER / name).exists():
        (FOLDER / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(session: helixrt.Session) -> None:
    model = session.parallelize(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    session.register(model=model, optimizers=[optimizer])
    held_out = data(5, ITEMS)

    def validate(part: helixrt.Part) -> helixrt.PartSums:
        reached = session.step is not None and session.step.number
        x, y = held_out[list(part.of(ITEMS))]
        total = errors(model, x, y)
        if CASE == "killed" and session.replica == 1 and reached == EVERY:
            kill_once("killed1")
        if CASE == "killed" and session.replica == 2 and reached == STEPS:
            kill_once("killed2")
        if CASE == "given up" and session.replica == 1 and reached == STEPS:
            kill_once("killed1")
        return helixrt.PartSums({"loss": total, "doubled": 2 * total.item()}, weight=len(x))

    session.evaluate_shared(validate, every=EVERY)
    items = data(3, 96)
    loader = torch.utils.data.DataLoader(items, batch_size=4, sampler=session.sampler(items, shuffle=True))
    for step in session.steps(loader, until=STEPS):
        for x, y in step:
            step.backward(errors(model, x, y), weight=len(x))
        done = step.commit()
        if CASE == "killed" and session.replica == 0 and step.number > 8 and 1 not in done.contributors:
            time.sleep(3.0)  # the replica that starts again comes in before the end


if __name__ == "__main__":
    options = helixrt.RunOptions(checkpoint_every=0, restarts=0 if CASE == "given up" else 3)
    result = helixrt.run(train, replicas=REPLICAS, storage=FOLDER / "runs", seed=1, options=options)
    print(f"ended at step {result.step}")
