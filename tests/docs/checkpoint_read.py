"""Context of the checkpoint of docs/guides/own-model.md: a run that has left one."""
# SLOW

from pathlib import Path

import torch

import helixrt


def train(session):
    model = session.parallelize(torch.nn.Linear(4, 1))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    for step in session.steps([torch.ones(2, 4)] * 4, until=2):
        for x in step:
            step.backward(model(x).square().mean())
        step.commit()
    torch.save(model.state_dict(), "trained.pt")


if __name__ == "__main__":
    done = helixrt.run(train, replicas=1, storage=Path("runs").resolve(), options=helixrt.RunOptions(checkpoint_every=2))
    folder = max((done.folder / "checkpoints").iterdir())
    model = torch.nn.Linear(4, 1)
    # BLOCK
    trained = torch.load("trained.pt")
    assert all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
