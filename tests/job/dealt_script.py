"""`python dealt_script.py FOLDER REPLICAS STEPS`: a tiny model; the server of the first life is ended after step 8.

Each rank leaves the items of each batch that it works on in FOLDER/items.REPLICA.jsonl, with the batch's position and how often
the data was dealt anew."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import helixrt

FOLDER, REPLICAS, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ITEMS, BATCH, ACCUMULATE = 400, 4, 2


def train(session: helixrt.Session) -> None:
    model = session.parallelize(nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.register(model=model, optimizers=[optimizer])
    items = torch.utils.data.TensorDataset(torch.arange(float(ITEMS)).unsqueeze(1) / ITEMS)
    loader = StatefulDataLoader(items, batch_size=BATCH, sampler=session.sampler(items, shuffle=True))
    lives = len(session.settings.deals)
    with open(FOLDER / f"items.{session.replica}.jsonl", "a") as told:
        for step in session.steps(loader, until=STEPS, accumulate=ACCUMULATE):
            for (x,) in step:
                read = [round(value * ITEMS) for value in x[:, 0].tolist()]
                told.write(json.dumps([lives, step.batch, read]) + "\n")
                told.flush()
                step.backward(model(x).square().sum(), weight=len(x))
            done = step.commit()
            if session.replica == 0 and done.step == 8 and not (FOLDER / "interrupted").exists():
                with session.busy("waiting for the checkpoint of step 5", 60.0):
                    while not list(FOLDER.glob("latest/checkpoints/*/complete.json")):
                        time.sleep(0.02)
                (FOLDER / "interrupted").touch()
                os.kill(int(os.environ["HELIXRT_TEST_DRIVER"]), signal.SIGTERM)


if __name__ == "__main__":
    options = helixrt.RunOptions(checkpoint_every=5, loader_every=4, step_timeout_s=120.0)
    helixrt.run(train, replicas=REPLICAS, storage=FOLDER, seed=4, options=options)
