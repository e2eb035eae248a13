"""Context of the loop of docs/guides/existing-loop.md: the objects of a script."""
# REPLACE until=10_000 => until=3
# REPLACE accumulate=4 => accumulate=2
# REPLACE seed=1 => seed=1, storage="runs"

import torch
from torch.utils.data import DataLoader, TensorDataset

import helixrt

items = TensorDataset(torch.arange(256.0).view(64, 4) / 256, torch.ones(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
loss_fn = torch.nn.functional.mse_loss

if __name__ == "__main__":
    # BLOCK
    assert session.committed  # noqa: F821, made in the block
