"""Train with a schedule-free optimizer on two replicas; any replica may be killed at any time. Needs the package schedulefree.

    python examples/schedule_free.py [STEPS] [FOLDER]

The optimizer trains one set of weights and averages another. `session.evaluate` puts the averaged ones into the model, and the
trained ones back. Checkpoints hold the trained ones and the optimizer's state, so a replica that starts again trains on. After
the loop `optimizer.eval()` gives the averaged ones, which are saved.
"""

import sys

import torch
from schedulefree import AdamWScheduleFree
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
BATCH, RATE = 16, 0.05


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(800, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(800, 1, generator=generator))


def loss_sum(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().sum()


def train(session: helixrt.Session) -> None:
    model = session.parallelize(torch.nn.Linear(8, 1))
    optimizer = AdamWScheduleFree(model.parameters(), lr=RATE)
    session.register(model=model, optimizers=[optimizer])
    items = data()
    held_out = [part[:100].to(session.device) for part in items.tensors]
    session.evaluate(lambda: loss_sum(model, *held_out) / 100, every=10)
    loader = DataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True), drop_last=True)
    for step in session.steps(loader, until=STEPS):
        for x, y in step:
            step.backward(loss_sum(model, x.to(session.device), y.to(session.device)), weight=len(x))
        session.log({"loss": step.commit().loss})
    optimizer.eval()
    if session.replica == 0:
        torch.save(model.state_dict(), session.folder / "model.pt")


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
