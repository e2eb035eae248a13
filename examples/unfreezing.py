"""Unfreeze a model layer by layer on two replicas; any replica may be killed at any time, and a run may be resumed.

    python examples/unfreezing.py [STEPS] [FOLDER [latest]]

All layers are registered as trained, each with a group of its optimizer. `session.freeze` names those that an update does not
train: a function of its number, so a replica that starts again freezes what the others freeze. A frozen layer has no gradient,
and its optimizer state begins with its first one. `latest` resumes the newest run in the folder.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
BATCH, FROM = 16, (20, 6, 1)  # the update that trains each layer first


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(800, 8, generator=generator)
    return TensorDataset(x, x.prod(1, keepdim=True))


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Tanh(), nn.Linear(8, size)) for size in (8, 8, 1)])


def optimizer_of(model: nn.Sequential) -> torch.optim.Optimizer:
    rates = (0.002, 0.005, 0.01)
    return torch.optim.AdamW([{"params": part.parameters(), "lr": rate} for part, rate in zip(model, rates, strict=True)])


def not_trained(model: nn.Sequential, step: int) -> list[nn.Module]:
    return [part for part, first in zip(model, FROM, strict=True) if step < first]


def train(session: helixrt.Session) -> None:
    model = session.parallelize(layers())
    session.register(model=model, optimizers=[optimizer_of(model)])

    @session.freeze
    def frozen(step: int) -> list[nn.Module]:
        return not_trained(model, step)

    items = data()
    loader = DataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True), drop_last=True)
    for step in session.steps(loader, until=STEPS):
        for x, y in step:
            error = model(x.to(session.device)) - y.to(session.device)
            step.backward(error.square().sum(), weight=len(x))
        session.log({"loss": step.commit().loss})


if __name__ == "__main__":
    resumed = sys.argv[3] if len(sys.argv) > 3 else None  # "latest"
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1, resume=resumed)
    print(f"step {result.step}: {result.folder}")
