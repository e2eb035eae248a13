"""`python nonfinite_job.py SPOILT key=value …`: the main job, in which gradients of some batches are not finite.

SPOILT is JSON: [[replica, rank, position], …]; position -1 spoils every batch.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from helixrt.engines.staged import StagedModel
from helixrt.job.driver import Driver, new_run
from helixrt.job.local_launcher import LocalLauncher
from helixrt.replica.contracts import Launcher, RankSpec
from helixrt.replica.orphan import die_with_parent
from helixrt.train import rank
from helixrt.train.config import TrainConfig
from helixrt.train.driver import program_of
from helixrt.train.schema import command

RANK = "rank"


class SpoilingRank(rank.Rank):
    def _ready(self, model: nn.Module) -> None:
        assert isinstance(model, StagedModel)
        engine = model.engine_in_use
        assert engine is not None
        begin, seed = engine.begin, engine.seed
        at = [0]  # position of the batch that is worked on
        spoilt = {
            p
            for r, group_rank, p in json.loads(os.environ["SPOILT"])
            if (r, group_rank) == (self.context.replica, self.context.group_rank)
        }

        def spoiling(on_bucket: Callable[[int], None]) -> None:
            def handed_out(index: int) -> None:
                if spoilt & {at[0], -1}:
                    engine.buckets[index].view(-1)[-1] = math.nan
                on_bucket(index)

            begin(handed_out)

        def seeding(position: int) -> None:
            at[0] = position
            seed(position)

        engine.begin, engine.seed = spoiling, seeding  # type: ignore[method-assign]


class SpoilingDriver(Driver):
    def launcher(self) -> Launcher:
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SPOILT": sys.argv[1]}
        argv = [sys.executable, str(Path(__file__).resolve()), RANK]
        return LocalLauncher(argv, log_folder=self.run_.folder / "logs", environment=environment)


def train(config: TrainConfig) -> int:
    return SpoilingDriver(config, new_run(config), program_of(config)).run()


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        die_with_parent()
        rank.Rank = SpoilingRank  # type: ignore[misc]
        code = rank.run_rank(RankSpec.from_plain(json.loads(sys.stdin.read())))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(command(sys.argv[2:], train))
