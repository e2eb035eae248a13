"""`python -m tests.job.hosts_script FOLDER SHARDS STEPS [STORAGE]`: a small model; a replica has so many dp_shard ranks.

Until FOLDER has a file `enough`, each step takes PACE_S longer, so that a test can change what is around it in the meantime.
Each rank writes the addresses that its process listens on into FOLDER/sockets.REPLICA.SHARD. STORAGE: of a run that nobody
serves."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import helixrt
from tests.job.listening import listening

PACE_S, EVERY = 0.5, 5


def main(folder: Path, shards: int, steps: int, storage: str = "outputs") -> None:
    options = helixrt.RunOptions(checkpoint_every=EVERY)
    session = helixrt.init(mesh=helixrt.Mesh(dp_shard=shards), seed=3, device="cpu", storage=storage, options=options)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(7))
    data = torch.utils.data.TensorDataset(x, x.flip(1))
    model = session.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.register(model=model, optimizers=[optimizer])
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=session.sampler(data, shuffle=True))
    end = folder / "enough"
    for step in session.steps(loader, until=steps):
        for batch, target in step:
            step.backward(nn.functional.mse_loss(model(batch), target))
        if not end.exists():
            time.sleep(PACE_S)
        session.log({"loss": step.commit().loss})
        if not (folder / f"sockets.{session.replica}.{session.shard}").exists():
            (folder / f"sockets.{session.replica}.{session.shard}").write_text("\n".join(listening()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
