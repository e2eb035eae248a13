"""Context of the stages of docs/guides/own-model.md: two parts, and data."""
# SLOW
# REPLACE until=10_000 => until=3
# REPLACE every=100 => every=2
# REPLACE replicas=4 => replicas=1
# REPLACE torch.empty(2, 128, 512) => torch.empty(2, 8)

import torch

import helixrt

x = torch.arange(64.0).view(8, 8) / 64
y = torch.ones(8, 1)
x_val, y_val = x, y
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
mean_loss = torch.nn.functional.mse_loss
embedding_and_half = lambda: torch.nn.Linear(8, 8)  # noqa: E731
other_half = lambda: torch.nn.Linear(8, 1)  # noqa: E731


def run(train, **settings):
    """As `helixrt.run`, in the main process alone."""
    if __name__ == "__main__":
        helixrt_run(train, storage="runs", **settings)


helixrt_run, helixrt.run = helixrt.run, run

# BLOCK
