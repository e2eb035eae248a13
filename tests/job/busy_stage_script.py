"""`python busy_stage_script.py FOLDER CHANNELS HANGS`: one replica of a small model in two pipeline stages.

The stages communicate over these channels. Each stage in turn is busy for longer than a step may take, and says so, while the
other one goes on to its next receive. With HANGS=WHEN:STAGE none is busy, and this stage sleeps once without saying so, before
or after a step's commit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import helixrt
from helixrt.job.config import JobConfig, PipelineConfig

STEPS, BATCH, WIDTH = 12, 8, 6
STEP_TIMEOUT_S, BUSY_S, HANG_S = 6.0, 14.0, 300.0
BUSY_BEFORE, BUSY_AFTER = {3: 1, 4: 0}, {6: 0, 7: 1}  # a step's commit: step -> stage
HANGS_AT = 9


def parts() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]


def export(session: helixrt.Session, mine: bool) -> None:
    if mine:
        with session.busy("export", 60.0):
            time.sleep(BUSY_S)


def hang(file: str, mine: bool) -> None:
    if mine and not Path(file).exists():
        Path(file).touch()
        time.sleep(HANG_S)


def train(session: helixrt.Session, hangs: str, hung: str) -> None:
    """`hung`: the file by which the stage that hangs knows that it has slept."""
    example = torch.zeros(BATCH // 4, WIDTH)
    loss = nn.functional.mse_loss
    stages = helixrt.Stages(parts(), loss, (example, example), example, microbatches=4, graphs="never")
    model = session.parallelize(stages)
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.TensorDataset(x, x.flip(1))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=session.sampler(data, shuffle=True))
    stage = model.place.stage
    for step in session.steps(loader, until=STEPS):
        for batch, target in step:
            step.train(model, batch, target=target)
        hang(hung, step.number == HANGS_AT and hangs == f"before:{stage}")
        export(session, not hangs and BUSY_BEFORE.get(step.number) == stage)
        done = step.commit()
        session.log({"loss": done.loss})
        hang(hung, step.number == HANGS_AT and hangs == f"after:{stage}")
        export(session, not hangs and BUSY_AFTER.get(step.number) == stage)


if __name__ == "__main__":
    folder, channels, hangs = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    base = JobConfig(pipeline=PipelineConfig(channels=channels))
    result = helixrt.run(
        train,
        mesh=helixrt.Mesh(pp=2),
        storage=folder,
        seed=4,
        device="cpu",
        launcher="local",
        arguments={"hangs": hangs, "hung": str(folder / "hung")},
        options=helixrt.RunOptions(step_timeout_s=STEP_TIMEOUT_S, checkpoint_every=2, base=base),
    )
    print(f"ended at step {result.step}")
