"""Train a MoCo encoder on two replicas, each with a queue of keys of its own; any replica may be killed at any time.

    python examples/moco.py [STEPS] [FOLDER]

The queue holds the keys of a replica's own newest batches. It is a buffer that forward changes, so its mode is named:
"per_replica". A replica that starts again takes the newest saved copy of its own queue. The key encoder is a moving average of
the query encoder: the update changes it, not the loop. The loss rises while keys of the model replace the random ones.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
FOLDER = sys.argv[2] if len(sys.argv) > 2 else "outputs"
BATCH, KEYS, SIZE = 16, 256, 32


def data() -> TensorDataset:
    """Points around 20 centres, the same on each replica."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(20, 16, generator=generator)
    return TensorDataset(centres.repeat(50, 1) + 0.2 * torch.randn(1000, 16, generator=generator))


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, SIZE))


class MoCo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = encoder(), encoder().requires_grad_(False)
        self.key.load_state_dict(self.query.state_dict())
        self.register_buffer("queue", normalize(torch.randn(SIZE, KEYS), dim=0))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The loss of two views of a batch: each query has its own key to find among those of the queue."""
        query = normalize(self.query(one), dim=1)
        with torch.no_grad():
            key = normalize(self.key(other), dim=1)
        same = (query * key).sum(1, keepdim=True)
        logits = torch.cat([same, query @ self.queue.clone()], dim=1) / 0.2
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + len(key)] = key.T
            self.pointer.fill_((at + len(key)) % KEYS)
        return cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64, device=query.device))


def train(session: helixrt.Session) -> None:
    model = session.parallelize(MoCo())
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
    session.register(model=model, optimizers=[optimizer], buffers={"queue": "per_replica", "pointer": "per_replica"})

    @session.update
    def update(record: object) -> None:
        optimizer.step()
        with torch.no_grad():
            for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
                key.lerp_(query, 0.05)

    items = data()
    loader = DataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True), drop_last=True)
    for step in session.steps(loader, until=STEPS):
        for (batch,) in step:
            views = (batch.to(session.device) + 0.2 * torch.randn(batch.shape).to(session.device) for _ in range(2))
            step.backward(model(*views))
        done = step.commit()
        session.log({"loss": done.loss})


if __name__ == "__main__":
    result = helixrt.run(train, replicas=2, storage=FOLDER, seed=1)
    print(f"step {result.step}: {result.folder}")
