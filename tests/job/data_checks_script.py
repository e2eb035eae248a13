"""`python data_checks_script.py FOLDER KIND [strict]`: two replicas (or two stages) whose data are wrong, or only seem to be,
as KIND says. Each replica notes the items of its first epoch in FOLDER/items.REPLICA."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

import helixrt
from helixrt.job.config import ChaosConfig, ChecksConfig, JobConfig, KillConfig

FOLDER, KIND, STRICT = Path(sys.argv[1]), sys.argv[2], "strict" in sys.argv
ITEMS, BATCH, UNTIL = 64, 4, {"restart": 60, "clock": 120}.get(KIND, 16)

SHUFFLES = {
    "random": lambda ids: random.shuffle(ids),
    "numpy": lambda ids: np.random.shuffle(ids),
    "torch": lambda ids: ids.__setitem__(slice(None), [ids[i] for i in torch.randperm(len(ids))]),
}


class OwnSampler(Sampler[int]):
    def __init__(self, shuffle: str, stream: int, streams: int) -> None:
        self.shuffle, self.stream, self.streams = shuffle, stream, streams

    def __len__(self) -> int:
        return ITEMS // self.streams

    def __iter__(self) -> Iterator[int]:
        ids = list(range(ITEMS))
        SHUFFLES[self.shuffle](ids)
        yield from ids[self.stream :: self.streams]


class OwnDataset(IterableDataset[int]):
    def __init__(self, sampler: OwnSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


class OtherEachTime:
    """Another order in each process."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        return iter(torch.randperm(ITEMS, generator=generator).view(-1, BATCH))


def data(session: helixrt.Session) -> Any:
    kind, _, shuffle = KIND.partition(" ")
    own = OwnSampler(shuffle, session.stream, session.streams)
    ids = torch.arange(ITEMS).view(-1, BATCH)
    match kind:
        case "same":
            return list(ids)
        case "constant":
            return [ids[0]] * 16
        case "clock":
            return list(ids if session.replica else ids.flip(0))
        case "stages":
            return list(ids if session.device_mesh.get_local_rank() == 0 else ids.flip(0))
        case "sampler":
            return DataLoader(range(ITEMS), batch_size=BATCH, sampler=own)  # type: ignore[arg-type]
        case "dataset":
            return DataLoader(OwnDataset(own), batch_size=BATCH)
        case "loader":
            return [torch.tensor(part) for part in np.array(list(own)).reshape(-1, BATCH)]
    assert kind == "restart"
    return OtherEachTime()


def train(session: helixrt.Session) -> None:
    if KIND == "stages":
        layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(BATCH, BATCH), torch.nn.Tanh()) for _ in range(2)))
        example = torch.zeros(2, BATCH)
        loss = torch.nn.functional.mse_loss
        compiled = helixrt.compile(layers, loss=loss, microbatches=2)
        model: Any = session.parallelize(compiled, example=helixrt.ExampleBatch(example, target=example))
    else:
        model = session.parallelize(torch.nn.Linear(BATCH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    session.register(model=model, optimizers=[optimizer])
    if KIND == "clock":

        @session.update
        def update(record: Any) -> None:
            optimizer.param_groups[0]["lr"] = 1e-6 * (1 + time.time() % 1)
            optimizer.step()

    for step in session.steps(data(session), until=UNTIL):
        for ids in step:
            if KIND == "stages":
                pair = ids.float().view(1, BATCH).expand(2, BATCH)
                step.train(model, pair, target=pair)
            else:
                step.backward(model(ids.float()).square().mean())
        if step.commit().committed and step.number * BATCH * session.streams <= ITEMS:
            with open(FOLDER / f"items.{session.replica}", "a", encoding="utf-8") as file:
                file.write("".join(f"{each} " for each in ids.tolist()))
        if KIND == "restart":  # it is to come back before the end
            time.sleep(0.05)


if __name__ == "__main__":
    kills = (KillConfig(replica=1, step=8),) if KIND == "restart" else ()
    options = helixrt.RunOptions(
        base=JobConfig(chaos=ChaosConfig(kill=kills), checks=ChecksConfig(strict_data=STRICT, same_streams="allowed" in KIND))
    )
    mesh = helixrt.Mesh(pp=2) if KIND == "stages" else helixrt.Mesh()
    replicas = 1 if KIND == "stages" else 2
    helixrt.run(train, replicas=replicas, mesh=mesh, storage=FOLDER, device="cpu", launcher="local", options=options)
