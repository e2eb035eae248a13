"""`python lab_job.py key=value …`: the main job, whose batches take PACE_S longer, so that a test can change the network in the
meantime; until there is a file `enough` in the folder `output.root`.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch

import helixrt
from helixrt.train import driver
from helixrt.train.config import TrainConfig
from helixrt.train.loop import LoopHooks, train
from helixrt.train.schema import command

PACE_S = 1.0
ENOUGH = "enough"


def paced(session: helixrt.Session, config: dict[str, Any]) -> None:
    settings = TrainConfig.from_plain(config)
    enough = Path(settings.output.root, ENOUGH)

    def pace(position: int, tokens: torch.Tensor) -> None:
        if not enough.exists():
            time.sleep(PACE_S)

    train(session, settings, LoopHooks(batch=pace))


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:], lambda config: driver.train(config, paced)))
