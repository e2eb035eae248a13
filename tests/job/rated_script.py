"""`python -m tests.job.rated_script STEPS`: two stages whose messages take longer than their operations, on a slow link."""

from __future__ import annotations

import sys

import torch
from torch import nn

import helixrt

WIDTH, ROWS, MICROBATCHES = 1024, 32, 6
MESSAGE_BYTES = 4 * WIDTH * ROWS


def main(steps: int) -> None:
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    example = torch.zeros(ROWS, WIDTH)
    stages = helixrt.Stages(
        parts, nn.functional.mse_loss, (example, example), example, microbatches=MICROBATCHES, schedule="gpipe"
    )
    session = helixrt.init(mesh=helixrt.Mesh(pp=2), seed=3, device="cpu")
    model = session.parallelize(stages)
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.05)])
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(7))
    for step in session.steps([(x, x.flip(1))], until=steps):
        for batch, target in step:
            step.train(model, batch, target=target)
        session.log({"loss": step.commit().loss})


if __name__ == "__main__":
    main(int(sys.argv[1]))
