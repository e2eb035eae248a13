"""`python resharded_script.py FOLDER REPLICAS PP DP_SHARD STEPS [RESUME]`: a small model in float64, in stages or in shards.

In a run that is not resumed replica 1 is killed in step 4, and replica 0 goes on without it until step 10. Each rank leaves the
ids of each batch in FOLDER/ids.REPLICA.SHARD.STAGE.jsonl, with its position and how often the data was dealt."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import helixrt

FOLDER, REPLICAS, PP, DP_SHARD, STEPS = Path(sys.argv[1]), *map(int, sys.argv[2:6])
RESUME = sys.argv[6] if len(sys.argv) > 6 else None
LAYERS, WIDTH, ITEMS, BATCH, MICROBATCHES, CLIP = 4, 6, 400, 8, 4, 0.5
KILLED, BACK = FOLDER / "killed", FOLDER / "back"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def parts() -> list[nn.Module]:
    layers, each = list(Model().layers), LAYERS // PP
    return [nn.Sequential(*layers[each * part : each * (part + 1)]) for part in range(PP)]


def name_in_model(part: int, name: str) -> str:
    layer, _, rest = name.partition(".")
    return f"layers.{part * (LAYERS // PP) + int(layer)}.{rest}"


def optimizer_of(parameters: Iterable[nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
    known = list(parameters)
    matrices, vectors = [p for p in known if p.dim() > 1], [p for p in known if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.02)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ITEMS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x, x.flip(1).tanh()


def train(session: helixrt.Session) -> None:
    x, y = examples()
    plain = PP == 1 and DP_SHARD > 1
    if plain:
        model: Any = session.parallelize(Model())
        stage = 0
    else:
        example = torch.zeros(BATCH // MICROBATCHES, WIDTH, dtype=torch.float64)
        loss_of = nn.functional.mse_loss
        stages = helixrt.Stages(parts(), loss_of, (example, example), example, MICROBATCHES, names=name_in_model)
        model = session.parallelize(stages)
        stage = model.place.stage
    optimizer, scheduler = optimizer_of(model.parameters())
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], clip_norm=CLIP)
    ids = torch.arange(ITEMS)
    sampler = session.sampler(ids, shuffle=True)  # type: ignore[arg-type]
    loader = torch.utils.data.DataLoader(ids, batch_size=BATCH, sampler=sampler, drop_last=True)
    if session.replica == 1 and KILLED.exists():
        BACK.touch()
    with open(FOLDER / f"ids.{session.replica}.{session.shard}.{stage}.jsonl", "a") as told:
        for step in session.steps(loader, until=STEPS):
            for batch in step:
                told.write(json.dumps([len(session.settings.deals), step.batch, batch.tolist()]) + "\n")
                told.flush()
                if plain:
                    step.backward(nn.functional.mse_loss(model(x[batch]), y[batch]))
                else:
                    step.train(model, x[batch], target=y[batch])
            if RESUME is None:
                trouble(session, step.number, stage)
            done = step.commit()
            session.log({"loss": done.loss})


def trouble(session: helixrt.Session, number: int, stage: int) -> None:
    if session.replica == 1 and stage == PP - 1 and number == 4 and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if session.replica == 0 and number == 10:
        with session.busy("waiting for replica 1", 300.0):
            while not BACK.exists():
                time.sleep(0.05)


if __name__ == "__main__":
    mesh = helixrt.Mesh(pp=PP, dp_shard=DP_SHARD)
    options = helixrt.RunOptions(checkpoint_every=10, step_timeout_s=300.0)
    helixrt.run(
        train,
        replicas=REPLICAS,
        mesh=mesh,
        storage=FOLDER,
        seed=4,
        device="cpu",
        launcher="local",
        resume=RESUME,
        options=options,
    )
