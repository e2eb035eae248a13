"""A run whose queues are buffers per replica: `python own_buffers_script.py CASE FOLDER UNTIL`.

Case "killed": replica 1 ends by SIGKILL after step 3, once. "resumed": the newest run goes on. Each replica's queue is made of
its own batches alone, so that it is a function of the replica's position, which is checked after the loop. The replica that was
killed had not begun its fourth batch: it has the queue of before its third one again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import helixrt
from helixrt.replica.run_keys import running_key

KEYS, SIZE, ROWS = 32, 8, 4
CASE, FOLDER, UNTIL = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
KILLED, AGAIN = FOLDER / "killed", FOLDER / "again"


class Queued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, 1)
        self.register_buffer("queue", torch.full((SIZE, KEYS), -1.0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.linear(x) + self.queue.mean()).square().mean()
        enqueue(self.queue, self.queue_ptr, x)
        return loss


def enqueue(queue: torch.Tensor, queue_ptr: torch.Tensor, x: torch.Tensor) -> None:
    at = int(queue_ptr)
    queue[:, at : at + ROWS] = x.detach().T
    queue_ptr[0] = (at + ROWS) % KEYS


def batches(replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(replica)
    return [torch.randn(ROWS, SIZE, generator=generator) for _ in range(64)]


def train(session: helixrt.Session) -> None:
    model = session.parallelize(Queued())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.register(model=model, optimizers=[optimizer], buffers={"queue*": "per_replica"})
    if session.replica == 1 and KILLED.exists():
        AGAIN.touch()
    for step in session.steps(batches(session.replica), until=UNTIL):
        for x in step:
            step.backward(model(x))
        done = step.commit()
        if CASE == "killed" and session.replica == 1 and done.step == 3 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "killed" and session.replica == 0 and done.step >= 4:
            with session.busy("waiting for the other replica", 120.0):
                while not AGAIN.exists():
                    time.sleep(0.02)
                if session._host.store.get(running_key(1, 1)) is None:
                    time.sleep(0.3)
    assert session.step is not None
    expected = Queued()
    for number, x in enumerate(batches(session.replica)[: session.step.position + 1]):
        if (session.replica, number) != (1, 2):
            enqueue(expected.queue, expected.queue_ptr, x)
    assert torch.equal(model.queue, expected.queue) and torch.equal(model.queue_ptr, expected.queue_ptr)
    (FOLDER / f"{CASE}{session.replica}").touch()


if __name__ == "__main__":
    options = helixrt.RunOptions(checkpoint_every=4, loader_every=1)
    helixrt.run(train, replicas=2, storage=FOLDER, seed=4, resume="latest" if CASE == "resumed" else None, options=options)
