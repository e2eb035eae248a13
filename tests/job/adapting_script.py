"""`python adapting_script.py CASE FOLDER [RESUME]`: an unmodified model, captured and cut into two stages, over a link that is
slow from step `SLOW[0]` on until `SLOW[1]`.

The order of the schedule follows the link, but in the case `fixed`, whose link is quick. `interrupted`: the run is ended when
a checkpoint has been written that names a changed order. `lost`: of two replicas one loses a rank after its order was changed;
the other one waits for its new process before it goes on, so that many steps are left for it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.job.checkpoint import newest_complete
from helixrt.job.config import ChaosConfig, JobConfig, SlowConfig
from tests.job.lineage_oracle import chain

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
RESUME = sys.argv[3] if len(sys.argv) > 3 else None
STEPS, SLOW, EVERY = 100, (8, 50), 4
BATCH, WIDTH, MICROBATCHES = 16, 6, 8
DONE, BACK = FOLDER / "done", FOLDER / "back"  # the run was disturbed as the case says; the lost replica is there again
DRIVER = FOLDER / "driver"  # the process of the run's driver; a rank's parent may be another one


class Perceptron(nn.Module):
    """Knows nothing of helixrt; its dropout shows draws that depend on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x)))
        return x


def train(session: helixrt.Session) -> None:
    torch.manual_seed(3)
    rules = None if CASE == "fixed" else helixrt.Adaptation(switch_ms=0.0, least_gain=0.1)
    compiled = helixrt.compile(Perceptron(), loss=mse_loss, microbatches=MICROBATCHES, schedule="zb", adapt=rules)
    x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.TensorDataset(x, x.flip(1))
    model = session.parallelize(compiled, example=helixrt.ExampleBatch(x[:BATCH], target=x[:BATCH].flip(1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=session.sampler(data, shuffle=True))
    if session.replica == 1 and DONE.exists():
        BACK.touch()
    for step in session.steps(loader, until=STEPS):
        for inputs, target in step:
            step.train(model, inputs, target=target)
        disturb(session, model.place.stage, step.number)
        done = step.commit()
        session.log({"loss": done.loss})


def disturb(session: helixrt.Session, stage: int, step: int) -> None:
    """On one rank, before the commit of a step."""
    run = FOLDER / "latest"
    if CASE == "interrupted" and stage == 1 and step > SLOW[0] and not DONE.exists():
        saved = newest_complete(run / "checkpoints")
        if saved is not None and saved.record.orders.get(0):
            DONE.touch()
            os.kill(int(DRIVER.read_text()), signal.SIGTERM)
    if CASE == "lost" and session.replica == 1 and stage == 1 and not DONE.exists() and chain(run)[-1].orders.get(1):
        DONE.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "lost" and session.replica == 0 and DONE.exists() and not BACK.exists():
        with session.busy("waiting for replica 1", 200.0):
            while not BACK.exists():
                time.sleep(0.05)


if __name__ == "__main__":
    DRIVER.write_text(str(os.getpid()))
    ways = ({"from": 0, "to": 1}, {"from": 1, "to": 0})
    link = () if CASE == "fixed" else tuple({**way, "delay_ms": 100, "steps": list(SLOW)} for way in ways)
    least_ms = 0.0 if CASE == "fixed" else 10.0
    chaos = ChaosConfig(link=link, slow=tuple(SlowConfig(stage, 1.0, least_ms=least_ms) for stage in range(2)))
    options = helixrt.RunOptions(checkpoint_every=EVERY, base=JobConfig(chaos=chaos), step_timeout_s=120.0)
    replicas = 2 if CASE == "lost" else 1
    result = helixrt.run(
        train,
        replicas=replicas,
        mesh=helixrt.Mesh(pp=2),
        storage=FOLDER,
        seed=4,
        device="cpu",
        launcher="local",
        resume=RESUME,
        options=options,
    )
    print(f"ended at step {result.step}")
