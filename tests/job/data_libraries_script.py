"""`python data_libraries_script.py FOLDER LIBRARY REPLICAS UNTIL [kill] [resume] [workers]`: items 0 to 95 by webdataset,
litdata or mosaicml-streaming. Each replica appends the ids of each step that it commits to FOLDER/ids.REPLICA, as a line
`STEP ids`."""

from __future__ import annotations

import io
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import helixrt
from helixrt.job.config import ChaosConfig, JobConfig, KillConfig

FOLDER, LIBRARY, REPLICAS, UNTIL, OPTIONS = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
ITEMS, FILES, BATCH = 96, 12, 4
WORKERS = 2 if "workers" in OPTIONS else 0


def item(number: int) -> dict[str, int]:
    return {"id": number}


def made(folder: Path) -> None:
    """The data, in the library's form."""
    folder.mkdir()
    if LIBRARY == "webdataset":
        for file in range(FILES):
            with tarfile.open(folder / f"{file}.tar", "w") as tar:
                for number in range(file * ITEMS // FILES, (file + 1) * ITEMS // FILES):
                    text = str(number).encode()
                    info = tarfile.TarInfo(f"{number:05d}.cls")
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text))
    elif LIBRARY == "litdata":
        import litdata

        litdata.optimize(item, list(range(ITEMS)), str(folder), chunk_size=8, num_workers=1, verbose=False)
    else:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=200) as writer:
            for number in range(ITEMS):
                writer.write(item(number))


def loader_of(session: helixrt.Session) -> Any:
    folder = FOLDER / "data"
    if LIBRARY == "webdataset":
        import webdataset

        split, files = session.split_shards(), [str(folder / f"{file}.tar") for file in range(FILES)]
        data = webdataset.WebDataset(files, nodesplitter=split, shardshuffle=False).shuffle(20, rng=split.random)
        return DataLoader(data.decode().map(lambda each: {"id": each["cls"]}), batch_size=BATCH, num_workers=WORKERS)
    if LIBRARY == "litdata":
        import litdata

        dataset = session.over_streams(litdata.StreamingDataset(str(folder), shuffle=True))
        return DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS)
    from streaming import StreamingDataset

    streamed = session.over_streams(StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH))
    return DataLoader(streamed, batch_size=BATCH, num_workers=WORKERS)


def train(session: helixrt.Session) -> None:
    model = session.parallelize(torch.nn.Linear(1, 1))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=1e-3)])
    for step in session.steps(loader_of(session), until=UNTIL):
        for batch in step:
            ids = torch.as_tensor(batch["id"])
            step.backward(model(ids.float()[:, None] / ITEMS).square().mean())
        if step.commit().committed:
            with open(FOLDER / f"ids.{session.replica}", "a", encoding="utf-8") as file:
                print(step.number, *ids.tolist(), file=file)
        if "kill" in OPTIONS:  # the lost one is to come back before the end
            time.sleep(0.1)


if __name__ == "__main__":
    if not (FOLDER / "data").exists():
        made(FOLDER / "data")
    kills = (KillConfig(replica=1, step=UNTIL // 3),) if "kill" in OPTIONS else ()
    options = helixrt.RunOptions(base=JobConfig(chaos=ChaosConfig(kill=kills)), checkpoint_every=5)
    resume = "latest" if "resume" in OPTIONS else None
    helixrt.run(train, replicas=REPLICAS, storage=FOLDER / "out", options=options, resume=resume)
