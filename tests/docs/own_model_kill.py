"""Context of the kill in docs/guides/own-model.md: steps that take long enough for the replica to return."""
# SLOW

import json
import time
from pathlib import Path

import torch

import helixrt


def train(session):
    model = session.parallelize(torch.nn.Linear(4, 1))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    for step in session.steps([torch.ones(2, 4)] * 400, until=300):
        for x in step:
            time.sleep(0.05)
            step.backward(model(x).square().mean())
        step.commit()


if __name__ == "__main__":
    # BLOCK
    (lost,) = json.loads(Path("outputs/latest/report.json").read_text())["failures"]
    assert (lost["replica"], lost["step"]) == (1, 20) and lost["rejoined_after_s"] is not None, lost
