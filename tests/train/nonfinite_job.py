"""`python nonfinite_job.py SPOILT key=value …`: the main job, in which gradients of some batches are not finite.

SPOILT is JSON: [[replica, rank, position], …]; position -1 spoils every batch.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from helixrt.replica.contracts import Launcher, RankSpec, WorkResult
from helixrt.replica.local_launcher import LocalLauncher
from helixrt.replica.orphan import die_with_parent
from helixrt.train import rank
from helixrt.train.config import TrainConfig
from helixrt.train.driver import Driver, new_run
from helixrt.train.engine import PipelineEngine
from helixrt.train.schema import command

RANK = "rank"


class SpoilingRank(rank.Rank):
    def _engine(self) -> PipelineEngine:
        engine = super()._engine()
        run = engine.run
        spoilt = {p for r, ring, p in json.loads(os.environ["SPOILT"]) if (r, ring) == (self.replica, self.ring)}

        def spoiling(position: int, on_bucket: Callable[[int], None]) -> WorkResult:
            def handed_out(index: int) -> None:
                if spoilt & {position, -1}:
                    engine.buckets[index].view(-1)[-1] = math.nan
                on_bucket(index)

            return run(position, handed_out)

        engine.run = spoiling  # type: ignore[method-assign]
        return engine


class SpoilingDriver(Driver):
    def launcher(self) -> Launcher:
        environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "SPOILT": sys.argv[1]}
        argv = [sys.executable, str(Path(__file__).resolve()), RANK]
        return LocalLauncher(argv, log_folder=self.run_.folder / "logs", environment=environment)


def train(config: TrainConfig) -> int:
    return SpoilingDriver(config, new_run(config)).run()


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        die_with_parent()
        rank.Rank = SpoilingRank  # type: ignore[misc]
        code = rank.run_rank(RankSpec.from_plain(json.loads(sys.stdin.read())))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(command(sys.argv[2:], train))
