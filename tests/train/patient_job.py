"""`python patient_job.py key=value …`: the main job, in which whoever trains alone does so slowly.

A small model's survivor is done with all its steps before a lost replica's new process has even
imported torch. So a rank here takes a second for each batch while a replica that was ended by then
(`chaos.kill`, `chaos.fault`) has not begun to work again, and more for each after the first few, since that
may take long on a busy machine. Everything else is the job as it is.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import helixrt
from helixrt.job.chaos import SLOW
from helixrt.train import driver
from helixrt.train.config import TrainConfig
from helixrt.train.loop import LoopHooks, train
from helixrt.train.schema import command

PACE_S, QUICK, LONG_PACE_S = 1.0, 5, 3.0  # of so many batches, and of those after them


def anyone_missing(config: TrainConfig, replica: int, folder: Path, step: int) -> bool:
    """Whether another replica that was ended before this step has not begun to work again."""
    ends = [*config.chaos.kill, *(f for f in config.chaos.fault if f.kind != SLOW)]
    for other in range(config.mesh.replicas):
        lives = sum(e.replica == other and e.step < step for e in ends)
        flight = folder / "flight" / f"r{other}.pp0.inc{lives}.jsonl"
        if other != replica and lives and not (flight.exists() and '"kind":"work_begin"' in flight.read_text()):
            return True
    return False


def patient(session: helixrt.Session, config: dict[str, Any]) -> None:
    settings = TrainConfig.from_plain(config)
    assert session.folder is not None
    folder, record = session.folder, session._host._runtime.context.record  # type: ignore[attr-defined]
    slowed = 0  # batches since all were there

    def pace(position: int, tokens: torch.Tensor) -> None:
        nonlocal slowed
        missing = anyone_missing(settings, session.replica, folder, record.step)
        if missing:
            time.sleep(PACE_S if slowed < QUICK else LONG_PACE_S)
        slowed = slowed + 1 if missing else 0

    train(session, settings, LoopHooks(batch=pace))


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.exit(command(sys.argv[1:], lambda config: driver.train(config, patient)))
