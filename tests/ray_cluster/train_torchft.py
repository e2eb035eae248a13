"""Ray Train's TorchTrainer with TorchftConfig, and `ProcessGroupHelix` as torchft's process group.

`python train_torchft.py FOLDER`. Two workers, each a replica, begin together; worker 1 raises in its fourth step, once. Worker
0 goes on alone, and slowly until the other takes part again. Each leaves FOLDER/worker.RANK.json: its weights, and with how
many replicas it made each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer

from helixrt.collectives import ProcessGroupHelix
from helixrt.ray_cluster.head import local_head

STEPS, PATIENCE_S = 30, 200.0


def wait_for(*files: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, f"{files[-1].name} is not there"
        time.sleep(0.05)


def train(config: dict[str, Any]) -> None:
    folder, rank = Path(config["folder"]), get_context().get_world_rank()
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupHelix(timeout=timedelta(seconds=60)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"worker_{rank}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=90),
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    raised, participants = folder / "raised", dict[int, int]()
    (folder / f"ready.{rank}{'.again' if raised.exists() else ''}").touch()
    wait_for(folder / "ready.0", folder / "ready.1")
    while manager.current_step() < STEPS:
        step = manager.current_step()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        nn.functional.mse_loss(replicated(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        participants[step] = manager.num_participants()
        if rank == 1 and step == 3 and not raised.exists():
            raised.touch()
            raise RuntimeError("a failure on purpose")
        if rank == 0 and raised.exists() and participants[step] == 1:
            if step > 8:
                wait_for(folder / "ready.1.again")
            time.sleep(0.5)
    weights = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    (folder / f"worker.{rank}.json").write_text(json.dumps({"weights": weights, "participants": participants}))
    manager.shutdown()


if __name__ == "__main__":
    with local_head(4) as head:
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"
        ray.init(address="auto", _temp_dir=str(head.folder))
        TorchTrainer(
            train,
            train_loop_config={"folder": sys.argv[1]},
            scaling_config=ScalingConfig(num_workers=2),
            torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1, "join_timeout_ms": 1000}, backend="gloo"),
            run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=2)),
        ).fit()
        print("fitted")
        ray.shutdown()
