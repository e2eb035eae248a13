"""`python nonfinite_job.py SPOILT key=value …`: the main job, in which gradients of some batches are not finite.

SPOILT is JSON: [[replica, rank, position], …].
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

import helixrt
from helixrt.engines.staged import StagedModel
from helixrt.train import driver
from helixrt.train.config import TrainConfig
from helixrt.train.loop import LoopHooks, train
from helixrt.train.schema import command


def spoil(model: nn.Module, replica: int) -> None:
    """Have the engine of this rank's stage hand out what is not finite."""
    assert isinstance(model, StagedModel)
    engine = model.engine_in_use
    assert engine is not None
    begin, seed = engine.begin, engine.seed
    at = [0]  # position of the batch that is worked on
    me = (replica, model.place.stage)
    spoilt = {position for r, stage, position in json.loads(os.environ["SPOILT"]) if (r, stage) == me}

    def spoiling(on_bucket: Callable[[int], None]) -> None:
        def handed_out(index: int) -> None:
            if at[0] in spoilt:
                engine.buckets[index].view(-1)[-1] = math.nan
            on_bucket(index)

        begin(handed_out)

    def seeding(position: int) -> None:
        at[0] = position
        seed(position)

    engine.begin, engine.seed = spoiling, seeding  # type: ignore[method-assign]


def spoiling(session: helixrt.Session, config: dict[str, Any]) -> None:
    train(session, TrainConfig.from_plain(config), LoopHooks(ready=lambda model: spoil(model, session.replica)))


if __name__ == "__main__":
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "SPOILT": sys.argv[1]}
    sys.exit(command(sys.argv[2:], lambda config: driver.train(config, spoiling)))
