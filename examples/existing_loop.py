"""An existing loop, made fault-tolerant by two lines: `helixrt.init` and `session.prepare`.

    python examples/existing_loop.py [STEPS]                        one replica, in this process

    helixrt serve --replicas 2                                      prints the variables to set; then, for each replica R
    HELIXRT_REPLICA=R torchrun --nproc-per-node 1 --max-restarts 3 examples/existing_loop.py [STEPS]

A replica that is lost is started again by torchrun, fetches the state from the other one, and goes on.
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import helixrt

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40


def data() -> TensorDataset:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def main() -> None:
    session = helixrt.init(seed=1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    items = data()
    loader = DataLoader(items, batch_size=8, sampler=session.sampler(items, shuffle=True))
    model, optimizer, scheduler, loader = session.prepare(
        model, optimizer, scheduler, loader, accumulate=2, clip_norm=1.0, until=STEPS
    )
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(session.device)), y.to(session.device))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if session.step.done is not None:
            session.log({"loss": loss.detach(), "rate": scheduler.get_last_lr()[0]})
    print(f"replica {session.replica} has trained to the end")


if __name__ == "__main__":
    main()
