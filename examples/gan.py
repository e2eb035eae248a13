"""Train a generator and a discriminator by turns on two replicas; any replica may be killed at any time.

    python examples/gan.py [STEPS] [FOLDER]

Odd updates train the discriminator, even ones the generator: the loop computes the loss of the one whose turn it is
(`step.number`), and the update steps its optimizer (`record.step`). In the generator's turn the discriminator has a gradient,
too, which its optimizer does not use. Nothing is frozen in the loop.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
BATCH, NOISE = 16, 4


def data() -> TensorDataset:
    """Points on a circle."""
    angle = torch.linspace(0, 6.28, 800)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1))


def models() -> dict[str, nn.Module]:
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    return {"generator": generator, "discriminator": discriminator}


def optimizers(both: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for name, model in both.items()}


def turn(number: int) -> str:
    """Name of the model that this update trains."""
    return "discriminator" if number % 2 else "generator"


def loss_sum(both: dict[str, nn.Module], number: int, real: torch.Tensor) -> torch.Tensor:
    generator, discriminator = both["generator"], both["discriminator"]
    made = generator(torch.randn(len(real), NOISE).to(real.device))
    if turn(number) == "generator":
        return softplus(-discriminator(made)).sum()
    return (softplus(-discriminator(real)) + softplus(discriminator(made.detach()))).sum()


def train(session: helixrt.Session) -> None:
    both = {name: session.parallelize(model) for name, model in models().items()}
    steppers = optimizers(both)
    session.register(model=both, optimizers=steppers)

    @session.update
    def update(record: helixrt.UpdateRecord) -> None:
        if record.applied:
            steppers[turn(record.step)].step()

    items = data()
    loader = DataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True), drop_last=True)
    for step in session.steps(loader, until=STEPS):
        for (real,) in step:
            step.backward(loss_sum(both, step.number, real.to(session.device)), weight=len(real))
        session.log({turn(step.number): step.commit().loss})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
