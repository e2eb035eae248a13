"""`python dealt_job.py key=value …`: the main job in float64, whose ranks leave the windows of each batch in the folder
`output.root`: ids.REPLICA.SHARD.STAGE.jsonl, with the batch's position and how often the data was dealt.

In a run that is not resumed replica 0 waits in step 10 until replica 1, which was killed by then, is back.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import helixrt
from helixrt.engines.staged import StagedModel
from helixrt.train import driver, loop
from helixrt.train.config import TrainConfig
from helixrt.train.data import load_corpus, training_windows
from helixrt.train.engine import model_stages
from helixrt.train.schema import command

WAITS_IN, BACK = 10, "back"


def noting(session: helixrt.Session, config: dict[str, Any]) -> None:
    settings = TrainConfig.from_plain(config)
    root = Path(settings.output.root)
    loop.model_stages = partial(model_stages, dtype=torch.float64)  # type: ignore[assignment]
    windows = training_windows(load_corpus(settings.data), settings.data, session.streams)
    known = {windows[i].numpy().tobytes(): i for i in range(len(windows))}
    notes: list[Path] = []

    def ready(model: torch.nn.Module) -> None:
        assert isinstance(model, StagedModel)
        notes.append(root / f"ids.{session.replica}.{session.shard}.{model.place.stage}.jsonl")
        if session.replica == 1 and notes[0].exists():
            (root / BACK).touch()

    def note(position: int, tokens: torch.Tensor) -> None:
        ids = [known[row.numpy().tobytes()] for row in tokens]
        with open(notes[0], "a") as told:
            told.write(json.dumps([len(session.settings.deals), position, ids]) + "\n")
        assert session.step is not None
        if not settings.resume and session.replica == 0 and session.step.number == WAITS_IN:
            with session.busy("waiting for replica 1", 300.0):
                while not (root / BACK).exists():
                    time.sleep(0.05)

    loop.train(session, settings, loop.LoopHooks(batch=note, ready=ready))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda config: driver.train(config, noting)))
