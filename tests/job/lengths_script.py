"""`python lengths_script.py FOLDER`: two replicas of an unmodified model in two stages, whose batches have one of three
lengths, more than graphs are kept for.

The layers are measured although a step is short, so that ranks agree on times.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import helixrt
from helixrt.pipeline import measured_units

FOLDER = Path(sys.argv[1])
STEPS, BATCH, WIDTH, ITEMS, SHAPES, REPLICAS = 9, 4, 6, 96, 2, 2
LENGTHS = (3, 5, 2)
measured_units.LEAST_STEP_S = 0.0


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(3)
    return Tower().double()


def data() -> torch.utils.data.TensorDataset:
    drawn = torch.randn(ITEMS, max(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return torch.utils.data.TensorDataset(torch.arange(ITEMS), drawn)


def bucketed(items: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch in the length that its first item decides; the target is the input backwards."""
    length = LENGTHS[int(items[0][0]) // BATCH % len(LENGTHS)]
    x = torch.stack([each[:length] for _, each in items])
    return x, x.flip(1)


def train(session: helixrt.Session) -> None:
    example = torch.zeros(BATCH, LENGTHS[0], WIDTH, dtype=torch.float64)
    compiled = helixrt.compile(build(), loss=nn.functional.mse_loss, microbatches=2, shapes=SHAPES)
    model = session.parallelize(compiled, example=helixrt.ExampleBatch(example, target=example))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.3)])
    items = data()
    sampler = session.sampler(items, shuffle=True)
    loader = torch.utils.data.DataLoader(items, batch_size=BATCH, sampler=sampler, collate_fn=bucketed)
    for step in session.steps(loader, until=STEPS):
        for x, target in step:
            step.train(model, x, target=target)
        done = step.commit()
        session.log({"loss": done.loss})


if __name__ == "__main__":
    helixrt.run(train, replicas=REPLICAS, mesh=helixrt.Mesh(pp=2), storage=FOLDER, seed=4, device="cpu", launcher="local")
