"""Lower the learning rate when the loss no longer falls, on two replicas; any replica may be killed at any time.

    python examples/plateau.py [STEPS] [FOLDER]

`record.loss` is the mean loss of the step over all replicas. It travels with the gradients, so the scheduler gets the same
number on each replica, and on one that starts again and repeats updates. The update also smooths it; what it changes is
registered.
"""

import sys

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
BATCH = 16


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(800, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(800, 1, generator=generator))


class Smoothed:
    """A moving average of the loss."""

    value: float | None = None

    def follow(self, loss: float) -> float:
        self.value = loss if self.value is None else 0.8 * self.value + 0.2 * loss
        return self.value

    def state_dict(self) -> dict[str, float | None]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self.value = state["value"]


def train(session: helixrt.Session) -> None:
    model = session.parallelize(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    smoothed = Smoothed()
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], extra={"smoothed": smoothed})

    @session.update
    def update(record: helixrt.UpdateRecord) -> None:
        optimizer.step()
        if record.applied:
            scheduler.step(smoothed.follow(record.loss))

    items = data()
    loader = DataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True), drop_last=True)
    for step in session.steps(loader, until=STEPS):
        for x, y in step:
            error = model(x.to(session.device)) - y.to(session.device)
            step.backward(error.square().sum(), weight=len(x))
        session.log({"loss": step.commit().loss, "learning_rate": optimizer.param_groups[0]["lr"]})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
