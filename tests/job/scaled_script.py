"""`python scaled_script.py FOLDER`: two replicas train in float16 with a gradient scaler, whose scale is far too high at first,
and for replica 1 more so. Replica 0 leaves which steps were applied, at which scale, and its last weights in FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import helixrt

FOLDER = Path(sys.argv[1])
STEPS, INIT_SCALE, GROWTH_INTERVAL = 36, 2.0**30, 4


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)


def batches(replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    made = [torch.randn(8, 4, generator=generator) for _ in range(STEPS)]
    return [(x, (1 + 30 * replica) * x.sum(1, keepdim=True)) for x in made]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return (model(x).float() - y).square().sum()


def train(session: helixrt.Session) -> None:
    model, own = session.parallelize(build()), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    session.register(model=model, optimizers=[optimizer], scaler=own, clip_norm=10.0)
    told = []
    for step in session.steps(batches(session.replica), until=STEPS):
        for x, y in step:
            step.backward(loss_of(model, x, y), weight=len(x))
        done = step.commit()
        assert done.committed
        told.append((done.step, done.applied, done.contributors, own.get_scale()))
    if session.replica == 0:
        torch.save({"told": told, "weights": model.state_dict()}, FOLDER / "scaled.pt")


if __name__ == "__main__":
    options = helixrt.RunOptions(step_timeout_s=120.0, restarts=0, checkpoint_every=0)
    helixrt.run(train, replicas=2, storage=FOLDER, device="cpu", options=options)
