"""Context of the loop of docs/guides/own-model.md: a model, data and a loss."""
# REPLACE 10_000) => 10)
# REPLACE until=10_000 => until=4
# REPLACE accumulate=4 => accumulate=2
# REPLACE replicas=4 => replicas=1
# REPLACE "/shared/run1" => "runs"

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import helixrt

data = TensorDataset(torch.arange(256.0).view(64, 4) / 256, torch.ones(64, 1))


def build():
    return torch.nn.Linear(4, 1)


def loss_sum(output, target):
    return torch.nn.functional.mse_loss(output, target, reduction="sum")


# BLOCK
