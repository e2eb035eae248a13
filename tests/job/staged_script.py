"""`python staged_script.py FOLDER STAGES [SHARDS [DEVICE]]`: two replicas of a small model in so many pipeline stages, each of
which is shared by so many dp_shard ranks (1), on the CPU or another device.

The last stage of replica 1 is killed once; replica 0 waits for its new process before it goes on, so that many steps are left
for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import helixrt

FOLDER, STAGES = Path(sys.argv[1]), int(sys.argv[2])
SHARDS = int(sys.argv[3]) if len(sys.argv) > 3 else 1
DEVICE = sys.argv[4] if len(sys.argv) > 4 else "cpu"
STEPS, BATCH, WIDTH = 60, 8, 6
KILLED, BACK = FOLDER / "killed", FOLDER / "back"


def parts(count: int) -> list[nn.Module]:
    """The same four layers, however they are cut."""
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    each = len(layers) // count
    return [nn.Sequential(*layers[each * number : each * (number + 1)]) for number in range(count)]


def train(session: helixrt.Session) -> None:
    example = torch.zeros(BATCH // 4, WIDTH)
    stages = helixrt.Stages(parts(STAGES), nn.functional.mse_loss, (example, example), example, microbatches=4)
    model = session.parallelize(stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], clip_norm=1.0)
    x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.TensorDataset(x, x.flip(1))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=session.sampler(data, shuffle=True))
    session.evaluate(lambda: {"loss": model.evaluate(x[:BATCH], target=x[:BATCH].flip(1))}, every=5)
    stage = model.place.stage
    assert (session.stream, session.streams) == (session.replica * SHARDS + session.shard, 2 * SHARDS)
    if session.replica == 1 and KILLED.exists():
        BACK.touch()
    for step in session.steps(loader, until=STEPS):
        for batch, target in step:
            step.train(model, batch, target=target)
        if session.replica == 1 and stage == STAGES - 1 and step.number == 4 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if session.replica == 0 and step.number == 6:
            with session.busy("waiting for replica 1", 120.0):
                while not BACK.exists():
                    time.sleep(0.05)
        done = step.commit()
        session.log({"loss": done.loss, "norm": done.grad_norm})


if __name__ == "__main__":
    mesh = helixrt.Mesh(pp=STAGES, dp_shard=SHARDS)
    options = helixrt.RunOptions(checkpoint_every=5)
    launcher = "environment" if "HELIXRT_STORE" in os.environ else "local"
    result = helixrt.run(
        train, replicas=2, mesh=mesh, storage=FOLDER, seed=4, device=DEVICE, launcher=launcher, options=options
    )
    print(f"ended at step {result.step}")
