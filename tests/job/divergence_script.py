"""`python divergence_script.py FOLDER REPLICAS FLIPS [OPTION=VALUE ...]`: a run in whose state bits are flipped.

FLIPS is JSON: [[after step, replica, entry, place, bit], ...]: once in the whole run, behind this step of this replica, that
bit of that byte of an entry of its state ("parameter", "exp_avg", "step", "buffer"). OPTION: every, until, checkpoint,
on_divergence, away. Prints the lines `flipped STEP REPLICA NAME` into the replica's log.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helixrt
from helixrt.job.config import ChecksConfig, JobConfig

FOLDER, REPLICAS, FLIPS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
OPTIONS = dict(option.split("=") for option in sys.argv[4:])
EVERY, UNTIL = int(OPTIONS.get("every", 5)), int(OPTIONS.get("until", 60))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.register_buffer("scale", torch.linspace(0.5, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def flipped(model: nn.Module, optimizer: torch.optim.Optimizer, entry: str, place: int, bit: int) -> str:
    """Changes no version of the tensor, as memory does not; its name."""
    parameters = dict(model.named_parameters())
    if entry == "parameter":
        found = {f"parameter/{name}": parameter for name, parameter in parameters.items()}
    elif entry == "buffer":
        restored = ("running_mean", "running_var", "num_batches_tracked")  # when a batch begins: a flipped bit is gone
        found = {f"buffer/{name}": buffer for name, buffer in model.named_buffers() if not name.endswith(restored)}
    else:
        found = {f"{entry} of {name}": optimizer.state[parameter][entry] for name, parameter in parameters.items()}
    name = sorted(found)[place % len(found)]
    memory = found[name].data.reshape(-1).view(torch.uint8)
    memory[place % len(memory)] ^= 1 << bit
    return name


def train(session: helixrt.Session) -> None:
    torch.manual_seed(3)
    model = session.parallelize(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.register(model=model, optimizers=[optimizer])
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x[:, :4].sin())
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=session.sampler(data))
    for step in session.steps(loader, until=UNTIL):
        for inputs, targets in step:
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        step.commit()
        for number, (after, replica, *what) in enumerate(FLIPS):
            if (after, replica) == (step.number, session.replica):
                try:
                    (FOLDER / f"flip.{number}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                print("flipped", after, replica, flipped(model, optimizer, *what), flush=True)


if __name__ == "__main__":
    checks = ChecksConfig(every=EVERY, on_divergence=OPTIONS.get("on_divergence", "resume"))
    base: Any = JobConfig(checks=checks, driver_away_s=float(OPTIONS.get("away", 0)))
    options = helixrt.RunOptions(base=base, checkpoint_every=int(OPTIONS.get("checkpoint", 10)))
    helixrt.run(train, replicas=REPLICAS, storage=FOLDER / "out", options=options)
